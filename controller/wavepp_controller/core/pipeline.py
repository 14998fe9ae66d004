"""One pipeline: forms, serves, ends and forms again (DESIGN.md sections 6, 10 and 11).

Owns what happens to requests when a formation begins or ends, and the one gate for what daemons say.
Who forms when is in `forming`, the work of a serving formation in `service`, the door in `machine`.

    forming ──all places taken──▶ joining ──all Joined──▶ serving ◀─┐ streams broke: opened again
       ▲                             │ JoinFailed, late      │ └────┘
       └──────── backoff ◀───────────┴───────────────────────┘ lost, silent, replaced, failed report, asked
"""

from __future__ import annotations

from collections.abc import Callable

from wavepp_controller.core import causes, digests
from wavepp_controller.core.book import RequestBook
from wavepp_controller.core.config import ControllerConfig
from wavepp_controller.core.events import (
    AnnounceAcked,
    BeatArrived,
    DigestArrived,
    Hashed,
    InventoryArrived,
    Joined,
    JoinFailed,
    MemberUp,
    ReformAsked,
    ReopenStreams,
    ReportArrived,
    StreamLost,
    StreamsReopened,
    VotesArrived,
)
from wavepp_controller.core.formation import Daemon, PipelineFormation
from wavepp_controller.core.forming import Forming
from wavepp_controller.core.index import ReuseIndex, short_chain
from wavepp_controller.core.outbox import Outbox
from wavepp_controller.core.request import Request
from wavepp_controller.core.request_table import RequestInput, RequestState
from wavepp_controller.core.resume import resumable
from wavepp_controller.core.ring import Place
from wavepp_controller.core.service import Service
from wavepp_proto.errors import (
    FormationEnded,
    InternalError,
    JoinRefused,
    LinkFault,
    StageLost,
    StaleMessage,
    WaveppError,
    from_info,
)
from wavepp_proto.terms import DaemonKey, Epoch, Fence, PipelineId, RoundOrdinal, WaveOrdinal

STALL_S = 5.0
"""Longer than any retry for room takes when nothing is held: from then on the controller is not ready."""
LINK_GRACE_S = 0.25
"""Between a link fault and the stream of the neighbour that died there lie milliseconds."""
ROUND_PATIENCE = 2
"""Round deadlines after which an unanswered round, or its votes, were lost on the way: streams are opened again."""
SWEEP_SHARDS = 1
"""Shards of the index swept per tick: about half a millisecond at a million blocks."""


class PipelineMachine:
    def __init__(self, pipeline: PipelineId, config: ControllerConfig, out: Outbox) -> None:
        self.id, self._config, self._out = pipeline, config, out
        self.forming = Forming(pipeline, config, out)
        self.book = RequestBook(pipeline, out)
        self.index = ReuseIndex()
        self.service: Service | None = None
        self.stalled_since: float | None = None

    @property
    def serving(self) -> bool:
        return self.service is not None

    @property
    def state(self) -> str:
        """forming, serving or broken (a fault, and no formation since)."""
        if self.service is not None:
            return "serving"
        return "broken" if self.forming.last_fault is not None and self.forming.present is None else "forming"

    def stalled(self, now: float) -> bool:
        return self.stalled_since is not None and now - self.stalled_since > STALL_S

    # --- authority, membership, formation -------------------------------------------------------

    def lead(self, epoch: Epoch, now: float) -> None:
        self.forming.lead(epoch, now)
        self.consider(now)

    def stand_down(self, error: WaveppError, now: float) -> None:
        """Leadership is lost: nothing more is sent, every living request fails."""
        self._drop_service()
        self.forming.drop({})
        self.forming.lead(None, now)
        for request in self.book:
            self.book.fail(request, RequestInput.FAIL, error, now)

    def member_up(self, event: MemberUp) -> None:
        """A later incarnation at the same address takes its place over at once: the earlier one is no more."""
        if self.forming.members.up(event.record):
            self.forming.members_changed(event.now)
        superseded = self.forming.superseded()
        if superseded is not None:
            self._out.count("incarnations_replaced")
            self._lose(superseded, f"incarnation {event.record.incarnation} replaced it", event.now)
            self.forming.hurry(event.now)
        self.consider(event.now)

    def consider(self, now: float) -> None:
        formation = self.forming.consider(now)
        if formation is not None:
            digests.attach(self.index, formation)

    def joined(self, event: Joined) -> None:
        daemon = self._daemon(event.key, event.reply.fence)
        formation = self.forming.present
        if daemon is None or formation is None or daemon.reply is not None:
            return
        try:
            complete = formation.joined(daemon, event.reply, event.now)
        except JoinRefused as error:
            self._refuse_join(daemon, error, event.now)
            return
        if complete:
            self._serve(formation, event.now)

    def join_failed(self, event: JoinFailed) -> None:
        formation = self.forming.present
        if formation is None or event.formation != formation.number or event.key not in formation.daemons:
            self._out.count("stale_messages")
            return
        self._refuse_join(formation.daemons[event.key], from_info(event.error), event.now)

    def stream_lost(self, event: StreamLost) -> None:
        """While serving, streams are opened again; a daemon that cannot be reached then is silent, and lost."""
        formation = self.forming.present
        if formation is None or event.formation != formation.number or event.key not in formation.daemons:
            self._out.count("stale_messages")
            return
        daemon = formation.daemons[event.key]
        # beside a link fault, the stream that breaks tells which neighbour died
        if self.service is not None and resumable(event) and formation.symptom is None:
            self._reopen(daemon, event.error.message, event.now)
            return
        unreachable = event.error.reason == StageLost.reason
        self._lose(daemon, event.error.message, event.now, hold=unreachable)

    def streams_reopened(self, event: StreamsReopened) -> None:
        """Send again what was not answered, and compare holds: nobody knows what got lost."""
        formation, service = self.forming.present, self.service
        present = formation is not None and event.formation == formation.number and event.key in formation.daemons
        if service is None or formation is None or not present:
            self._out.count("stale_messages")
            return
        daemon = formation.daemons[event.key]
        daemon.streams.opened(event.now)
        self._out.count("streams_reopened")
        service.resume(daemon.key, event.now)
        digests.resume(self.index, daemon, event.now, self._out)
        service.inventories.ask(daemon.key, event.now)
        self._guarded(_nothing, event.now)

    def reform(self, event: ReformAsked) -> None:
        """Raises what `Forming.reform` raises; else the pipeline forms again at once."""
        self.forming.reform(event)
        if self.forming.present is not None:
            self.end_formation(FormationEnded("an operator asked for another shape", pipeline=self.id), event.now)
        self.forming.hurry(event.now)
        self.consider(event.now)

    def end_formation(self, cause: WaveppError, now: float) -> None:
        """Requests that held cache fail, or try again if they may; the others queue again."""
        rounds = self._drop_service()
        self.forming.end(cause, now, rounds)
        for request in self.book:
            self.book.outlive(request, cause, self._config.attempts, now)
        self.consider(now)

    # --- requests -------------------------------------------------------------------------------

    def hashed(self, request: Request, event: Hashed) -> None:
        if request.hashes is not None:
            return
        request.hashed(event.block_hashes, short_chain(event.block_hashes), event.now)
        service = self.service
        if service is not None:
            self._guarded(lambda: service.announce(request, event.now), event.now)

    def end(self, request: Request, given: RequestInput, error: WaveppError, now: float) -> None:
        """End a living request, in whichever state, and let go of it everywhere."""
        service = self.service
        if service is None:
            self.book.fail(request, given, error, now)
        else:
            self._guarded(lambda: service.end(request, given, error, now), now)

    # --- what daemons say -----------------------------------------------------------------------

    def acked(self, event: AnnounceAcked) -> None:
        service = self.service
        if self._daemon(event.key, event.ack.fence) is not None and service is not None:
            self._guarded(lambda: service.acked(event.key, event.ack, event.now), event.now)

    def voted(self, event: VotesArrived) -> None:
        daemon, service = self._daemon(event.key, event.votes.fence), self.service
        if daemon is not None and service is not None:
            before = service.rounds.answered(event.key)
            self._guarded(lambda: service.votes(event.key, event.votes, event.now), event.now)
            if service.rounds.answered(event.key) > before:
                daemon.streams.worked()

    def beat(self, event: BeatArrived) -> None:
        daemon = self._daemon(event.key, event.beat.fence)
        if daemon is not None:
            daemon.last_heard = event.now
            daemon.streams.beat(event.now, self._config.silence_ms / 1e3)
            daemon.has(event.beat.capacity)
            if event.beat.draining and not daemon.draining:
                daemon.draining = True
                self._out.count("daemons_draining")
            self._guarded(_nothing, event.now)
            self._let_go(event.now)

    def reported(self, event: ReportArrived) -> None:
        daemon, service = self._daemon(event.key, event.report.fence), self.service
        if daemon is None or service is None:
            return
        daemon.last_heard = event.now
        self._guarded(lambda: self._take_report(service, daemon, event), event.now)

    def inventory(self, event: InventoryArrived) -> None:
        daemon, service = self._daemon(event.key, event.inventory.fence), self.service
        if daemon is not None and service is not None:
            self._guarded(lambda: self._take_inventory(service, daemon, event), event.now)

    def digest(self, event: DigestArrived) -> None:
        formation = self.forming.present
        daemon = formation.daemons.get(event.key) if formation is not None else None
        if daemon is None or daemon.record.incarnation != event.digest.incarnation:
            self._out.count("stale_messages")
            return
        digests.read(self.index, daemon, event.digest, event.now, self._out)
        self._guarded(_nothing, event.now)

    def reported_wave(self, key: DaemonKey) -> WaveOrdinal:
        formation, service = self.forming.present, self.service
        known = service is not None and formation is not None and key in formation.daemons
        return service.execution.ring.reported(key) if service is not None and known else WaveOrdinal(0)

    # --- time -----------------------------------------------------------------------------------

    def tick(self, now: float, pause: float) -> None:
        """Look at every deadline; for `pause` seconds the controller itself was not listening."""
        self.index.sweep(SWEEP_SHARDS)
        self._check_formation(now, pause)
        for request in self.book.expired(now):
            if request.living:  # ending one may have ended the formation, and others with it
                self.end(request, RequestInput.EXPIRE, causes.late(request), now)
        service = self.service
        if service is not None:
            self._guarded(lambda: self._expire(service, now), now)
        else:
            self._give_up_waiting(now)
            self.consider(now)
        self._watch_stall(now)

    def next_deadline(self, now: float) -> float | None:
        times = [self.book.next_deadline(), self.forming.next_deadline(now)]
        formation = self.forming.present
        if formation is not None and self.service is not None:
            times += [*self.service.next_deadlines(), formation.next_silence(self._config.silence_ms / 1e3)]
            times += [one.streams.reopen_at for one in formation.daemons.values()]
            if formation.symptom is not None:
                times.append(formation.symptom_until)
        return min((at for at in times if at is not None), default=None)

    def check(self) -> list[str]:
        """Findings in words; empty when every invariant of this pipeline holds."""
        findings = [*self.book.check(), *self.index.check()]
        if self.service is not None:
            findings += self.service.check()
        else:
            queued = RequestState.QUEUED
            findings += [f"{r.id} is {r.state.value} without service" for r in self.book if r.state is not queued]
        return [f"pipeline {self.id}: {finding}" for finding in findings]

    # --- inner steps ----------------------------------------------------------------------------

    def _daemon(self, key: DaemonKey, fence: Fence) -> Daemon | None:
        """The gate: None, counted, for whatever does not belong to the present formation."""
        daemon = self.forming.present.daemons.get(key) if self.forming.present is not None else None
        if daemon is not None:
            try:
                daemon.check(fence)
            except StaleMessage:
                daemon = None
        if daemon is None:
            self._out.count("stale_messages")
        return daemon

    def _guarded(self, work: Callable[[], None], now: float) -> None:
        """Run `work` on the serving formation, then whatever became possible; a broken rule ends it."""
        try:
            work()
            if self.service is not None:
                self.service.pump(now)
        except (InternalError, FormationEnded) as error:
            self._out.count("formations_broken")
            self.end_formation(error, now)

    def _serve(self, formation: PipelineFormation, now: float) -> None:
        facts, rounds = self.forming.serve(formation)
        service = Service(formation, facts, self.book, self.index, rounds, self._config, self._out, now)
        self.service = service
        digests.expect(self.index, formation, now)
        for request in self.book:
            service.announce(request, now)
        self._guarded(_nothing, now)

    def _take_report(self, service: Service, daemon: Daemon, event: ReportArrived) -> None:
        match service.place(daemon.key, event.report):
            case Place.AGAIN:
                self._out.count("duplicate_reports")
            case Place.AHEAD if event.report.done:
                self._out.count("report_gaps")
                if not daemon.streams.reconnecting:
                    self._reopen(
                        daemon, f"a report before that of wave {event.report.fence.ordinal} is missing", event.now
                    )
            case _ if not event.report.done:
                self._failed(event)
            case _:
                daemon.streams.worked()
                self.forming.worked()
                service.report(daemon.key, event.report, event.now)

    def _take_inventory(self, service: Service, daemon: Daemon, event: InventoryArrived) -> None:
        if not service.inventory(daemon.key, event.inventory, event.now) and not daemon.streams.reconnecting:
            self._out.count("report_gaps")
            self._reopen(daemon, "a report that it gave is missing", event.now)

    def _reopen(self, daemon: Daemon, why: str, now: float) -> None:
        """Its streams broke, or lost something: open them again, or give up after too many tries."""
        self._out.count("streams_lost")
        if not daemon.streams.broke(now):
            self._lose(daemon, f"its streams broke {daemon.streams.failures} times in a row: {why}", now)
            return
        if self.service is not None:
            self.service.inventories.forget(daemon.key)
        self._ask_streams(now)

    def _ask_streams(self, now: float) -> None:
        for daemon in self.forming.present.daemons.values() if self.forming.present is not None else ():
            if self.service is not None and daemon.streams.due(now):
                daemon.streams.asked()
                reported = self.service.execution.ring.reported(daemon.key)
                self._out.send(ReopenStreams(daemon.key, daemon.fence(), reported))

    def _refuse_join(self, daemon: Daemon, error: WaveppError, now: float) -> None:
        self.forming.lost(daemon.key, daemon.record.incarnation, now, hold=False)
        self._out.count("joins_failed")
        self.end_formation(error, now)

    def _drop_service(self) -> dict[DaemonKey, RoundOrdinal]:
        rounds = self.service.next_rounds if self.service is not None else {}
        self.service = None
        self.stalled_since = None
        for key in self.forming.present.daemons if self.forming.present is not None else ():
            self.index.detach(key)
        return rounds

    def _failed(self, event: ReportArrived) -> None:
        """A fault ends the formation: at once, or after a look for the dead neighbour behind a lost link."""
        formation, error = self.forming.present, causes.failed_report(event.key, event.report)
        if formation is None or event.report.error is None or event.report.error.reason != LinkFault.reason:
            self.end_formation(error, event.now)
        elif formation.symptom is None:
            formation.symptom, formation.symptom_until = error, event.now + LINK_GRACE_S

    def _lose(self, daemon: Daemon, why: str, now: float, *, hold: bool = True) -> None:
        """With `hold`, the incarnation is left out of formations until it must be alive."""
        self.forming.lost(daemon.key, daemon.record.incarnation, now, hold=hold)
        self._out.count("stages_lost")
        self.end_formation(causes.stage_lost(daemon, why), now)

    def _check_formation(self, now: float, pause: float) -> None:
        formation = self.forming.present
        if formation is None:
            return
        late = self.forming.late(now)
        if late is not None:
            self.end_formation(late, now)
            return
        if formation.symptom is not None and now >= formation.symptom_until:
            self._end_for_symptom(formation, formation.symptom, now)
            return
        formation.excuse(pause, now)
        silent = formation.silent(now, self._config.silence_ms / 1e3)
        if silent is not None:
            self._lose(silent, f"silent for {now - silent.last_heard:.2f} s", now)
            return
        self._ask_streams(now)
        digests.tick(formation, now, self._out)

    def _end_for_symptom(self, formation: PipelineFormation, symptom: WaveppError, now: float) -> None:
        """A link is lost: the daemon that cannot be reached either is the cause, if there is one."""
        gone = next((one for one in formation.daemons.values() if one.streams.reconnecting), None)
        if gone is not None:
            self._lose(gone, f"unreachable, and its neighbour says: {symptom.message}", now)
        else:
            self.end_formation(symptom, now)

    def _let_go(self, now: float) -> None:
        """A daemon that wants to leave may, once nothing is held: the pipeline waits for another."""
        formation = self.forming.present
        if formation is None or not formation.draining or self.service is None or not self.service.idle:
            return
        leaving = [daemon for daemon in formation.daemons.values() if daemon.draining]
        for daemon in leaving:
            self.forming.lost(daemon.key, daemon.record.incarnation, now, hold=True)
        self.end_formation(causes.drained(self.id, leaving), now)

    def _expire(self, service: Service, now: float) -> None:
        service.expire(now)
        formation = self.forming.present
        for key in service.rounds.overdue(ROUND_PATIENCE * self._config.round_deadline_ms / 1e3, now):
            if formation is not None and not formation.daemons[key].streams.reconnecting:
                self._out.count("rounds_overdue")
                self._reopen(formation.daemons[key], "it does not answer rounds, though its heart beats", now)

    def _give_up_waiting(self, now: float) -> None:
        patience = self._config.pipeline_wait_ms / 1e3
        for request in self.book:
            if now - request.unserved_since > patience:
                missing = self.forming.roster(now).missing
                self.end(request, RequestInput.FAIL, causes.unserved(self.id, missing, self._config), now)

    def _watch_stall(self, now: float) -> None:
        if self.service is None or not self.service.stalled:
            self.stalled_since = None
        elif self.stalled_since is None:
            self.stalled_since = now


def _nothing() -> None:
    """An event that only makes something else possible."""
