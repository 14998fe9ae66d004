"""What a process has begun, and how each part of it ends.

Owns the order of closing: the last begun ends first, each once, and a step that fails stops no other. So `close` is
safe after a start that failed anywhere, and the error of that start stays the one that is seen: a failing step is
logged, never raised.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable

from wavepp_proto.runtime.logs import get_log

log = get_log(__name__)

Step = Callable[[], Awaitable[object] | object]


class Closers:
    """`push` as soon as something is begun, `close` once or often. Belongs to one event loop."""

    def __init__(self) -> None:
        self._steps: list[tuple[str, Step]] = []

    def push(self, name: str, step: Step) -> None:
        """`step` ends what was begun just now; it must be bounded and idempotent, and may be a coroutine function."""
        self._steps.append((name, step))

    async def close(self) -> None:
        """Run what was pushed, in reverse. A cancelled call leaves its step and the rest to the next one."""
        while self._steps:
            name, step = last = self._steps[-1]
            try:
                ended = step()
                if inspect.isawaitable(ended):
                    await ended
            except Exception as error:
                log.exception("a step of closing failed", step=name, error=error)
            if last in self._steps:
                self._steps.remove(last)
