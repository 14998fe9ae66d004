"""What the daemons of one pipeline say, and the streams that carry it (DESIGN.md).

Owns the one gate for what belongs to the present formation, what each message means for the daemon that sent it
(heard, reconnecting, draining), and when streams are asked for again. Everything else a message brings goes to
`service`. Does not own formations: it tells `pipeline` which daemon is lost, or that the formation must end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wavepp_controller.core import causes, digests
from wavepp_controller.core.config import ControllerConfig
from wavepp_controller.core.events import (
    AnnounceAcked,
    BeatArrived,
    DigestArrived,
    InventoryArrived,
    ReopenStreams,
    ReportArrived,
    StreamLost,
    StreamsReopened,
    VotesArrived,
)
from wavepp_controller.core.formation import Daemon, PipelineFormation
from wavepp_controller.core.outbox import Outbox
from wavepp_controller.core.resume import resumable
from wavepp_controller.core.ring import Place
from wavepp_controller.core.service import Service
from wavepp_proto.errors import LinkFault, StageLost, StaleMessage, WaveppError
from wavepp_proto.terms import DaemonKey, Fence, Formation

if TYPE_CHECKING:
    from wavepp_controller.core.pipeline import PipelineMachine

LINK_GRACE_S = 0.25
"""Between a fault that a dead neighbour causes and the end of that one's own stream lie milliseconds."""
PATIENCE = 2
"""Round deadlines after which a round without votes, or a wave that its daemon knows nothing of and has not reported,
was lost on the way: streams are opened again."""


class Hearing:
    def __init__(self, pipeline: PipelineMachine, config: ControllerConfig, out: Outbox) -> None:
        self._pipeline, self._out = pipeline, out
        self._silence_s = config.silence_ms / 1e3
        self._patience_s = PATIENCE * config.round_deadline_ms / 1e3

    # --- the gate -------------------------------------------------------------------------------

    def daemon(self, key: DaemonKey, fence: Fence) -> Daemon | None:
        """None, counted, for whatever does not belong to the present formation."""
        daemon = self._standing(key)
        if daemon is not None:
            try:
                daemon.check(fence)
            except StaleMessage:
                daemon = None
        if daemon is None:
            self._out.count("stale_messages")
        return daemon

    def of(self, key: DaemonKey, formation: Formation) -> Daemon | None:
        """The same for what the shell says of a daemon."""
        present = self._pipeline.forming.present
        daemon = self._standing(key) if present is not None and present.number == formation else None
        if daemon is None:
            self._out.count("stale_messages")
        return daemon

    def _standing(self, key: DaemonKey) -> Daemon | None:
        present = self._pipeline.forming.present
        return None if present is None else present.daemons.get(key)

    # --- messages -------------------------------------------------------------------------------

    def acked(self, event: AnnounceAcked) -> None:
        service = self._pipeline.service
        if self.daemon(event.key, event.ack.fence) is not None and service is not None:
            self._pipeline.guarded(lambda: service.acked(event.key, event.ack, event.now), event.now)

    def voted(self, event: VotesArrived) -> None:
        daemon, service = self.daemon(event.key, event.votes.fence), self._pipeline.service
        if daemon is None or service is None:
            return
        before = service.rounds.answered(event.key)
        self._pipeline.guarded(lambda: service.votes(event.key, event.votes, event.now), event.now)
        if service.rounds.answered(event.key) > before:
            daemon.streams.worked()

    def beat(self, event: BeatArrived) -> None:
        daemon = self.daemon(event.key, event.beat.fence)
        if daemon is None:
            return
        daemon.last_heard = event.now
        daemon.streams.beat(event.now, self._silence_s)
        daemon.has(event.beat.capacity)
        if event.beat.draining and not daemon.draining:
            daemon.draining = True
            self._out.count("daemons_draining")
        self._watch_waves(daemon, event)
        if self._hangs(daemon, event):
            return
        self._pipeline.made_possible(event.now)
        self._pipeline.let_go(event.now)

    def reported(self, event: ReportArrived) -> None:
        daemon, service = self.daemon(event.key, event.report.fence), self._pipeline.service
        if daemon is None or service is None:
            return
        daemon.last_heard = event.now
        self._pipeline.guarded(lambda: self._take_report(service, daemon, event), event.now)

    def inventory(self, event: InventoryArrived) -> None:
        daemon, service = self.daemon(event.key, event.inventory.fence), self._pipeline.service
        if daemon is not None and service is not None:
            self._pipeline.guarded(lambda: service.inventory(event.key, event.inventory, event.now), event.now)

    def digest(self, event: DigestArrived) -> None:
        daemon = self._standing(event.key)
        if daemon is None or daemon.record.incarnation != event.digest.incarnation:
            self._out.count("stale_messages")
            return
        digests.read(self._pipeline.index, daemon, event.digest, event.now, self._out)
        self._pipeline.made_possible(event.now)

    # --- streams --------------------------------------------------------------------------------

    def stream_lost(self, event: StreamLost) -> None:
        """While serving, streams are opened again; a daemon that cannot be reached then is silent, and lost."""
        daemon = self.of(event.key, event.formation)
        if daemon is None:
            return
        formation = self._pipeline.forming.present
        # beside a link fault, the stream that breaks tells which neighbour died
        alone = formation is not None and formation.symptom is None
        if self._pipeline.serving and resumable(event) and alone:
            self._reopen(daemon, event.error.message, event.now)
            return
        unreachable = event.error.reason == StageLost.reason
        self._pipeline.lose(daemon, event.error.message, event.now, hold=unreachable)

    def streams_reopened(self, event: StreamsReopened) -> None:
        """Send again what was not answered, and compare holds: nobody knows what got lost."""
        daemon, service = self.of(event.key, event.formation), self._pipeline.service
        if daemon is None or service is None:
            return
        daemon.streams.opened(event.now)
        daemon.idle_since = None
        self._out.count("streams_reopened")
        service.resume(daemon.key, event.now)
        digests.resume(self._pipeline.index, daemon, event.now, self._out)
        service.inventories.ask(daemon.key, event.now)
        self._pipeline.made_possible(event.now)

    def expire(self, formation: PipelineFormation, now: float) -> None:
        """Ask for streams whose pause is over, and for those on which rounds get no answer."""
        service = self._pipeline.service
        self._ask_streams(now)
        for key in () if service is None else service.rounds.overdue(self._patience_s, now):
            daemon = formation.daemons[key]
            if not daemon.streams.reconnecting and self._pipeline.service is service:
                self._out.count("rounds_overdue")
                self._reopen(daemon, "it does not answer rounds, though its heart beats", now)

    def end_for(self, symptom: WaveppError, formation: PipelineFormation, now: float) -> None:
        """A link is lost: the daemon that cannot be reached either is the cause, if there is one."""
        gone = next((one for one in formation.daemons.values() if one.streams.reconnecting), None)
        if gone is not None:
            self._pipeline.lose(gone, f"unreachable, and its neighbour says: {symptom.message}", now)
        else:
            self._pipeline.end_formation(symptom, now)

    def _reopen(self, daemon: Daemon, why: str, now: float) -> None:
        """Its streams broke, or lost something: open them again, or give up after too many tries."""
        self._out.count("streams_lost")
        if not daemon.streams.broke(now):
            self._pipeline.lose(daemon, f"its streams broke {daemon.streams.failures} times in a row: {why}", now)
            return
        if self._pipeline.service is not None:
            self._pipeline.service.inventories.forget(daemon.key)
        self._ask_streams(now)

    def _ask_streams(self, now: float) -> None:
        formation, service = self._pipeline.forming.present, self._pipeline.service
        for daemon in () if formation is None else formation.daemons.values():
            if service is not None and daemon.streams.due(now):
                daemon.streams.asked()
                reported = service.execution.ring.reported(daemon.key)
                self._out.send(ReopenStreams(daemon.key, daemon.fence(), reported))

    # --- what reports and heartbeats bring ------------------------------------------------------

    def _take_report(self, service: Service, daemon: Daemon, event: ReportArrived) -> None:
        if not event.report.done:  # it may name no wave at all: a link breaks beside an empty queue too
            self._failed(event)
            return
        match service.place(daemon.key, event.report):
            case Place.AGAIN:
                self._out.count("duplicate_reports")
            case Place.AHEAD:
                self._report_missing(daemon, event.now)
            case Place.NEXT:
                daemon.streams.worked()
                daemon.idle_since = None
                self._pipeline.forming.worked()
                service.report(daemon.key, event.report, event.now)

    def _report_missing(self, daemon: Daemon, now: float) -> None:
        """Nothing that comes now can be taken: on new streams the daemon gives its reports again."""
        self._out.count("report_gaps")
        if not daemon.streams.reconnecting:
            self._reopen(daemon, "a report is missing", now)

    def _watch_waves(self, daemon: Daemon, event: BeatArrived) -> None:
        """A daemon without work that owes reports has missed a wave, or its report was: no other need follow."""
        service, beat = self._pipeline.service, event.beat
        busy = beat.executing_wave is not None or beat.queued_waves
        if service is None or busy or not service.execution.ring.unreported(daemon.key):
            daemon.idle_since = None
        elif daemon.idle_since is None:
            daemon.idle_since = event.now
        elif event.now - daemon.idle_since > self._patience_s and not daemon.streams.reconnecting:
            daemon.idle_since = None
            self._out.count("waves_overdue")
            self._reopen(daemon, "it owes reports of waves that it does not know, though its heart beats", event.now)

    def _hangs(self, daemon: Daemon, event: BeatArrived) -> bool:
        """Whether it has a wave for too long: then its formation has ended."""
        service, beat = self._pipeline.service, event.beat
        wave = beat.executing_wave
        daemon.executing = None if wave is None else (wave, event.now - beat.executing_ms / 1e3)
        overdue = None if service is None else service.execution.watch.overdue(daemon, beat, event.now)
        if overdue is not None:
            self._pipeline.hung(daemon, overdue, event.now)
        return overdue is not None

    def _failed(self, event: ReportArrived) -> None:
        """A fault ends the formation: at once, or after a look for the dead neighbour behind it."""
        formation, error = self._pipeline.forming.present, causes.failed_report(event.key, event.report)
        cause = event.report.error
        # A payload that was refused came from a neighbour that lives. Ranks compute together: what kills one of them
        # breaks the wave of the others.
        refused = cause is not None and "refused_stage" in dict(cause.fields)
        ranked = formation is not None and formation.ranks > 1
        looks = cause is not None and not refused and (ranked or cause.reason == LinkFault.reason)
        if formation is None or not looks:
            self._pipeline.end_formation(error, event.now)
        elif formation.symptom is None:
            formation.symptom, formation.symptom_until = error, event.now + LINK_GRACE_S
