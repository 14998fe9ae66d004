"""Which of a cell's requests count.

    first request ── warm-up ──▶ opened ── measured ──▶ closed ── tail ──▶ last answer

Owns the three lists and the two moments; `load.py` says when they come. In a closed loop the load goes on beyond the
second, so that nothing measured ran with less company than it should.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Set

from wavepp.bench.measure import Sample

MOST_FAILURES = 100
"""A cell ends early after so many failures that nobody expected: whatever broke will not be measured."""


class Window:
    """The measured part of one cell. Belongs to one event loop."""

    def __init__(self, expected: Set[str] = frozenset()) -> None:
        """`expected`: reasons for which a request may fail."""
        self._expected = expected
        self.warmup: list[Sample] = []
        self.measured: list[Sample] = []
        self.tail: list[Sample] = []
        self.opened = asyncio.Event()
        self.closed = asyncio.Event()
        self.opened_s = 0.0
        self.closed_s = 0.0
        self.last_s = 0.0
        """When the last request ended."""
        self.unexpected = 0
        """Failures that nobody expected, in all three parts."""
        self._changed = asyncio.Event()

    @property
    def ended(self) -> int:
        return len(self.warmup) + len(self.measured) + len(self.tail)

    @property
    def broken(self) -> bool:
        return self.unexpected >= MOST_FAILURES

    @property
    def seconds(self) -> float:
        """Of the measured part; up to its last request if it has not been closed."""
        if not self.opened.is_set():
            return 0.0
        last = max((one.ended_s for one in self.measured), default=self.opened_s)
        return (self.closed_s if self.closed.is_set() else last) - self.opened_s

    def open(self, at_s: float) -> None:
        self.opened_s = at_s
        self.opened.set()

    def close(self, at_s: float) -> None:
        self.closed_s = max(at_s, self.opened_s)
        self.closed.set()
        self._changed.set()

    def add(self, sample: Sample) -> None:
        """A request that ended, to the part that is now."""
        if not self.opened.is_set():
            self.file(sample, self.warmup)
        else:
            self.file(sample, self.tail if self.closed.is_set() else self.measured)

    def file(self, sample: Sample, part: list[Sample]) -> None:
        """A request that ended, to a part of this window. Too many failures close it."""
        part.append(sample)
        self.last_s = max(self.last_s, sample.ended_s)
        if sample.reason and sample.reason not in self._expected:
            self.unexpected += 1
        self._changed.set()
        if self.broken and not self.closed.is_set():
            self.close(sample.ended_s)

    async def until(self, enough: Callable[[], bool]) -> None:
        """Returns once that is so after a request ended, or the window is closed."""
        while not (enough() or self.closed.is_set()):
            self._changed.clear()
            await self._changed.wait()
