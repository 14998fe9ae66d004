"""From a silent controller to a daemon that is somebody new (DESIGN.md sections 4 and 11).

Owns the order: leave the formation at once, wait until no wave and no copy touches a block, then take a
new incarnation in the core and tell everybody who shows it. What an old message may still say, the gate
refuses; what is published stays reusable. When to fence is the core's to say, from whichever thread
brought it the event, or the timer of `execution_service`, that came too late.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable

from wavepp_proto.errors import WaveppError
from wavepp_proto.runtime.logs import get_log
from wavepp_proto.terms import Incarnation
from wavepp_stage.core.events import Reincarnate
from wavepp_stage.runtime.control_service import ControlService
from wavepp_stage.runtime.core_shell import CoreShell

log = get_log("wavepp.stage.fence")


def new_incarnation(after: int | None = None) -> Incarnation:
    """Of a process, or the next one of the same: random, and larger than the one before."""
    return Incarnation(secrets.randbits(62) | 1 if after is None else after + 1 + secrets.randbits(32))


class SelfFence:
    """One per daemon, on its event loop."""

    def __init__(self, core: CoreShell, control: ControlService, on_reborn: Callable[[Incarnation], None]) -> None:
        self._core = core
        self._control = control
        self._on_reborn = on_reborn
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        core.on_fenced = self._fenced_by_core

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _fenced_by_core(self, formation: int, silent_s: float) -> None:
        self._loop.call_soon_threadsafe(self._leave, formation, silent_s)

    def _leave(self, formation: int, silent_s: float) -> None:
        plan = self._control.plan
        if plan is None or plan.fence.formation != formation:
            return  # it was left meanwhile, for whatever reason
        log.warning("formation ended", formation=formation, cause=f"the controller was silent for {silent_s:.2f} s")
        task = self._loop.create_task(self._reincarnate(self._control.leave()), name="reincarnate")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reincarnate(self, stopped: asyncio.Future[None]) -> None:
        async with self._control.joining:
            try:
                await stopped
            except WaveppError as error:
                log.error("a formation did not end", reason=error.reason, error=error.message)
                return
            if self._control.plan is not None:
                return  # a controller was faster: its formation fences whatever was before it
            incarnation = new_incarnation(self._core.read(lambda machine: machine.standing.incarnation))
            self._core.post(Reincarnate(incarnation, time.monotonic()))
            self._on_reborn(incarnation)
            log.info("reincarnated", incarnation=incarnation)
