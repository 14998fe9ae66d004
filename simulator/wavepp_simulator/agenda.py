"""Virtual time: what happens next, and when.

Owns the clock and the heap of everything that is due. Work of equal time runs in the order in which it
was planned, so one seed gives one history. Nothing here sleeps; nothing else here keeps time.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

Work = Callable[[], None]


class Agenda:
    def __init__(self) -> None:
        self.now = 0.0
        """Seconds."""
        self.foreground = 0
        """Planned work that is part of somebody's progress; ticks, beats and time-outs are not."""
        self._heap: list[tuple[float, int, bool, Work]] = []
        self._planned = 0

    def at(self, when: float, work: Work, *, background: bool = False) -> None:
        """Plan `work` for virtual time `when` (now, if that has passed)."""
        self._planned += 1
        heappush(self._heap, (max(when, self.now), self._planned, background, work))
        self.foreground += not background

    @property
    def next_at(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    def step(self) -> None:
        """Move the clock to the next piece of work and do it."""
        self.now, _, background, work = heappop(self._heap)
        self.foreground -= not background
        work()
