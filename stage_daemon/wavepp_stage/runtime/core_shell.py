"""The one mutex around the stage core (DESIGN.md section 5).

Owns the lock; both threads of a daemon (asyncio: admission, executor: waves) reach the core only
through `post`. Critical sections are the core's handlers: microseconds, never I/O.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from wavepp_proto.errors import from_info
from wavepp_proto.runtime.logs import get_log
from wavepp_proto.terms import Digest
from wavepp_stage.core.events import Action, CoreError, DigestChanged, Event
from wavepp_stage.core.machine import StageMachine

T = TypeVar("T")

log = get_log(__name__)


class CoreShell:
    """Thread-safe door to one StageMachine."""

    def __init__(self, machine: StageMachine, on_digest: Callable[[], None]) -> None:
        self._machine = machine
        self._mutex = threading.Lock()
        self._on_digest = on_digest

    def post(self, event: Event) -> list[Action]:
        """Handle one event; raises the core's typed errors, InternalError for a broken invariant."""
        with self._mutex:
            actions = self._machine.handle(event)
        kept: list[Action] = [action for action in actions if not isinstance(action, DigestChanged)]
        if len(kept) != len(actions):
            self._on_digest()
        broken = next((action.error for action in kept if isinstance(action, CoreError)), None)
        if broken is not None:
            log.error("the stage core broke an invariant", reason=broken.reason, error=broken.message)
            raise from_info(broken)
        return kept

    def digests_since(self, seq: int) -> list[Digest]:
        with self._mutex:
            return self._machine.digests_since(seq)

    def read(self, question: Callable[[StageMachine], T]) -> T:
        """Answer a question about the core under the mutex."""
        with self._mutex:
            return question(self._machine)
