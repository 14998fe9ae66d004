"""One pipeline: forms, serves, ends and forms again (DESIGN.md).

Owns what happens to requests when a formation begins or ends. Who forms when is in `forming`, what daemons say in
`hearing`, the work of a serving formation in `service`, the door in `machine`.

    forming ──all places taken──▶ joining ──all Joined──▶ serving ◀─┐ streams broke: opened again
       ▲                             │ JoinFailed, late      │ └────┘
       └──────── backoff ◀───────────┴───────────────────────┘ lost, silent, replaced, failed report, asked
"""

from __future__ import annotations

from collections.abc import Callable

from wavepp_controller.core import causes, digests
from wavepp_controller.core.book import RequestBook
from wavepp_controller.core.config import ControllerConfig
from wavepp_controller.core.events import AnnounceRides, Hashed, Joined, JoinFailed, MemberUp, ReformAsked
from wavepp_controller.core.formation import Daemon, PipelineFormation
from wavepp_controller.core.forming import Forming
from wavepp_controller.core.hearing import Hearing
from wavepp_controller.core.index import ReuseIndex, short_chain
from wavepp_controller.core.latency_model import LatencyModel
from wavepp_controller.core.outbox import Outbox
from wavepp_controller.core.request import Request
from wavepp_controller.core.request_table import RequestInput, RequestState
from wavepp_controller.core.service import Service
from wavepp_controller.core.wave_watch import Overdue
from wavepp_proto.errors import FormationEnded, InternalError, JoinRefused, WaveppError, from_info
from wavepp_proto.terms import DaemonKey, Epoch, PipelineId, RoundOrdinal, WaveOrdinal

STALL_S = 5.0
"""Longer than any retry for room takes when nothing is held: from then on the controller is not ready."""
SWEEP_SHARDS = 1
"""Shards of the index swept per tick: about half a millisecond at a million blocks."""


class PipelineMachine:
    def __init__(self, pipeline: PipelineId, config: ControllerConfig, out: Outbox) -> None:
        self.id, self._config, self._out = pipeline, config, out
        self.forming = Forming(pipeline, config, out)
        self.book = RequestBook(pipeline, out)
        self.index = ReuseIndex()
        self.latency = LatencyModel()
        """What its stages were learnt to need; outlives formations, and is told what each serves."""
        self.hearing = Hearing(self, config, out)
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

    def ready(self, now: float) -> bool:
        """A request that comes now is served: a formation serves, takes new ones and gets on with what it has."""
        return self.takes_new and not self.stalled(now)

    @property
    def takes_new(self) -> bool:
        """A formation serves, and does not drain."""
        formation = self.forming.present
        return self.serving and formation is not None and not formation.draining

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
            self.lose(superseded, f"incarnation {event.record.incarnation} replaced it", event.now)
            self.forming.hurry(event.now)
        self.consider(event.now)

    def consider(self, now: float) -> None:
        formation = self.forming.consider(now)
        if formation is not None:
            digests.attach(self.index, formation)

    def joined(self, event: Joined) -> None:
        daemon = self.hearing.daemon(event.key, event.reply.fence)
        formation = self.forming.present
        if daemon is None or formation is None or daemon.reply is not None:
            return
        try:
            complete = formation.joined(daemon, event.reply, event.now)
        except JoinRefused as error:
            self._refuse_join(daemon, error, event.now)
            return
        digests.joined(self.index, daemon)
        if complete:
            self._serve(formation, event.now)

    def join_failed(self, event: JoinFailed) -> None:
        daemon = self.hearing.of(event.key, event.formation)
        if daemon is not None:
            self._refuse_join(daemon, from_info(event.error), event.now)

    def reform(self, event: ReformAsked) -> None:
        """Raises what `Forming.reform` raises; else the pipeline forms again at once."""
        self.forming.reform(event)
        if self.forming.present is not None:
            self.end_formation(FormationEnded("an operator asked for another shape", pipeline=self.id), event.now)
        self.forming.hurry(event.now)
        self.consider(event.now)

    def end_formation(self, cause: WaveppError, now: float) -> None:
        """Requests that held cache fail, or try again if they may; the others queue again."""
        served = self.serving
        rounds = self._drop_service()
        self.forming.end(cause, now, rounds)
        for request in self.book:
            if served:  # a formation that never served has not interrupted the wait for one
                request.unserved_since = now
            self.book.outlive(request, cause, self._config.attempts, now)
        self.consider(now)

    # --- requests -------------------------------------------------------------------------------

    def hashed(self, request: Request, event: Hashed) -> None:
        if request.hashes is not None:
            return
        request.hashed(event.block_hashes, short_chain(event.block_hashes), event.now)
        service = self.service
        if service is not None:
            self.guarded(lambda: service.announce(request, event.now), event.now)

    def announce_rides(self, event: AnnounceRides) -> None:
        service = self.service
        if service is not None:
            self.guarded(lambda: service.announce_rides(event.key, event.targets, event.now), event.now)

    def end(self, request: Request, given: RequestInput, error: WaveppError, now: float) -> None:
        """End a living request, in whichever state, and let go of it everywhere."""
        service = self.service
        if service is None:
            self.book.fail(request, given, error, now)
        else:
            self.guarded(lambda: service.end(request, given, error, now), now)

    def reported_wave(self, key: DaemonKey) -> WaveOrdinal:
        """Last wave whose report of this daemon was taken in the present formation; 0 if none was."""
        formation, service = self.forming.present, self.service
        if service is None or formation is None or key not in formation.daemons:
            return WaveOrdinal(0)
        return service.execution.ring.reported(key)

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
            self.guarded(lambda: service.expire(now), now)
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

    def guarded(self, work: Callable[[], bool | None], now: float) -> None:
        """Run `work` on the serving formation, then whatever became possible; a broken rule ends it.

        `work` says False if it has made nothing possible."""
        try:
            if work() is not False and self.service is not None:
                self.service.pump(now)
        except (InternalError, FormationEnded) as error:
            self._out.count("formations_broken")
            self.end_formation(error, now)

    def made_possible(self, now: float) -> None:
        """Nothing but time or knowledge has changed: do whatever that makes possible."""
        self.guarded(lambda: None, now)

    def _serve(self, formation: PipelineFormation, now: float) -> None:
        facts, rounds = self.forming.serve(formation)
        self.latency.serve(daemon.record for daemon in formation.daemons.values())
        service = Service(formation, facts, self.book, self.index, rounds, self.latency, self._config, self._out, now)
        self.service = service
        digests.expect(self.index, formation, now)
        for request in self.book:
            service.announce(request, now)
        self.made_possible(now)

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

    def lose(self, daemon: Daemon, why: str, now: float, *, hold: bool = True) -> None:
        """With `hold`, the incarnation is left out of formations until it must be alive."""
        self.forming.lost(daemon.key, daemon.record.incarnation, now, hold=hold, tell=not hold)
        self._out.count("stages_lost")
        self.end_formation(causes.stage_lost(daemon, why), now)

    def hung(self, daemon: Daemon, overdue: Overdue, now: float) -> None:
        """A daemon has a wave for too long. One whose engine hangs is told, so that it leaves, and is left out until it
        is somebody new."""
        self._out.count("stages_hung" if overdue.executing else "waves_not_begun")
        if overdue.executing:
            self.forming.lost(daemon.key, daemon.record.incarnation, now, hold=True)
        self.end_formation(causes.hung(daemon, overdue), now)

    def _check_formation(self, now: float, pause: float) -> None:
        formation = self.forming.present
        if formation is None:
            return
        late = self.forming.late(now)
        if late is not None:
            self.end_formation(late, now)
            return
        if formation.symptom is not None and now >= formation.symptom_until:
            self.hearing.end_for(formation.symptom, formation, now)
            return
        formation.excuse(pause, now)
        if pause and self.service is not None:
            self.service.rounds.excuse(now)
        silent = formation.silent(now, self._config.silence_ms / 1e3)
        if silent is not None:
            self.lose(silent, f"silent for {now - silent.last_heard:.2f} s", now)
            return
        self.hearing.expire(formation, now)
        digests.tick(formation, now, self._out)

    def let_go(self, now: float) -> None:
        """A daemon that wants to leave may, once nothing is held: the pipeline waits for another."""
        formation = self.forming.present
        if formation is None or not formation.draining or self.service is None or not self.service.idle:
            return
        leaving = [daemon for daemon in formation.daemons.values() if daemon.draining]
        for daemon in leaving:
            self.forming.lost(daemon.key, daemon.record.incarnation, now, hold=True)
        self.end_formation(causes.drained(self.id, leaving), now)

    def _give_up_waiting(self, now: float) -> None:
        patience = self._config.pipeline_wait_ms / 1e3
        for request in self.book:
            if now - request.unserved_since > patience:
                error = causes.unserved(self.id, self.forming.roster(now), self.forming.last_fault, self._config)
                self.end(request, RequestInput.FAIL, error, now)

    def _watch_stall(self, now: float) -> None:
        if self.service is None or not self.service.stalled:
            self.stalled_since = None
        elif self.stalled_since is None:
            self.stalled_since = now
