"""The asyncio side's way to the cache: at once where the cache is ours, between two waves where it is the engine's.

Owns which thread handles an event that may touch the cache; everything else goes to `core_shell.py` from
any thread. An engine's own cache manager may only be asked on the executor's thread: there such an event
waits for the wave that computes, with a deadline, and the loop goes on meanwhile. One that the caller has
given up, or whose formation ended first, is never handled; one under way is, and the core remembers its
answer for whoever asks again.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial
from typing import Final

from wavepp_proto import limits
from wavepp_proto.errors import EngineFault
from wavepp_stage.core.events import Action, RoundArrived
from wavepp_stage.engine.base import EngineTraits
from wavepp_stage.runtime.core_shell import CoreShell
from wavepp_stage.runtime.executor import Executor

LONGEST_WAIT_S: Final = limits.WAVE_TIMEOUT_MS / 1000
"""For a thread that computes no wave: a wave may take longer, and the controller knows when that is too long."""


class CacheDoor:
    """One per daemon, on its event loop."""

    def __init__(self, core: CoreShell, executor: Executor, traits: EngineTraits) -> None:
        self._core = core
        self._executor = executor
        self._on_executor = traits.cache_thread == "engine"

    async def post(self, event: RoundArrived) -> list[Action]:
        """Handle one event. Raises the core's typed errors; FormationEnded or EngineFault if it could not be handled
        in its formation, or in time."""
        if not self._on_executor:
            return self._core.post(event)
        answer = asyncio.wrap_future(self._executor.admit(partial(self._handle, event)))
        while True:
            try:
                async with asyncio.timeout(LONGEST_WAIT_S):
                    return await asyncio.shield(answer)
            except TimeoutError:
                if self._executor.executing is not None:
                    continue
                answer.cancel()
                raise EngineFault(
                    f"admission waited for the engine's thread for {LONGEST_WAIT_S:g} s",
                    field="cache_thread", value="engine", limit=f"{LONGEST_WAIT_S:g} s",
                ) from None  # fmt: skip
            except asyncio.CancelledError:
                answer.cancel()
                raise

    def _handle(self, event: RoundArrived) -> list[Action]:
        """Under the present time: while it waited the process may have been stopped, and its controller silent."""
        return self._core.post(replace(event, now=time.monotonic()))
