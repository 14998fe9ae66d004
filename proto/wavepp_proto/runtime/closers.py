"""What a process has begun, and how each part of it ends.

Owns the order of closing: the last begun ends first, each once, and a step that fails stops no other. So `close` is
safe after a start that failed anywhere, and the error of that start stays the one that is seen: a failing step is
logged, never raised.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from wavepp_proto import limits
from wavepp_proto.runtime.logs import get_log

log = get_log(__name__)


async def end_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancel `tasks` and wait for their ends, `limits.CLOSE_S` at most; what is left behind is logged. What they raised
    while they ended counts for nothing."""
    for task in tasks:
        task.cancel()
    if not tasks:
        return
    done, stuck = await asyncio.wait(tasks, timeout=limits.CLOSE_S)
    for task in done:
        if not task.cancelled():
            task.exception()  # seen
    if stuck:
        log.error("tasks did not end when they were cancelled", tasks=sorted(task.get_name() for task in stuck))


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
