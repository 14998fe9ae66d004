"""Who is prepared next, among requests that hold nothing (DESIGN.md).

Owns the ready order, the parked requests and their hints for one formation. Takes the first of the order as
long as there is a lane for it; lets it wait behind a holder that computes its prefix; tries an oversized one
alone. While the first waits for capacity nothing behind it is prepared. Called by `admission`, whose holders
it reads and adds to; does not own rounds nor releases.
"""

from __future__ import annotations

from wavepp_controller.core.config import ControllerConfig
from wavepp_controller.core.demand import Demand
from wavepp_controller.core.formation import PipelineFormation
from wavepp_controller.core.hints import Hints
from wavepp_controller.core.index import ReuseIndex
from wavepp_controller.core.order import goes_before
from wavepp_controller.core.outbox import Outbox
from wavepp_controller.core.ready import ReadyOrder
from wavepp_controller.core.request import Request
from wavepp_controller.core.request_table import RequestInput, RequestState
from wavepp_controller.core.sharing import Sharing


class Choosing:
    def __init__(
        self,
        formation: PipelineFormation,
        index: ReuseIndex,
        config: ControllerConfig,
        demand: Demand,
        holders: dict[str, Request],
        out: Outbox,
    ) -> None:
        self._formation, self._index, self._demand = formation, index, demand
        self._holders, self._lanes, self._out = holders, config.lanes, out
        self._hints = Hints(index, attention=demand.attention, recurrent=demand.policy.most > 0)
        self.ready = ReadyOrder(formation.daemons, config.most_bypasses, config.aged_every)
        self.sharing = Sharing(demand.policy, config)
        self._alone: Request | None = None
        """The oversized request that is being prepared: nobody joins it before it is admitted."""

    def enter(self, request: Request, now: float) -> None:
        """A request is hashed and announced everywhere: hint it and give it its place."""
        self._hints.refresh(request, now)
        self.ready.add(request)

    def leave(self, request: Request, now: float) -> None:
        """It ended, or starts over; it may stand in no order at all."""
        self.ready.discard(request)
        self._unpark(request, now)

    def published(self, request: Request, now: float) -> None:
        """The request has finished: every stage has published its full blocks and snapshots."""
        self._hints.published(request, now)

    def bring_back(self, now: float) -> None:
        """Whoever need not wait behind another any longer is ready again, where it stood."""
        for request in self.sharing.shown(self._holders, self._index):
            self._unpark(request, now)
            request.advance(RequestInput.SHOWN, now)
            self.ready.add(request)

    def choose(self, entries: int, now: float) -> list[Request]:
        """At most `entries` requests to prepare, in order; they are holders now."""
        chosen: list[Request] = []
        tokens = self._formation.round_tokens
        if self._alone is not None and not self._alone.claims_headroom:
            self._alone = None
        if self._formation.draining or self._alone is not None:
            return chosen
        while len(chosen) < entries and len(self._holders) < self._lanes:
            head = self.ready.first(now)
            if head is None:
                break
            self._hints.refresh(head, now)
            if self._park(head, now):
                continue
            alone = self._demand.oversized(head)
            if alone and any(not holder.current.materialised for holder in self._holders.values()):
                break  # it may use the headroom once everybody's blocks are taken; nothing overtakes it meanwhile
            tokens -= head.prompt_tokens
            if chosen and tokens < 0:
                break
            retried = head.state is RequestState.WAITING
            self._take(head, alone, now)
            chosen.append(head)
            if retried or alone:
                break  # should it run short again, nothing behind it may have slipped past
        return chosen

    def next_retry(self) -> float | None:
        closed = self._formation.draining or len(self._holders) >= self._lanes
        return None if closed else self.ready.next_retry()

    def tokens_before(self, request: Request) -> int:
        """Tokens still to compute of everything that is served before a ready request, as far as is known."""
        tokens = sum(one.tokens_left for one in self._holders.values() if not goes_before(request, one))
        for ready in self.ready:
            if ready is request:
                break
            tokens += ready.tokens_left
        return tokens

    def places(self, request: Request) -> int:
        """In how many of its orders the request stands."""
        return (request in self.ready) + (request in self.sharing)

    def check(self) -> list[str]:
        return [*self.ready.check(), *self.sharing.check(self._holders)]

    def _take(self, request: Request, alone: bool, now: float) -> None:
        self.ready.take(request)
        request.current.begin_rounds()
        request.current.ignore_headroom = alone
        if alone:
            self._alone = request
        request.advance(RequestInput.PREPARE, now)
        self._holders[request.id] = request

    def _park(self, head: Request, now: float) -> bool:
        """Let `head` wait behind a holder if that wins it more than its hint; True if it does."""
        offer = self.sharing.offer(head, self._holders.values())
        if offer is None:
            return False
        if offer.published:
            head.current.candidate = offer.boundary
            return False
        self.ready.discard(head)
        self.sharing.park(head, offer, now)
        self._out.count("parked")
        return True

    def _unpark(self, request: Request, now: float) -> None:
        if request.current.behind is not None:
            self._out.count("sharing_wait_ms", self.sharing.leave(request, now))
