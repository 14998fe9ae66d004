"""From a silent controller, or a broken engine, to a daemon that is somebody new (DESIGN.md).

Owns the order: leave the formation at once, wait until no wave and no copy touches a block, then take a
new incarnation in the core and tell everybody who shows it. What an old message may still say, the gate
refuses; what is published stays reusable. When to fence is the core's to say, from whichever thread
brought it the event, or the timer of `execution_service`, that came too late. An engine that all stages
load together is fenced by a failed wave: its daemon comes back with nothing loaded, whereupon all load again.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Callable, Coroutine
from typing import Any

from wavepp_proto.errors import WaveppError
from wavepp_proto.runtime.backoff import Backoff
from wavepp_proto.runtime.logs import get_log
from wavepp_proto.terms import Incarnation
from wavepp_stage.core.events import Reincarnate
from wavepp_stage.runtime.control_service import ControlService
from wavepp_stage.runtime.core_shell import CoreShell

log = get_log("wavepp.stage.fence")

LONGEST_PAUSE_S = 5.0
"""Before an engine that fails over and over is tried once more."""
IN_A_ROW_S = 30.0
"""A failure that comes later than this after the one before it has nothing to do with it."""


def new_incarnation(after: int | None = None) -> Incarnation:
    """Of a process, or the next one of the same: random, and larger than the one before."""
    return Incarnation(secrets.randbits(62) | 1 if after is None else after + 1 + secrets.randbits(32))


class SelfFence:
    """One per daemon, on its event loop."""

    def __init__(self, core: CoreShell, control: ControlService, on_reborn: Callable[[Incarnation], None]) -> None:
        self._core = core
        self._control = control
        self._on_reborn = on_reborn
        self._pauses, self._failed_at = Backoff(most_s=LONGEST_PAUSE_S), -math.inf
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
        self._start(self._reincarnate(self._control.leave()), "reincarnate")

    def fence_engine(self, cause: str) -> None:
        """The engine of stages that load together is broken (on the event loop): nothing runs on it until all have
        loaded again. Somebody new after a pause that grows with failures in a row."""
        if not self._control.fenced:
            self._control.fenced = cause
            log.warning("engine fenced", cause=cause)
            self._start(self._renew(cause), "renew")

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = self._loop.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _renew(self, cause: str) -> None:
        plan = self._control.plan
        try:
            if plan is not None:
                await self._control.end_formation(plan.fence, cause)
        except WaveppError as error:  # somebody else ended it meanwhile, or its copies hang: the next join looks again
            log.info("the formation of a fenced engine had ended", reason=error.reason, error=error.message)
        now = time.monotonic()
        if now - self._failed_at > IN_A_ROW_S:
            self._pauses.reset()
        self._failed_at = now
        await asyncio.sleep(self._pauses.next_s())
        async with self._control.joining:
            self._become_new()

    async def _reincarnate(self, stopped: asyncio.Future[None]) -> None:
        async with self._control.joining:
            try:
                await stopped
            except WaveppError as error:
                log.error("a formation did not end", reason=error.reason, error=error.message)
                return
            if self._control.plan is not None:
                return  # a controller was faster: its formation fences whatever was before it
            self._become_new()

    def _become_new(self) -> None:
        incarnation = new_incarnation(self._core.read(lambda machine: machine.standing.incarnation))
        self._core.post(Reincarnate(incarnation, time.monotonic()))
        self._on_reborn(incarnation)
        log.info("reincarnated", incarnation=incarnation)
