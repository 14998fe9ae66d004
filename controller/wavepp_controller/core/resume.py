"""Streams to one daemon that break and are opened again within a formation (DESIGN.md).

Owns whether they are open, when to ask for them again, and how often is too often. A broken stream is no
lost daemon: it is lost when it stays silent. What is sent again once they are open is known by those that
sent it (`rounds`, `ring`, `service`); `pipeline` is the only caller.

    open ──broke──▶ reconnecting: asked for at once ──broke again──▶ asked for after a pause
      ▲                     │ opened                                        │ too often: lost
      └─────────────────────┴──────────── opened ───────────────────────────┘
"""

from __future__ import annotations

from dataclasses import dataclass

from wavepp_controller.core.events import StreamLost
from wavepp_proto.errors import StaleMessage

MOST_FAILURES = 8
"""Breaks in a row, with nothing achieved on the streams between them, after which the daemon is lost."""
FIRST_PAUSE_S = 0.025
LONGEST_PAUSE_S = 0.2
"""A refused connection costs nothing, so tries within the silence that loses a daemon are many."""


@dataclass(slots=True)
class Streams:
    """All streams to one daemon in one formation; they break and open together."""

    reconnecting: bool = False
    reopen_at: float | None = None
    """When to ask for them; None while they are open or asked for."""
    reconnects: int = 0
    failures: int = 0
    """Breaks since anything was achieved."""
    opened_at: float = 0.0

    def broke(self, now: float) -> bool:
        """Note a break; False if it was one too many. One that is told twice counts once."""
        if self.reopen_at is not None:
            return True
        pause = 0.0 if self.failures == 0 else min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (self.failures - 1))
        self.failures += 1
        self.reconnecting, self.reopen_at = True, now + pause
        return self.failures <= MOST_FAILURES

    def due(self, now: float) -> bool:
        return self.reopen_at is not None and now >= self.reopen_at

    def asked(self) -> None:
        self.reopen_at = None

    def opened(self, now: float) -> None:
        self.reconnecting, self.reopen_at, self.opened_at = False, None, now
        self.reconnects += 1

    def worked(self) -> None:
        """Votes or a report were taken: earlier breaks are over."""
        self.failures = 0

    def beat(self, now: float, silence: float) -> None:
        """A heartbeat alone proves little: a daemon that refuses what is sent again beats first, every time."""
        if not self.reconnecting and now - self.opened_at > silence:
            self.failures = 0


def resumable(event: StreamLost) -> bool:
    """The connection broke, or the daemon missed a message, which it is sent again."""
    error = event.error
    missed = error.reason == StaleMessage.reason and ("field", "ordinal") in error.fields
    return event.resumable or missed
