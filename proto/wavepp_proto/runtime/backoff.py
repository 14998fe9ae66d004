"""Delays between tries: exponential, capped, jittered, so that many peers never retry in step.

Pure apart from its random source. Used by registration, watching and election.
"""

from __future__ import annotations

import random
from typing import Final

FIRST_S: Final = 0.1
MOST_S: Final = 1.5
"""At least six tries within MEMBER_TTL_S, so that a short outage costs no lease."""


class Backoff:
    """`next_s()` grows from `first_s` to `most_s`, each time between half and all of it."""

    def __init__(self, first_s: float = FIRST_S, most_s: float = MOST_S, rng: random.Random | None = None) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._rng = rng or random.Random()
        self._tries = 0

    def next_s(self) -> float:
        """Seconds to wait before the next try."""
        ceiling = min(self._most_s, self._first_s * 2.0**self._tries)
        if ceiling < self._most_s:
            self._tries += 1
        return ceiling * self._rng.uniform(0.5, 1.0)

    def reset(self) -> None:
        """After a success: start small again."""
        self._tries = 0
