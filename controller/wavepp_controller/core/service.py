"""What one serving formation does for its requests: announce, admit, execute.

Owns the three for the life of a formation and is thrown away with it, so nothing of an ended formation
can leak into the next. Called by `pipeline` for every event that concerns a serving formation; `pump`
ends each of them. A daemon that breaks the protocol raises InternalError: the formation ends.
"""

from __future__ import annotations

from collections.abc import Iterable

from wavepp_controller.core import causes
from wavepp_controller.core.admission import Admission
from wavepp_controller.core.book import RequestBook
from wavepp_controller.core.config import ControllerConfig
from wavepp_controller.core.events import AnnounceRequest
from wavepp_controller.core.execution import Execution
from wavepp_controller.core.formation import PipelineFormation
from wavepp_controller.core.index import ReuseIndex
from wavepp_controller.core.inventory_check import InventoryCheck
from wavepp_controller.core.latency_model import LatencyModel
from wavepp_controller.core.modes import Gate
from wavepp_controller.core.outbox import Outbox
from wavepp_controller.core.policies import make_policy
from wavepp_controller.core.request import Request
from wavepp_controller.core.request_table import RequestInput, RequestState
from wavepp_controller.core.ring import Place
from wavepp_controller.core.rounds import RoundBook
from wavepp_controller.core.verdicts import PipelineFacts, check_plan, too_late
from wavepp_proto.errors import PipelineUnavailable, WaveppError, from_info
from wavepp_proto.terms import AnnounceAck, DaemonKey, ErrorInfo, HoldKey, Inventory, RoundOrdinal, Votes, WaveReport


class Service:
    def __init__(
        self,
        formation: PipelineFormation,
        facts: PipelineFacts,
        book: RequestBook,
        index: ReuseIndex,
        next_rounds: dict[DaemonKey, RoundOrdinal],
        model: LatencyModel,
        config: ControllerConfig,
        out: Outbox,
        now: float,
    ) -> None:
        self._formation, self._facts, self._book, self._out = formation, facts, book, out
        self.next_rounds = next_rounds
        """Round ordinals by daemon; they go on in the next formation."""
        self._patience_s = config.announce_deadline_ms / 1e3
        self.rounds = RoundBook(formation.daemons, config.round_deadline_ms / 1e3, next_rounds)
        self.admission = Admission(formation, index, self.rounds, config, out)
        policy = make_policy(config, model)
        self.execution = Execution(book.pipeline, formation, policy, model, config, out, now)
        self._gate = Gate(config.mode)
        self.inventories = InventoryCheck(
            formation, self.rounds, self.admission, self.execution, book, config.inventory_ms / 1e3, out, now
        )

    @property
    def idle(self) -> bool:
        """No request holds anything and no round is open."""
        return not self.admission.holders and not self.admission.round_open

    def announce(self, request: Request, now: float) -> bool:
        """Describe a hashed request to every daemon, or end it if this formation cannot serve it. False: only once
        they have acknowledged it something is possible."""
        if request.hashes is None or request.state is not RequestState.QUEUED:
            return False
        error = self._unfit(request)
        if error is not None:
            self._book.fail(request, RequestInput.FAIL, error, now)
            return False
        request.advance(RequestInput.ANNOUNCE, now)
        self._announce(request, request.hashes, now)
        return False

    def acked(self, key: DaemonKey, ack: AnnounceAck, now: float) -> None:
        for announced in ack.behind:
            self._acked(key, announced, now)
        if ack.refused is None:
            self._acked(key, ack.key, now)
        else:
            self._refused(key, ack.key, ack.refused, now)

    def announce_rides(self, announced: HoldKey, targets: Iterable[DaemonKey], now: float) -> None:
        """Its announcement goes in front of the next round to `targets`: as good as acknowledged by them."""
        request = self._announced(announced)
        if request is not None:
            request.current.unacked.difference_update(targets)
            self._acked_by_all(request, now)

    def _refused(self, key: DaemonKey, announced: HoldKey, error: ErrorInfo, now: float) -> None:
        """Only this request fails, with what the daemon said; every other daemon lets go of it."""
        request = self._announced(announced)
        if request is not None and key in request.current.unacked:
            self._out.count("announcements_refused")
            self.end(request, RequestInput.FAIL, from_info(error), now)

    def _announced(self, key: HoldKey) -> Request | None:
        """The request whose announcement is open; None if it ended meanwhile, or has a later attempt."""
        request = self._book.living.get(key.request_id)
        if request is None or request.key != key or request.state is not RequestState.ANNOUNCED:
            return None
        return request

    def _acked(self, key: DaemonKey, announced: HoldKey, now: float) -> None:
        request = self._announced(announced)
        if request is not None:
            request.current.unacked.discard(key)
            self._acked_by_all(request, now)

    def _acked_by_all(self, request: Request, now: float) -> None:
        """Unless somebody is still to acknowledge it."""
        if not request.current.unacked:
            request.advance(RequestInput.ALL_ACKED, now)
            self._book.ready(request)
            self.admission.enter(request, now)
            late = self._late(request, now)
            if late is not None:
                self.end(request, RequestInput.FAIL, late, now)

    def votes(self, key: DaemonKey, votes: Votes, now: float) -> bool:
        """False while votes of others are missing: nothing has become possible."""
        resolved = self.admission.votes(key, votes, now)
        for request in resolved.admitted:
            self._book.admitted(request, now)
            self.execution.admit(request)
        for request in resolved.unknown:
            self._announce_again(request, now)
        for request, error in resolved.stuck:
            self.end(request, RequestInput.FAIL, error, now)
        return not self.admission.round_open

    def report(self, key: DaemonKey, report: WaveReport, now: float) -> None:
        outcomes = self.execution.report(key, report, now)
        if outcomes.wave_ended:
            self._gate.wave_ended()
        for request, result in outcomes.finished:
            self._book.finish(request, result, now)
            self.admission.published(request, now)
            self._withdraw(request, now)
        for request, error in outcomes.voided:
            if request.living:
                self.end(request, RequestInput.FAIL, error, now)

    def place(self, key: DaemonKey, report: WaveReport) -> Place:
        """Whether the report is the next of its daemon; InternalError if its wave was never sent."""
        return self.execution.ring.place(key, report.fence.ordinal)

    def resume(self, key: DaemonKey, now: float) -> None:
        """Streams to a daemon are open again: send what it has not answered, each stream's in its order."""
        for request in self._book:
            waits = request.state is RequestState.ANNOUNCED and key in request.current.unacked
            if waits and request.hashes is not None:
                self._tell(request, request.hashes, [key])
        self._out.send(*self.rounds.again(key, now))
        self._out.send(*self.execution.again(key))

    def inventory(self, key: DaemonKey, inventory: Inventory, now: float) -> None:
        """Repair what the daemon holds too much or too little."""
        found = self.inventories.take(key, inventory, now)
        for release in found.orphans:
            self.admission.let_go(release)
        for request in found.lost:
            if request.state is RequestState.ADMITTED:
                self.execution.withdraw(request)
                self._announce_again(request, now)
            else:
                self.end(request, RequestInput.FAIL, causes.hold_lost(self._formation.daemons[key], request), now)

    def end(self, request: Request, given: RequestInput, error: WaveppError, now: float) -> None:
        """End a living request and let go of it everywhere."""
        self._book.fail(request, given, error, now)
        self._withdraw(request, now)

    def expire(self, now: float) -> None:
        for request in self._book:
            if request.state is RequestState.ANNOUNCED and now - request.current.announced_at > self._patience_s:
                self._out.count("announcements_lost")
                self._announce_again(request, now)
        self.admission.expire(now)
        self.inventories.expire(now)

    def pump(self, now: float) -> None:
        """Do whatever has become possible, and the admission mode allows: a round, then waves."""
        admission, execution = self.admission, self.execution
        may_prepare = self._gate.may_prepare(in_flight=execution.ring.in_flight, running=len(execution.running))
        admission.pump(now, closed=not may_prepare)
        may_send = self._gate.may_send(round_open=admission.round_open)
        execution.pump(now, closed=not may_send, more_soon=admission.more_soon)
        self._gate.pumped(round_begun=admission.round_open, in_flight=execution.ring.in_flight)

    def next_deadlines(self) -> list[float]:
        deadlines = (
            self.admission.next_deadline(),
            self.execution.next_deadline(),
            self.inventories.next_deadline(),
        )
        return [at for at in deadlines if at is not None]

    @property
    def stalled(self) -> bool:
        """Something waits, nothing runs and nothing is held: only a leak can keep it from room (I5)."""
        return bool(self.admission.ready) and self.idle and not self._formation.draining

    def check(self) -> list[str]:
        return [*self.admission.check(self._book), *self.execution.check()]

    def _late(self, request: Request, now: float) -> WaveppError | None:
        """The verdict on a request that has become ready, by the measured pace."""
        pace = self.execution.pace
        if too_late(request, pace.seconds_for(self._book.living_tokens), now) is None:
            return None  # the usual case, told without walking the order
        return too_late(request, pace.seconds_for(self.admission.tokens_before(request)), now)

    def _unfit(self, request: Request) -> WaveppError | None:
        scope, facts = request.scope, self._facts
        if (scope.model, scope.layout) != (facts.model.fingerprint, facts.layout):
            name, value, limit = "layout", facts.layout, scope.layout
            if scope.model != facts.model.fingerprint:
                name, value, limit = "model", facts.model.fingerprint, scope.model
            return PipelineUnavailable(
                f"pipeline {self._book.pipeline} serves another {name} than when the request came",
                field=name,
                value=value,
                limit=limit,
            )
        try:
            check_plan(request.prefill, facts)
        except WaveppError as error:
            return error
        return None

    def _announce(self, request: Request, hashes: bytes, now: float) -> None:
        request.current.announced, request.current.announced_at = True, now
        request.current.unacked = set(self._formation.daemons)
        self._tell(request, hashes, self._formation.daemons)

    def _tell(self, request: Request, hashes: bytes, keys: Iterable[DaemonKey]) -> None:
        daemons = [(key, self._formation.daemons[key]) for key in keys]
        targets = tuple(
            (key, daemon.fence(), key.stage == 0 or (daemon.reply is not None and daemon.reply.needs_tokens))
            for key, daemon in daemons
        )
        self._out.send(AnnounceRequest(request.key, request.prefill, hashes, request.prefill.trace, targets))

    def _announce_again(self, request: Request, now: float) -> None:
        """A HoldKey is announced at most once: what a daemon lost is told again as the next attempt."""
        self.admission.release(request, now)
        self._book.start_over(request, now)
        request.advance(RequestInput.NOT_ANNOUNCED, now)
        if request.hashes is not None:
            self._announce(request, request.hashes, now)

    def _withdraw(self, request: Request, now: float) -> None:
        self.execution.withdraw(request)
        self.admission.release(request, now)
