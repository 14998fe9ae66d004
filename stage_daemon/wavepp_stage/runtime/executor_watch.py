"""Whether the executor's thread comes back from what it does; a daemon whose thread does not is of no more use.

Owns how long an ended formation may keep the thread, and the verdict that it hangs: then the process must end, for
nothing can call a thread back, and a new one must load the engine. `daemon.run` waits for that verdict; it ends the
process with a status of its own (`process.EXIT_HUNG`) that its supervisor answers by starting it again.
"""

from __future__ import annotations

import asyncio
from typing import Final

from wavepp_proto import limits
from wavepp_proto.errors import ENGINE_HUNG, EngineFault
from wavepp_proto.runtime.logs import get_log
from wavepp_stage.engine.base import EngineFacts
from wavepp_stage.runtime.copier import DRAIN_S
from wavepp_stage.runtime.executor import Executor

log = get_log("wavepp.stage.executor")

SLACK_S: Final = limits.HANG_MS / 1000
"""Beyond what the engine allows a wave."""
BLAMED_S: Final = 1.0
"""Where the controller knows already that the engine hangs: the wave may end at the last moment."""


class ExecutorWatch:
    """One per daemon, on its event loop."""

    def __init__(self, executor: Executor, stage: int) -> None:
        self._executor, self._stage = executor, stage
        self.hung: asyncio.Future[EngineFault] = asyncio.get_running_loop().create_future()
        """The verdict, once there is one."""
        self._tasks: set[asyncio.Task[None]] = set()

    def gets_on(self, facts: EngineFacts | None) -> bool:
        """False while the engine is at one wave for longer than it allows; may be asked from any thread."""
        executing = self._executor.executing
        return not self.hung.done() and (executing is None or executing[1] <= _limit_s(facts))

    def ending(self, stopped: asyncio.Future[None], facts: EngineFacts | None, *, blamed: bool) -> None:
        """A formation has ended; `stopped` once the thread has let go of it."""
        task = asyncio.create_task(
            self._wait(stopped, BLAMED_S if blamed else DRAIN_S + _limit_s(facts)), name="executor-watch"
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _wait(self, stopped: asyncio.Future[None], limit_s: float) -> None:
        done, _ = await asyncio.wait({stopped}, timeout=limit_s)
        if not done:
            executing = self._executor.executing
            at = "what it does" if executing is None else f"wave {executing[0]}, after {executing[1]:.1f} s"
            self._give_up(f"the formation ended {limit_s:.1f} s ago and the engine has not returned from {at}", limit_s)
        elif not stopped.cancelled() and (error := stopped.exception()) is not None:
            self._give_up(f"a formation did not end: {error}", limit_s)

    def _give_up(self, why: str, limit_s: float) -> None:
        if not self.hung.done():
            log.error("engine hung", stage=self._stage, error=why, limit=f"{limit_s:.1f} s")
            self.hung.set_result(
                EngineFault(why, field="executor", limit=f"{limit_s:.1f} s", stage=self._stage, cause=ENGINE_HUNG)
            )


def _limit_s(facts: EngineFacts | None) -> float:
    return SLACK_S + (limits.FIRST_WAVE_MS / 1000 if facts is None else facts.wave_allowance_s)
