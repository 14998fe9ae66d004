"""Whether the executor's thread comes back from what it does; a daemon whose thread does not is of no more use.

Owns how long an ended formation may keep the thread, and the verdict that it hangs: then the process must end, for
nothing can call a thread back, and a new one must load the engine. `daemon.run` waits for that verdict; it ends the
process with a status of its own (`process.EXIT_HUNG`) that its supervisor answers by starting it again.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from wavepp_proto import limits
from wavepp_proto.errors import ENGINE_HUNG, EngineFault
from wavepp_proto.runtime.logs import get_log
from wavepp_stage.engine.base import EngineFacts
from wavepp_stage.runtime.copier import DRAIN_S
from wavepp_stage.runtime.executor import Executing, Executor

log = get_log("wavepp.stage.executor")

SLACK_S: Final = limits.HANG_MS / 1000
"""Beyond what the engine allows a wave of which the controller told no limit."""
GRACE_S: Final = 1.0
"""Before the verdict: the wave may end at the last moment, and a process that was stopped wakes up late."""


class ExecutorWatch:
    """One per daemon, on its event loop."""

    def __init__(self, executor: Executor, stage: int) -> None:
        self._executor, self._stage = executor, stage
        self.hung: asyncio.Future[EngineFault] = asyncio.get_running_loop().create_future()
        """The verdict, once there is one."""
        self._tasks: set[asyncio.Task[None]] = set()

    def gets_on(self, facts: EngineFacts | None) -> bool:
        """False while the engine is at one wave for longer than it may; may be asked from any thread."""
        executing = self._executor.executing
        return not self.hung.done() and (executing is None or _left_s(executing, facts) >= 0)

    def ending(self, stopped: asyncio.Future[None], facts: EngineFacts | None, *, blamed: bool) -> None:
        """A formation has ended; `stopped` once the thread has let go of it."""
        task = asyncio.create_task(self._wait(stopped, facts, blamed=blamed), name="executor-watch")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stopped(self, stopped: asyncio.Future[None]) -> None:
        """Until `stopped`; raises its error, or the verdict, whichever comes first."""
        try:
            either: set[asyncio.Future[Any]] = {stopped, self.hung}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not stopped.done():
                raise self.hung.result()
            stopped.result()
        finally:
            stopped.cancel()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _wait(self, stopped: asyncio.Future[None], facts: EngineFacts | None, *, blamed: bool) -> None:
        """A wave has what is left of its limit; what else the thread may do then (copies that end), as long as that may
        take."""
        executing = self._executor.executing
        if executing is not None:
            await _until(stopped, 0.0 if blamed else max(0.0, _left_s(executing, facts)))
            await _until(stopped, GRACE_S)
            now = self._executor.executing
            if not stopped.done() and now is not None and now.wave == executing.wave:
                self._give_up(f"the engine has not returned from wave {now.wave}, after {now.spent_s:.1f} s", facts)
                return
        await _until(stopped, DRAIN_S + _allowed_s(facts))
        if not stopped.done():
            self._give_up("the formation has ended and the engine has not returned from what it does", facts)
        elif not stopped.cancelled() and (error := stopped.exception()) is not None:
            self._give_up(f"a formation did not end: {error}", facts)

    def _give_up(self, why: str, facts: EngineFacts | None) -> None:
        if not self.hung.done():
            executing = self._executor.executing
            limit = f"{DRAIN_S + _allowed_s(facts) if executing is None else _limit_s(executing, facts):.1f} s"
            said = f"stage {self._stage}: {why}"
            log.error("engine hung", stage=self._stage, error=said, limit=limit)
            self.hung.set_result(EngineFault(said, field="executor", limit=limit, stage=self._stage, cause=ENGINE_HUNG))


async def _until(stopped: asyncio.Future[None], seconds: float) -> None:
    await asyncio.wait({stopped}, timeout=seconds)


def _left_s(executing: Executing, facts: EngineFacts | None) -> float:
    return _limit_s(executing, facts) - executing.spent_s


def _limit_s(executing: Executing, facts: EngineFacts | None) -> float:
    return _allowed_s(facts) if executing.limit_s is None else executing.limit_s


def _allowed_s(facts: EngineFacts | None) -> float:
    return SLACK_S + (limits.FIRST_WAVE_MS / 1000 if facts is None else facts.wave_allowance_s)
