"""The one mutex around the stage core (DESIGN.md section 5).

Owns the lock; both threads of a daemon (asyncio: admission, executor: waves) reach the core only
through `post`. Critical sections are the core's handlers: microseconds, never I/O.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from wavepp_proto.terms import Digest
from wavepp_stage.core.events import Action, DigestChanged, Event
from wavepp_stage.core.machine import StageMachine

T = TypeVar("T")


class CoreShell:
    """Thread-safe door to one StageMachine."""

    def __init__(self, machine: StageMachine, on_digest: Callable[[], None]) -> None:
        self._machine = machine
        self._mutex = threading.Lock()
        self._on_digest = on_digest

    def post(self, event: Event) -> list[Action]:
        """Handle one event; raises StaleMessage and other typed errors of the core."""
        with self._mutex:
            actions = self._machine.handle(event)
        kept = [action for action in actions if not isinstance(action, DigestChanged)]
        if len(kept) != len(actions):
            self._on_digest()
        return kept

    def digests_since(self, seq: int) -> list[Digest]:
        with self._mutex:
            return self._machine.digests_since(seq)

    def read(self, question: Callable[[StageMachine], T]) -> T:
        """Answer a question about the core under the mutex."""
        with self._mutex:
            return question(self._machine)
