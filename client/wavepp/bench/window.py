"""Which of a cell's requests count.

    first request ── warm-up ──▶ opened ── measured ──▶ closed ── tail ──▶ last answer

Owns the three lists and the two moments; `load.py` says when they come. In a closed loop both moments are ends of
requests and the load goes on beyond the second, so that nothing measured ran with less company than it should.
"""

from __future__ import annotations

import asyncio
from collections.abc import Set

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
        self._unexpected = 0

    @property
    def unexpected(self) -> int:
        """Failures that nobody expected, in all three parts."""
        return self._unexpected

    @property
    def broken(self) -> bool:
        return self._unexpected >= MOST_FAILURES

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

    def judge(self, sample: Sample) -> None:
        if sample.reason and sample.reason not in self._expected:
            self._unexpected += 1
