"""Which requests are prepared, in what order, and what becomes of the votes (DESIGN.md section 6).

Owns the ready order, the holders and the pending releases of one formation. One prepare/revise round is
in flight; what becomes ready meanwhile shares the next. Strict first come first served: while the
first waits for capacity nothing behind it is prepared. Does not own wires (`rounds`), nor waves.

    ready (HINTED, WAITING) ──prepare──▶ holders (PREPARING) ──agreed──▶ holders (ADMITTED, RUNNING)
        ▲                                   │ no room, round lost                │ ended
        └── release on ALL daemons ◀────────┘                release on ALL ◀────┘
"""

from __future__ import annotations

from dataclasses import dataclass, field

from wavepp_controller.core import traced
from wavepp_controller.core.book import RequestBook
from wavepp_controller.core.config import ControllerConfig
from wavepp_controller.core.formation import PipelineFormation
from wavepp_controller.core.fresh import FreshChains
from wavepp_controller.core.index import ReuseIndex
from wavepp_controller.core.outbox import Outbox
from wavepp_controller.core.ready import ReadyOrder, room
from wavepp_controller.core.reconcile import Agreed, GiveUp, Lower, decide, held_after
from wavepp_controller.core.request import Request, Shortage
from wavepp_controller.core.request_table import RequestInput, RequestState
from wavepp_controller.core.rounds import Entries, OpenRound, RoundBook
from wavepp_proto import limits
from wavepp_proto.errors import InternalError
from wavepp_proto.terms import DaemonKey, Prepare, Release, Revise, Votes


@dataclass(slots=True)
class Resolved:
    """What a finished round decided, for the caller to carry on."""

    admitted: list[Request] = field(default_factory=list)
    unknown: list[Request] = field(default_factory=list)
    """Some daemon does not know them: to be announced again, under the next attempt."""
    stuck: list[tuple[Request, InternalError]] = field(default_factory=list)
    """Reconciling them made no progress: a daemon breaks the protocol."""


class Admission:
    def __init__(
        self,
        formation: PipelineFormation,
        index: ReuseIndex,
        rounds: RoundBook,
        config: ControllerConfig,
        out: Outbox,
    ) -> None:
        self._formation, self._index, self._rounds = formation, index, rounds
        self._config, self._out = config, out
        self._retry_s = config.capacity_retry_ms / 1e3
        self.ready = ReadyOrder(formation.daemons)
        self.holders: dict[str, Request] = {}
        """PREPARING, ADMITTED and RUNNING, by request id; at most `lanes`."""
        self._releases: list[Release] = []
        self._fresh = FreshChains()

    @property
    def round_open(self) -> bool:
        return self._rounds.open is not None

    def next_deadline(self) -> float | None:
        """When something here must be looked at again without any event."""
        if self._rounds.open is not None:
            return self._rounds.open.deadline
        closed = self._formation.draining or len(self.holders) >= self._config.lanes
        return None if closed else self.ready.next_retry()

    def enter(self, request: Request, now: float) -> None:
        """A request is hashed and announced everywhere: hint it and give it its place."""
        self._hint(request, now)
        self.ready.add(request)

    def published(self, request: Request, now: float) -> None:
        """The request has finished: every stage has published its full blocks."""
        if request.chain is not None:
            self._fresh.finished(request.chain, now)

    def release(self, request: Request, *, ended: bool = True) -> None:
        """Let go of the request on every daemon, whatever it holds there, in whichever state it is.

        Unless `ended`, daemons keep its announcement: it will be prepared again.
        """
        self.ready.discard(request)
        self.holders.pop(request.id, None)
        if request.current.announced:
            self._releases.append(Release(request.key, request.current.last_wave, ended))

    def votes(self, key: DaemonKey, votes: Votes, now: float) -> Resolved:
        """Take one daemon's votes; decides once all are there."""
        self._formation.daemons[key].has(votes.capacity)
        if not self._rounds.answer(key, votes, now):
            self._out.count("late_votes")
        if self._rounds.open is None or not self._rounds.open.complete:
            return Resolved()
        return self._resolve(self._rounds.close(), now)

    def expire(self, now: float) -> None:
        """Past its deadline, a round is resolved by release on ALL daemons, the silent one included."""
        if self._rounds.open is None or now < self._rounds.open.deadline:
            return
        lost = self._rounds.close()
        self._out.count("rounds_expired")
        for request in _preparing(lost):
            traced.round_lost(request, lost, now)
            self._wait(request, RequestInput.ROUND_LOST, now)

    def pump(self, now: float) -> None:
        """Begin the next round if there is one to begin; else send pending releases alone.

        While a round is open they wait for the next, which frees what they held before it asks for more.
        """
        if self._rounds.open is not None:
            return
        releases, self._releases = self._releases, []
        revising = [r for r in self.holders.values() if r.current.revise_to is not None]
        revising = revising[: limits.MAX_ROUND_ENTRIES]
        preparing = self._choose(limits.MAX_ROUND_ENTRIES - len(revising), now)
        if revising or preparing:
            self._begin(revising, preparing, releases, now)
        elif releases:
            self._out.count("rounds_release_only")
            self._out.send(*self._rounds.release_only(releases, now))

    def check(self, book: RequestBook) -> list[str]:
        """Findings in words: every hold has its request, every request its place, nothing is forgotten."""
        findings = []
        opened = self._rounds.open
        in_round = {id(request) for request in opened.requests} if opened is not None else set()
        for request in book.living.values():
            waits = request.state in (RequestState.HINTED, RequestState.WAITING)
            if waits != (request in self.ready) or request.holding != (request.id in self.holders):
                findings.append(f"{request.id} is {request.state.value} and in the wrong place")
            revising = request.current.revise_to is not None
            if request.state is RequestState.PREPARING and not revising and id(request) not in in_round:
                findings.append(f"{request.id} prepares in no round")
        if self.holders.keys() - book.living.keys() or len(self.ready) > len(book.waiting):
            findings.append("a request that ended is still ready or holds something")
        if len(self.holders) > self._config.lanes:
            findings.append(f"{len(self.holders)} holders are more than {self._config.lanes} lanes")
        if self._releases and opened is None:
            findings.append("releases were not sent")
        idle = opened is None and not self.holders and not self._formation.draining
        if idle and (head := self.ready.head) is not None and head.state is RequestState.HINTED:
            findings.append("something is ready, nothing runs, and no round was begun")
        places = [request.place for request in self.ready]
        if places != sorted(set(places)):
            findings.append("the ready order is not first come first served")
        return findings

    # --- building a round -----------------------------------------------------------------------

    def _choose(self, entries: int, now: float) -> list[Request]:
        """Requests to prepare, in order; they become holders."""
        chosen: list[Request] = []
        if self._formation.draining:
            return chosen
        while len(chosen) < entries and len(self.holders) < self._config.lanes:
            head = self.ready.take(now)
            if head is None:
                break
            retried = head.state is RequestState.WAITING
            self._hint(head, now)
            head.current.begin_rounds()
            head.advance(RequestInput.PREPARE, now)
            self.holders[head.id] = head
            chosen.append(head)
            if retried:
                break  # should it run short again, nothing behind it may have slipped past
        return chosen

    def _begin(self, revising: list[Request], preparing: list[Request], releases: list[Release], now: float) -> None:
        entries = {key: Entries() for key in self._formation.daemons}
        for request in revising:
            target = request.current.revise_to
            for key, held in request.current.held.items():
                if target is not None and (held.endpoint > target or not held.committed):
                    entries[key].revises.append(Revise(request.key, target))
            request.current.revise_to = None
        for request in preparing:
            for wanted in entries.values():
                wanted.prepares.append(Prepare(request.key, request.current.candidate))
        for request in (*revising, *preparing):
            request.current.rounds += 1
        self._out.count("rounds")
        self._out.send(*self._rounds.begin([*revising, *preparing], entries, releases, now))

    def _hint(self, request: Request, now: float) -> None:
        """Longest prefix that every daemon is thought to hold; again if the index knows more by now."""
        version = (self._index.version, self._fresh.version)
        if request.current.hinted_version == version or request.chain is None:
            return
        request.current.hinted_version = version
        blocks = self._index.hint_blocks(request.chain)
        blocks = self._fresh.extend(request.chain, blocks, now)
        request.current.candidate = min(blocks * request.block_tokens, request.cap)
        traced.hinted(request, now)

    # --- resolving a round ----------------------------------------------------------------------

    def _resolve(self, done: OpenRound, now: float) -> Resolved:
        resolved = Resolved()
        for request in _preparing(done):
            votes = done.votes_on(request.key)
            traced.round_done(request, done, votes, now)
            for key, vote in votes.items():
                request.current.held[key] = held_after(vote)
                if request.current.rounds == 1:  # later votes come after this request's own lowering
                    request.current.note_own_hit(key.stage, min(vote.own_hit, request.cap))
            match decide(votes, request.current.held):
                case Agreed(endpoint):
                    self._agree(request, endpoint, now)
                    resolved.admitted.append(request)
                case GiveUp(RequestInput.NOT_ANNOUNCED):
                    self._out.count("not_announced")
                    resolved.unknown.append(request)
                case GiveUp(given, daemons):
                    self._note_shortages(request, done, daemons)
                    self._wait(request, given, now)
                case Lower() as lower:
                    if not self._lower(request, lower, now):
                        resolved.stuck.append((request, _no_progress(request, lower)))
        return resolved

    def _agree(self, request: Request, endpoint: int, now: float) -> None:
        request.advance(RequestInput.COMMIT, now)
        request.current.admit(endpoint, now)

    def _lower(self, request: Request, lower: Lower, now: float) -> bool:
        """Revise in the next round; False if this one brought nobody closer."""
        left = (lower.endpoint, len(lower.daemons))
        if request.current.left_to_agree is not None and left >= request.current.left_to_agree:
            return False
        request.current.left_to_agree = left
        request.current.revise_to = lower.endpoint
        if request.current.differed_at is None:
            request.current.differed_at = now
        request.advance(RequestInput.REVISE, now)
        return True

    def _note_shortages(self, request: Request, done: OpenRound, daemons: tuple[DaemonKey, ...]) -> None:
        self._out.count("no_capacity")
        for key in daemons:
            answer = done.answers[key]
            missing = sum(short.blocks for short in answer.votes[request.key].shortfall)
            wanted = room(answer.capacity) + max(1, missing)
            request.current.waited_for.add(key.stage)
            request.current.shortages[key] = Shortage(answer.capacity.seq, wanted)

    def _wait(self, request: Request, given: RequestInput, now: float) -> None:
        """Back to the ready order, holding nothing anywhere."""
        self.release(request, ended=False)
        request.advance(given, now)
        request.current.retry_at = now + self._retry_s
        self.ready.add(request)


def _preparing(done: OpenRound) -> list[Request]:
    """Requests of the round that still want its answer: the others ended meanwhile, and were released."""
    return [request for request in done.requests if request.state is RequestState.PREPARING]


def _no_progress(request: Request, lower: Lower) -> InternalError:
    stages = " ".join(str(key.stage) for key in lower.daemons)
    return InternalError(
        f"stages {stages} neither lowered nor committed request {request.id} at {lower.endpoint}",
        field="endpoint",
        value=lower.endpoint,
        stages=stages,
    )
