"""The one mutex around the stage core (DESIGN.md).

Owns the lock; every thread of a daemon (asyncio: admission, executor: waves, copier) reaches the core
only through `post`. Critical sections are the core's handlers: microseconds, never I/O. What the core
asks for whichever thread happened to call (copies, news for digest readers, a self-fence) is routed here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from wavepp_proto.errors import from_info
from wavepp_proto.runtime.logs import get_log
from wavepp_proto.terms import Digest
from wavepp_stage.core.events import (
    Action,
    CoreError,
    DigestChanged,
    Event,
    FormationEnded,
    SelfFenced,
    StartCopies,
)
from wavepp_stage.core.machine import StageMachine
from wavepp_stage.core.work import CopyLot

T = TypeVar("T")

log = get_log(__name__)


class CoreShell:
    """Thread-safe door to one StageMachine."""

    def __init__(self, machine: StageMachine, on_digest: Callable[[], None]) -> None:
        self._machine = machine
        self._mutex = threading.Lock()
        self._on_digest = on_digest
        self.start_copies: Callable[[CopyLot], None] = _no_copies
        """Takes a lot, under the mutex: lots are taken in the order in which the core made them."""
        self.on_fenced: Callable[[int, float], None] = lambda formation, silent_s: None
        """Told of a self-fence: the formation that it ended (0 = none) and the silence (s); any thread."""

    def post(self, event: Event) -> list[Action]:
        """Handle one event; raises the core's typed errors, InternalError for a broken invariant."""
        return self._apply(lambda machine: machine.handle(event))

    def fence_if_silent(self, now: float) -> None:
        """End the formation if its controller has been silent until its deadline (`now`: monotonic seconds)."""
        self._apply(lambda machine: machine.fence_if_silent(now))

    def _apply(self, step: Callable[[StageMachine], list[Action]]) -> list[Action]:
        with self._mutex:
            actions = step(self._machine)
            for action in actions:
                if isinstance(action, StartCopies):
                    self.start_copies(action.lot)
        kept: list[Action] = [action for action in actions if not isinstance(action, DigestChanged | StartCopies)]
        if any(isinstance(action, DigestChanged) for action in actions):
            self._on_digest()
        broken = next((action.error for action in kept if isinstance(action, CoreError)), None)
        if broken is not None:
            log.error("the stage core broke an invariant", reason=broken.reason, error=broken.message)
            raise from_info(broken)
        fenced = next((action for action in kept if isinstance(action, SelfFenced)), None)
        if fenced is not None:
            self.on_fenced(ended_formation(kept), fenced.silent_s)
        return kept

    def digests_since(self, seq: int) -> Sequence[Digest]:
        with self._mutex:
            return self._machine.digests_since(seq)

    def read(self, question: Callable[[StageMachine], T]) -> T:
        """Answer a question about the core under the mutex."""
        with self._mutex:
            return question(self._machine)


def ended_formation(actions: list[Action]) -> int:
    """The formation that an event ended, 0 if none."""
    return next((action.formation for action in actions if isinstance(action, FormationEnded)), 0)


def _no_copies(lot: CopyLot) -> None:
    raise AssertionError(f"lot {lot.number} has no copy thread to go to")
