"""How long the controller of one formation has been silent.

Owns when it was last heard and the one bound on its silence. A stage that was stopped and goes on finds
in its sockets what a controller meant for a stage that it has long replaced: the age of the last
heartbeat, not the message, tells. machine.py asks before it acts; the shell asks when to look again.
"""

from __future__ import annotations


class Silence:
    """From a formation's start; nothing lapses before the controller was heard once."""

    def __init__(self, silence_ms: int) -> None:
        self._limit_s = silence_ms / 1000
        self._heard: float | None = None

    def hear(self, now: float) -> None:
        """The controller was heard at `now` (s). Two threads post events: an earlier time changes nothing."""
        self._heard = now if self._heard is None else max(self._heard, now)

    @property
    def deadline(self) -> float | None:
        """Last moment (s) at which this stage may still act; None before the controller was heard."""
        return None if self._heard is None else self._heard + self._limit_s

    def lapsed(self, now: float) -> bool:
        """True for whatever comes later than the deadline."""
        deadline = self.deadline
        return deadline is not None and now > deadline

    def lasts(self, now: float) -> float:
        """Seconds since the controller was heard."""
        return 0.0 if self._heard is None else now - self._heard
