"""The executor thread of one stage in virtual time: prepare ahead, compute, publish, send on.

Follows `wavepp_stage.runtime.executor` step by step, one step an event, so that admission comes between
any two. Owns what is queued, prepared and arrived of one formation, and how long a wave takes. Does not
own the cache (the core), the links or the reports (`stage`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from wavepp_proto.errors import LinkFault, WaveppError
from wavepp_proto.terms import ErrorInfo, JoinPlan, RowFault, WaveCommand, WaveOrdinal
from wavepp_simulator.engine import Outcome, Payload
from wavepp_stage.core import events as ev
from wavepp_stage.core.work import WaveWork
from wavepp_stage.engine.base import WaveHeader, row_voided

if TYPE_CHECKING:
    from wavepp_simulator.stage import SimStage

MATERIALISE_AHEAD = 4
PREPARE_S = 20e-6
"""One slice of materialising, or building one wave's tables."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds on one stage."""

    wave_s: float = 0.001
    token_s: float = 0.00001
    copy_block_s: float = 0.0001
    """One block between the tiers."""
    copy_failures: float = 0.0
    """Chance of a lot to fail."""


@dataclass(slots=True)
class Serving:
    """Everything of one formation that ends with it."""

    plan: JoinPlan
    queue: deque[WaveCommand] = field(default_factory=deque)
    prepared: dict[int, ev.WavePrepared] = field(default_factory=dict)
    arrived: dict[int, tuple[WaveHeader, Payload]] = field(default_factory=dict)
    last_arrived: int = 0
    """Ordinal of the payload that came last."""
    fault: ErrorInfo | None = None
    fault_reported: bool = False
    waits_since: int | None = None
    """Lots that had ended when the core said to wait for copies."""

    @property
    def first(self) -> bool:
        return self.plan.key.stage == 0

    @property
    def last(self) -> bool:
        return self.plan.key.stage == self.plan.stages - 1

    @property
    def runnable(self) -> bool:
        if not self.queue or self.fault is not None:
            return False
        head = self.queue[0].ordinal
        return head in self.prepared and (self.first or head in self.arrived)

    def unprepared(self, copies_ended: int) -> WaveCommand | None:
        if len(self.prepared) > MATERIALISE_AHEAD or self.fault is not None or self.waits_since == copies_ended:
            return None
        return next((command for command in self.queue if command.ordinal not in self.prepared), None)


class SimExecutor:
    def __init__(self, stage: SimStage, costs: Costs) -> None:
        self._stage = stage
        self.costs = costs
        self.serving: Serving | None = None
        self.executing: WaveOrdinal | None = None
        self.executing_since = self.executing_until = 0.0
        """When it began, and by when it must have ended."""
        self.hangs = False
        """The engine will not return from the next wave, by a scenario's wish."""
        self._busy = False
        self._copies_ended = 0
        self._ending: list[tuple[Serving | None, Callable[[], None]]] = []
        """Formations that end, in order; None is somebody who waits for the last of them."""

    @property
    def idle(self) -> bool:
        return not self._busy and not self._ending

    def begin(self, plan: JoinPlan) -> None:
        self.serving = Serving(plan)
        self._wake()

    def end(self, done: Callable[[], None]) -> None:
        """Drop queued waves; `done` once no wave can touch a block any more."""
        ended, self.serving = self.serving, None
        if ended is None and not self._ending:
            done()
            return
        self._ending.append((ended, done))
        self._wake()

    def enqueue(self, command: WaveCommand) -> None:
        if self.serving is not None and self.serving.plan.fence.formation == command.fence.formation:
            self.serving.queue.append(command)
            self._wake()

    def arrive(self, header: WaveHeader, payload: Payload) -> None:
        """Raises LinkFault, and has the fault of the formation, for a payload that is not the next one."""
        serving = self.serving
        if serving is None or serving.plan.fence.formation != header.formation:
            return
        try:
            header.check(serving.plan.key.stage, ordinal=serving.last_arrived + 1)
            serving.last_arrived = header.ordinal
            serving.arrived[header.ordinal] = (header, payload)
        except LinkFault as error:
            serving.fault = serving.fault or error.info()
            raise
        finally:
            self._wake()

    def lose_link(self, formation: int, reason: str) -> None:
        serving = self.serving
        if serving is not None and serving.plan.fence.formation == formation and serving.fault is None:
            serving.fault = LinkFault(reason, stage=serving.plan.key.stage, formation=formation).info()
            self._wake()

    def copy_ended(self) -> None:
        """A wave that waits for copies may be prepared again."""
        self._copies_ended += 1
        self._wake()

    # --- the thread -------------------------------------------------------------------------------

    def _wake(self) -> None:
        if not self._busy:
            self._step()

    def _step(self) -> None:
        serving = self.serving
        if self._ending:
            self._busy = True
            self._stage.copier.drain(self._stopped)
        elif serving is None:
            return
        elif serving.fault is not None and not serving.fault_reported:
            serving.fault_reported = True
            ordinal = serving.queue[0].ordinal if serving.queue else WaveOrdinal(0)
            self._stage.report(serving.plan, ordinal, None, serving.fault)
        elif serving.runnable:
            self._compute(serving)
        elif (command := serving.unprepared(self._copies_ended)) is not None:
            self._occupy(PREPARE_S, lambda: self._prepare(serving, command))

    def _stopped(self) -> None:
        """No wave runs and no copy is under way: what the formation touched may be used again."""
        ended, done = self._ending.pop(0)
        self._busy = False
        if ended is not None:
            self._stage.post(ev.ExecutorStopped(ended.plan.fence.formation, self._stage.now))
        done()
        self._wake()

    def _occupy(self, seconds: float, work: Callable[[], None]) -> None:
        def finish() -> None:
            self._busy = False
            work()
            self._wake()

        self._busy = True
        self._stage.process.after(seconds, finish)

    def _prepare(self, serving: Serving, command: WaveCommand) -> None:
        copies_ended = self._copies_ended
        event = ev.PrepareWave(command.ordinal, self._stage.now, serving.plan.fence.formation)
        for action in self._only(event, serving):
            if isinstance(action, ev.WavePrepared):
                serving.prepared[command.ordinal] = action
            elif isinstance(action, ev.WaveWaits):
                serving.waits_since = copies_ended

    def _compute(self, serving: Serving) -> None:
        """Begin the wave at the head of the queue; it ends after its modelled time."""
        ordinal = serving.queue[0].ordinal
        prepared, payload = serving.prepared.pop(ordinal), None
        work = prepared.work
        try:
            void = self._stage.machine.void_bitmap(ordinal)
            if not serving.first:
                header, payload = serving.arrived.pop(ordinal)
                header.check(serving.plan.key.stage, chunks=work.chunks, tokens=work.tokens)
                void |= header.void_bitmap
        except WaveppError as error:
            serving.fault = serving.fault or error.info()
            self._wake()
            return
        if void:
            work = replace(work, rows=tuple(replace(row, void=bool(void >> i & 1)) for i, row in enumerate(work.rows)))
        tokens = sum(row.length for row in work.rows if not row.void)
        self.executing, self.executing_since = ordinal, self._stage.now
        self.executing_until = self._stage.now + serving.queue[0].limit_ms / 1e3
        if self.hangs:
            self.hangs, self._busy = False, True  # for ever: nothing calls a thread back
            return
        cost = self.costs.wave_s + self.costs.token_s * tokens
        self._occupy(cost, lambda: self._finish(serving, work, payload, void, prepared.faults))

    def _finish(
        self, serving: Serving, work: WaveWork, payload: Payload | None, void: int, faults: tuple[RowFault, ...]
    ) -> None:
        self.executing = None
        outcome = self._stage.compute(serving.plan.fence, work, payload)
        for index, cause in outcome.faults.items():
            void |= 1 << index
            faults = (*faults, RowFault(index, row_voided(cause, serving.plan.key.stage, index).info()))
        self._retire(serving, work, outcome, void, faults)

    def _retire(
        self, serving: Serving, work: WaveWork, outcome: Outcome, void: int, faults: tuple[RowFault, ...]
    ) -> None:
        """Publish, then send on: whoever hears of this wave may count on what it published."""
        formation = serving.plan.fence.formation
        event = ev.WaveRetired(work.ordinal, void, faults, outcome.results, self._stage.now, formation)
        done = next((action for action in self._only(event, serving) if isinstance(action, ev.WaveDone)), None)
        if done is not None:
            command = serving.queue.popleft()
            self._stage.executed(serving.plan, command)
            if not serving.last:
                header = WaveHeader(formation, work.ordinal, work.chunks, work.tokens, 2, 0, done.void_bitmap)
                self._stage.neighbours.send_on(header, outcome.payload)
        self._stage.report(serving.plan, work.ordinal, done, serving.fault)

    def _only(self, event: ev.Event, serving: Serving) -> list[ev.Action]:
        """A core that refuses an executor's event (its formation ended) is no error here."""
        try:
            return self._stage.post(event)
        except WaveppError as error:
            serving.fault = serving.fault or error.info()
            return []
