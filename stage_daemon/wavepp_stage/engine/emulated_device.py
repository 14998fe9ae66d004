"""The devices that the emulated engine takes the time of: how long work takes, and when it ends.

Owns one stream of work each for computing, copying and the wire, on any clock; deadlines accumulate, so late
timers do not add up over thousands of waves. What is computed lies in `emulated_band.py`, what a stage costs in
`wavepp_proto.profile`. Called by `emulated.py` (computing and copying) and by the grpc link (the wire).

A device has its next kernels queued: a wave whose command and activations had come while the one before it ran
starts at that one's end, however late the executor gets round to it (up to LATE_S). A wave that came to an idle
device starts when the executor starts it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from wavepp_proto.profile import StageCosts

LONGEST_S = 1e9
"""A wait that only close() ends: decades, and no timer overflows."""
LATE_S = 0.02
"""An executor that is later than this would have let any device run dry."""
UNKNOWN_S = 0.001
"""Work of which nobody said when it came counts as there if it is started within this of the previous one's end."""


@dataclass(frozen=True, slots=True)
class Pace:
    """What work takes on one stage, and on its wire to the next (microseconds); all divided by `speedup`."""

    costs: StageCosts
    copy_us: float = 0.0
    """Per block."""
    link_us: float = 0.0
    link_us_per_token: float = 0.0
    speedup: float = 1.0

    def seconds(self, micros: float) -> float:
        return micros / 1e6 / self.speedup


class Stream:
    """One piece of work at a time, on a device of its own."""

    def __init__(
        self, closed: threading.Event, clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], bool] | None = None,
    ) -> None:  # fmt: skip
        """`wait(seconds)` answers early, with True, once the engine is closed."""
        self._closed, self._clock = closed, clock
        self._wait = wait or closed.wait
        self._end = 0.0

    def take(self, started: float, seconds: float, ready_at: float = 0.0) -> bool:
        """Wait until the end of work that its thread began at `started`; False when close() ended the wait.

        `ready_at` is when all that the work needs had come; 0 if nobody knows."""
        if seconds > 0.0:
            self._end = self._begin(started, ready_at) + seconds
            # A wait that only close() interrupts: it holds no interpreter lock and burns no CPU.
            return not self._wait(min(LONGEST_S, max(0.0, self._end - self._clock())))
        return not self._closed.is_set()

    def _begin(self, started: float, ready_at: float) -> float:
        queued = ready_at <= self._end if ready_at else started - self._end <= UNKNOWN_S
        return max(self._end, started - LATE_S) if queued else max(self._end, started)


class Wire:
    """The link to the next stage: waves leave one after the other, and arrive a latency later."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._free = 0.0

    def arrival(self, sent: float, tokens: int) -> float:
        """When a wave that was handed over at `sent` is there, never before an earlier one; 0 where no wire is
        modelled."""
        if not (self._pace.link_us or self._pace.link_us_per_token):
            return 0.0
        self._free = max(self._free, sent) + self._pace.seconds(self._pace.link_us_per_token * tokens)
        return self._free + self._pace.seconds(self._pace.link_us)
