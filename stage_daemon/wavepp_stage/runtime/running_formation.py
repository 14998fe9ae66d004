"""What the executor keeps of one formation, and how it splits a stage's time.

Owns the queue of waves that have not run, what is prepared and what has arrived, and the answer to
"what can be done next"; and the stopwatch behind every report. Plain data under the executor's
condition: no thread, no lock of its own.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field

from wavepp_proto.terms import ErrorInfo, JoinPlan, StageTimes, WaveCommand, WaveOrdinal
from wavepp_stage.core.events import WaveDone, WavePrepared
from wavepp_stage.core.work import WaveWork
from wavepp_stage.engine.base import ActivationLink, Payload, WaveHeader

MATERIALISE_AHEAD = 4
"""Waves prepared beyond the one that runs: their blocks are escrowed, so this only moves work."""
POSTED_RECEIVES = 2
"""Receive buffers per edge (DESIGN.md)."""


@dataclass(frozen=True, slots=True)
class Report:
    """What one wave came to on this stage; the runtime fences and sends it."""

    formation: int
    ordinal: WaveOrdinal
    work: WaveWork | None
    done: WaveDone | None
    times: StageTimes
    started_ns: int
    """Wall clock at which computing began."""
    ended_ns: int
    error: ErrorInfo | None = None


@dataclass(slots=True)
class RunningFormation:
    """Everything of one formation that ends with it."""

    plan: JoinPlan
    link: ActivationLink | None
    hidden: int
    """Width of a payload row, as the engine declared it."""
    queue: deque[WaveCommand] = field(default_factory=deque)
    """Waves not run yet, in ordinal order."""
    prepared: dict[int, WavePrepared] = field(default_factory=dict)
    arrived: dict[int, tuple[WaveHeader, Payload]] = field(default_factory=dict)
    last_arrived: int = 0
    """Ordinal of the payload that came last: a link keeps the order of waves, and leaves none out."""
    posted: int = 0
    """Waves at the head of the queue whose receive is posted or complete."""
    waits_since: int | None = None
    """Copies that had ended when the next wave was found to wait for more; None while it waits for none."""
    came: dict[int, float] = field(default_factory=dict)
    """When the last of what a wave needs from others (command, activations, copies) came; monotonic seconds."""
    held_up: set[int] = field(default_factory=set)
    """Waves that were found to wait for copies."""
    fault: ErrorInfo | None = None
    fault_reported: bool = False
    ended: threading.Event = field(default_factory=threading.Event)
    """Set once it is over, for a wave that still runs."""

    @property
    def first(self) -> bool:
        return self.plan.key.stage == 0

    @property
    def last(self) -> bool:
        return self.plan.key.stage == self.plan.stages - 1

    def unprepared(self, copies_ended: int) -> WaveCommand | None:
        """The next wave worth materialising ahead, if any; none while it would still wait for its copies."""
        if len(self.prepared) >= MATERIALISE_AHEAD + 1 or copies_ended == self.waits_since:
            return None
        return next((command for command in self.queue if command.ordinal not in self.prepared), None)

    def prepare(self, ordinal: WaveOrdinal, answer: WavePrepared) -> None:
        self.prepared[ordinal] = answer
        if ordinal in self.held_up:
            self.held_up.discard(ordinal)
            self.came[ordinal] = time.monotonic()

    def runnable(self) -> bool:
        if not self.queue or self.fault is not None:
            return False
        head = self.queue[0].ordinal
        return head in self.prepared and (self.first or head in self.arrived)


class Stopwatch:
    """Splits the time between waves by cause (seconds)."""

    def __init__(self) -> None:
        self._mark = time.perf_counter()
        self.spent = {"idle": 0.0, "admission": 0.0, "preparing": 0.0, "activation": 0.0}

    def charge(self, cause: str) -> None:
        now = time.perf_counter()
        self.spent[cause] += now - self._mark
        self._mark = now

    def take(self, compute_s: float) -> StageTimes:
        spent, self.spent = self.spent, dict.fromkeys(self.spent, 0.0)
        self._mark = time.perf_counter()
        return StageTimes(
            compute_us=round(compute_s * 1e6),
            activation_wait_us=round(spent["activation"] * 1e6),
            admission_wait_us=round(spent["admission"] * 1e6),
            preparing_us=round(spent["preparing"] * 1e6),
            idle_us=round(spent["idle"] * 1e6),
        )
