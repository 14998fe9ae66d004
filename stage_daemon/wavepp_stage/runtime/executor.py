"""The executor: the one thread that owns the engine (the paper's LOOP).

Owns wave execution in ordinal order, materialising ahead while activations travel, and the time
split of every wave. Does not own the cache (core_shell.py), the link's own thread, or gRPC: reports
leave through a callback that must not block. Admission never waits for this thread, nor it for
admission, unless the cache is the engine's own: then rounds are jobs here, between two waves (executor_jobs.py).
It waits on ONE condition: activation arrived | something to materialise | copies ended | job | end.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

from wavepp_proto.errors import FormationEnded, LinkFault, StaleMessage, WaveppError
from wavepp_proto.runtime.logs import get_log
from wavepp_proto.terms import JoinPlan, RowFault, WaveCommand, WaveOrdinal
from wavepp_stage.core.events import ExecutorStopped, PrepareWave, WaveDone, WavePrepared, WaveRetired, WaveWaits
from wavepp_stage.core.work import WaveWork
from wavepp_stage.engine.base import ActivationLink, Payload, StageEngine, WaveHeader, WaveOutcome, row_voided
from wavepp_stage.runtime.copier import Copier
from wavepp_stage.runtime.core_shell import CoreShell
from wavepp_stage.runtime.executor_jobs import BROKEN, ExecutorJobs, Job, closed, typed
from wavepp_stage.runtime.formation_listener import FormationListener, check_header, wave_header
from wavepp_stage.runtime.running_formation import POSTED_RECEIVES, Report, RunningFormation, Stopwatch

T = TypeVar("T")
log = get_log("wavepp.stage.executor")

COPIER_CLOSE_S = 5.0
"""Longest wait for a copy under way before the engine is closed under it."""


class Executing(NamedTuple):
    wave: WaveOrdinal
    spent_s: float
    limit_s: float | None
    """Longest that the controller allows; None from one that does not tell."""


class Executor:
    """One thread, one engine. All public methods may be called from any thread and do not block."""

    def __init__(
        self, core: CoreShell, engine: StageEngine, copier: Copier, report: Callable[[Report], None], name: str
    ) -> None:
        self._core = core
        self._engine = engine
        self._copier = copier
        self._report = report
        self._condition = threading.Condition()
        self._jobs = ExecutorJobs()
        self._formation: RunningFormation | None = None
        self._ending: list[tuple[RunningFormation, Future[None]]] = []
        self._ended: Future[None] = Future()
        self._ended.set_result(None)
        self._hung: RunningFormation | None = None
        """An ended formation whose copies did not end in time."""
        self._closing = False
        self.engine_failed = False
        """A wave or an admission ended in an error of the engine; whoever loads it anew takes this back."""
        self._executing: tuple[WaveCommand, float] | None = None
        """The wave that was given to the engine, and when (monotonic seconds)."""
        self._watch = Stopwatch()
        self._copies_ended = 0
        """Lots that have ended: a wave that waits for copies is prepared again when this moves."""
        copier.on_ended = self._copy_ended
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    # --- called by the asyncio side ---------------------------------------------------------------

    def call(self, job: Callable[[StageEngine], T]) -> Future[T]:
        """Run `job(engine)` on the executor thread, before the next wave."""
        return self._put(self._jobs.for_engine, partial(job, self._engine))

    def admit(self, job: Callable[[], T]) -> Future[T]:
        """Run `job()` on the executor thread, after at most one wave; FormationEnded if that ends first."""
        return self._put(self._jobs.admit, job)

    def _put(self, put: Callable[[Callable[[], T]], Future[T]], job: Callable[[], T]) -> Future[T]:
        with self._condition:
            if self._closing:
                raise closed()
            future = put(job)
            self._condition.notify()
        return future

    def begin(self, plan: JoinPlan, link: ActivationLink | None, hidden: int) -> None:
        """Serve a formation; the earlier one must have ended."""
        with self._condition:
            assert self._formation is None, "the earlier formation has not ended"
            self._formation = RunningFormation(plan, link, hidden)
            self._condition.notify()

    def end(self) -> Future[None]:
        """Drop queued waves and abandon the link; done when no wave and no copy can touch a block any more.

        Without a formation, the same answer as the last time; one whose copies hung is looked at again."""
        with self._condition:
            formation, self._formation = self._formation or self._hung, None
            if formation is None:
                return self._ended
            number = formation.plan.fence.formation
            self._jobs.refuse_admissions(FormationEnded("the formation has ended", formation=number))
            self._hung = None
            done = self._ended = Future()
            self._ending.append((formation, done))
            self._condition.notify()
        formation.ended.set()
        if formation.link is not None:
            formation.link.close()
        return done

    def enqueue(self, formation: int, command: WaveCommand) -> None:
        with self._condition:
            current = self._formation
            if current is None or current.plan.fence.formation != formation:
                raise StaleMessage("the formation has ended", field="formation", value=formation)
            current.queue.append(command)
            current.came[command.ordinal] = time.monotonic()
            self._post_receives(current)
            self._condition.notify()

    @property
    def executing(self) -> Executing | None:
        """What the engine computes; None between two waves."""
        now = self._executing
        if now is None:
            return None
        command, since = now
        limit_s = command.limit_ms / 1000 if command.limit_ms else None
        return Executing(command.ordinal, time.monotonic() - since, limit_s)

    @property
    def queued(self) -> int:
        formation = self._formation
        return len(formation.queue) if formation else 0

    def close(self) -> Future[None]:
        """End the formation, close the engine, stop the thread. What still waits for the thread is answered now: the
        wave before it may never end."""
        ended = self.end()
        with self._condition:
            self._closing = True
            self._jobs.refuse_all(closed())
            self._condition.notify()
        return ended

    def join(self, timeout_s: float) -> bool:
        """True if the thread ended in time; one blocked in an engine is abandoned (daemon thread)."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # --- called by the copy thread ----------------------------------------------------------------

    def _copy_ended(self) -> None:
        with self._condition:
            self._copies_ended += 1
            self._condition.notify()

    # --- called by the link's thread (LinkListener, bound to one formation) -----------------------

    def listener(self, formation: int) -> FormationListener:
        return FormationListener(self, formation)

    def arrive(self, formation: int, header: WaveHeader, payload: Payload) -> None:
        with self._condition:
            current = self._formation
            if current is not None and current.plan.fence.formation == formation:
                self._check_order(current, header)
                current.arrived[header.ordinal] = (header, payload)
                current.came[header.ordinal] = time.monotonic()
                self._condition.notify()

    def _check_order(self, current: RunningFormation, header: WaveHeader) -> None:
        """LinkFault, also of the formation, unless it is the next wave of the link; the condition is held."""
        try:
            header.check(current.plan.key.stage, ordinal=current.last_arrived + 1)
        except LinkFault as error:
            current.fault = current.fault or error.info()
            self._condition.notify()
            raise
        current.last_arrived = header.ordinal

    def lose_link(self, formation: int, reason: str | LinkFault) -> None:
        with self._condition:
            current = self._formation
            if current is not None and current.plan.fence.formation == formation and current.fault is None:
                if isinstance(reason, str):
                    reason = LinkFault(reason, stage=current.plan.key.stage, formation=formation)
                current.fault = reason.info()
                self._condition.notify()

    # --- the thread -------------------------------------------------------------------------------

    def _loop(self) -> None:
        while True:
            step = self._next_step()
            if step is None:
                break
            step()
        self._copier.close(COPIER_CLOSE_S)
        self._engine.close()

    def _next_step(self) -> Callable[[], None] | None:
        """Wait for something to do; charges the wait to its cause."""
        with self._condition:
            while True:
                if self._ending:
                    formation, done = self._ending.pop(0)
                    return lambda: self._finish_formation(formation, done)
                if job := self._jobs.next_for_engine():
                    return partial(self._run_job, job, "idle")
                if self._closing:
                    return None
                current = self._formation
                step = None if current is None else self._wave_step(current)
                if admission := self._jobs.next_admission(wave_waits=step is not None):
                    return partial(self._run_job, admission, "admission")
                if step is not None:
                    self._jobs.wave_goes()
                    return step
                cause = self._waiting_for(current)
                self._condition.wait()
                self._watch.charge(cause)

    def _wave_step(self, current: RunningFormation) -> Callable[[], None] | None:
        """The next step of the wave path, if there is one; the condition is held."""
        if current.fault is not None:
            return None if current.fault_reported else partial(self._report_fault, current)
        if current.runnable():
            return partial(self._run_wave, current)
        command = current.unprepared(self._copies_ended)
        return None if command is None else partial(self._prepare, current, command)

    def _waiting_for(self, current: RunningFormation | None) -> str:
        if current is None or not current.queue:
            return "admission" if self._core.read(lambda machine: machine.unadmitted_requests) else "idle"
        return "activation" if current.queue[0].ordinal in current.prepared else "preparing"

    def _run_job(self, job: Job, cause: str) -> None:
        current = self._formation  # which may end while the job runs
        broken = job.run(self._engine.name)
        if broken is not None and cause == "admission" and current is not None:
            self._fail(current, broken)  # the cache is the engine's: nothing is sure of it any more
        self._watch.charge(cause)

    def _fail(self, current: RunningFormation, error: Exception) -> None:
        """The formation has a fault: its first is the one that is told."""
        fault = typed(error, self._engine.name)
        self.engine_failed |= isinstance(fault, BROKEN)
        with self._condition:
            current.fault = current.fault or fault.info()

    def _prepare(self, current: RunningFormation, command: WaveCommand) -> None:
        formation = current.plan.fence.formation
        # Read before the core is asked: a copy that ends in between must not be waited for.
        copies_ended = self._copies_ended
        answer = self._only(
            PrepareWave(command.ordinal, time.monotonic(), formation), (WavePrepared, WaveWaits), current
        )
        if isinstance(answer, WavePrepared):
            current.prepare(command.ordinal, answer)
        elif answer is not None:
            current.waits_since = copies_ended
            current.held_up.add(command.ordinal)
        self._watch.charge("preparing")

    def _run_wave(self, current: RunningFormation) -> None:
        """Compute, publish, then send on: whoever hears of this wave may count on what it published."""
        self._watch.charge("activation")
        command, formation = current.queue[0], current.plan.fence.formation
        self._executing = (command, time.monotonic())
        prepared = current.prepared.pop(command.ordinal)
        started_ns, started = time.time_ns(), time.perf_counter()
        try:
            work, outcome, void, faults = self._compute(current, prepared)
            compute_s = time.perf_counter() - started
            event = WaveRetired(command.ordinal, void, faults, outcome.results, time.monotonic(), formation)
            done = self._only(event, (WaveDone,), current)
            if current.link is not None and not current.last and done is not None:
                current.link.send(wave_header(work, done.void_bitmap, current.hidden), outcome.payload)
        except Exception as error:  # any engine or link fault ends the formation, never the daemon
            self._fail(current, error)
            self._report_fault(current, prepared.work, started_ns)
            return
        finally:
            self._executing = None
        with self._condition:
            current.queue.popleft()
            current.posted = max(0, current.posted - 1)
            self._post_receives(current)
        times = self._watch.take(compute_s)
        self._report(Report(formation, command.ordinal, prepared.work, done, times, started_ns, time.time_ns()))

    def _compute(
        self, current: RunningFormation, prepared: WavePrepared
    ) -> tuple[WaveWork, WaveOutcome, int, tuple[RowFault, ...]]:
        """Run one wave: (what ran, outcome, void bitmap, rows voided here)."""
        payload, ready_at = None, current.came.pop(prepared.work.ordinal, 0.0)
        work = replace(prepared.work, ready_at=ready_at, epoch=current.plan.fence.epoch, ended=current.ended.wait)
        # a row may have become void after this wave was prepared ahead
        void = self._core.read(lambda machine: machine.void_bitmap(work.ordinal))
        if not current.first:
            header, payload = current.arrived.pop(work.ordinal)
            check_header(header, work, current.plan.key.stage)
            void |= header.void_bitmap
        if void:
            rows = tuple(replace(row, void=bool(void >> index & 1)) for index, row in enumerate(work.rows))
            work = replace(work, rows=rows)
        outcome = self._engine.run(work, payload)
        faults = prepared.faults + tuple(
            RowFault(index, row_voided(cause, current.plan.key.stage, index).info())
            for index, cause in sorted(outcome.faults.items())
        )
        for index in outcome.faults:
            void |= 1 << index
        return work, outcome, void, faults

    def _only(
        self, event: PrepareWave | WaveRetired, kinds: tuple[type[T], ...], current: RunningFormation
    ) -> T | None:
        """Post an executor event; a core that refuses it (the formation ended) is not an error here."""
        try:
            actions = self._core.post(event)
        except Exception as error:  # a cache of the engine's own may raise anything
            self._fail(current, error)
            return None
        return next((action for action in actions if isinstance(action, kinds)), None)

    def _post_receives(self, current: RunningFormation) -> None:
        """Post receives for the waves at the head of the queue; the condition is held."""
        if current.first or current.link is None:
            return
        while current.posted < min(POSTED_RECEIVES, len(current.queue)):
            command = current.queue[current.posted]
            current.posted += 1
            current.link.expect(command.ordinal, command.tokens)

    def _report_fault(self, current: RunningFormation, work: WaveWork | None = None, started_ns: int = 0) -> None:
        current.fault_reported = True
        ordinal = current.queue[0].ordinal if current.queue else WaveOrdinal(0)
        now = time.time_ns()
        times = self._watch.take(0.0)
        formation = current.plan.fence.formation
        if current.fault is not None:
            said = {**dict(current.fault.fields), "reason": current.fault.reason, "error": current.fault.message}
            log.warning("formation failed", **{**said, "formation": formation, "stage": current.plan.key.stage})
        self._report(Report(formation, ordinal, work, None, times, started_ns or now, now, current.fault))

    def _finish_formation(self, formation: RunningFormation, done: Future[None]) -> None:
        """No wave of `formation` runs any more and its copies are complete: quarantined blocks may be used again."""
        broken: WaveppError | None = None
        try:
            self._copier.drain()
            self._core.post(ExecutorStopped(formation.plan.fence.formation, time.monotonic()))
        except Exception as error:
            broken = typed(error, self._engine.name)
            self._fail(formation, broken)
            # What hangs may still write: the blocks stay in quarantine, and no new formation begins on them.
            with self._condition:
                self._hung = formation
        if self.engine_failed and formation.fault is not None and not formation.fault_reported:
            # It broke while the formation ended: told before the answer, for whoever waits must not begin anew on it.
            self._report_fault(formation)
        if not done.set_running_or_notify_cancel():
            return
        if broken is None:
            done.set_result(None)
        else:
            done.set_exception(broken)
