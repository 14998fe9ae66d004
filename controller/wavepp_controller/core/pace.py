"""How fast a pipeline works, and when a request behind others would start (DESIGN.md, verdicts).

Owns the rate over the last few seconds of WORK with a full ring: idle time says nothing about speed, nor does the
time that a lone wave takes through all stages. Pure numbers, fed by `execution` with what the last stage reports.
Knows no rate until there was enough work to measure, and then nobody is refused.
"""

from __future__ import annotations

from collections import deque

KEEP_S = 5.0
"""Seconds of work that count, or the last LEAST_WAVES waves if those took longer."""
LEAST_S = 0.5
LEAST_WAVES = 4
"""Less work, or fewer waves, than this are no measurement: one small wave that was held up says nothing."""


class Pace:
    def __init__(self) -> None:
        self._lots: deque[tuple[int, float]] = deque()
        self._tokens = 0
        self._seconds = 0.0

    def worked(self, tokens: int, seconds: float) -> None:
        """The last stage reported a wave of `tokens`, `seconds` after the previous one or after work began."""
        self._lots.append((tokens, seconds))
        self._tokens += tokens
        self._seconds += seconds
        while len(self._lots) > LEAST_WAVES and self._seconds - self._lots[0][1] >= KEEP_S:
            old_tokens, old_seconds = self._lots.popleft()
            self._tokens -= old_tokens
            self._seconds -= old_seconds

    def seconds_for(self, tokens: int) -> float | None:
        """How long `tokens` take; None while no rate is known."""
        if self._seconds < LEAST_S or len(self._lots) < LEAST_WAVES or not self._tokens:
            return None
        return tokens * self._seconds / self._tokens
