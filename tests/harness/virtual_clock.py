"""Time that passes only when nothing else can happen: for code that asks a clock to be woken.

Owns `now`, `until` and the driving. Equal code, equal order. Used by tests of the bench's loops.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

TURNS = 32
"""Turns of the event loop in which everything that can happen at one moment has happened."""


class VirtualClock:
    """A `wavepp.bench.load.Clock`."""

    def __init__(self) -> None:
        self._now = 0.0
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def now(self) -> float:
        return self._now

    async def until(self, at_s: float) -> None:
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (max(at_s, self._now), next(self._order), woken))
        await woken

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """`work`'s result, however long it takes in virtual time. Fails if it waits for anything else."""
        task = asyncio.create_task(work)
        while True:
            for _ in range(TURNS):
                await asyncio.sleep(0)
            if task.done():
                return task.result()
            if not self._sleepers:
                task.cancel()
                raise AssertionError("it waits, but not for this clock")
            self._now, _, woken = heapq.heappop(self._sleepers)
            if not woken.done():
                woken.set_result(None)
