"""Load on a pipeline: a closed loop of so many slots, or arrivals that wait for nobody.

Owns when the next request is sent, and when a cell has seen enough. Does not own what a request is (`asking.py`)
or what comes of it (`measure.py`). Every request has a deadline, so every cell ends.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from wavepp.bench.measure import Sample
from wavepp.bench.window import Window
from wavepp_proto.workload import MOMENT_S, Arrival, Prompt

Ask = Callable[[int, Prompt, float], Awaitable[Sample]]
"""Sends prompt `number`, due at that many seconds, and says what came of it. Raises nothing but cancellation."""


class Clock(Protocol):
    """Seconds since the cell's load began."""

    def now(self) -> float: ...

    async def until(self, at_s: float) -> None:
        """Returns at once if that was earlier."""


class LoopClock:
    """The running event loop's own time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()

    def now(self) -> float:
        return self._loop.time() - self._began

    async def until(self, at_s: float) -> None:
        await asyncio.sleep(at_s - self.now())


@dataclass(frozen=True, slots=True)
class Extent:
    """How much of a closed loop is measured: at least `requests` and at least `seconds`."""

    warmup: int
    """Requests that end before the measured part, at least."""
    requests: int
    seconds: float
    tail: bool = True
    """Whether requests that are under way at the end of the measured part are answered, or given up."""


async def closed_loop(
    ask: Ask, prompt: Callable[[int], Prompt], concurrency: int, extent: Extent, window: Window, clock: Clock
) -> None:
    """`concurrency` slots, each of which sends its next prompt when its last one has ended.

    Until all are answered; without a tail, until the window is closed."""
    numbers = itertools.count()

    async def slot() -> None:
        while not window.closed.is_set():
            number = next(numbers)
            window.add(await ask(number, prompt(number), clock.now()))

    async with asyncio.TaskGroup() as loop:
        measuring = loop.create_task(_open_and_close(extent, concurrency, window, clock))
        slots = [loop.create_task(slot()) for _ in range(concurrency)]
        if not extent.tail:
            await measuring
            for one in slots:
                one.cancel()


async def _open_and_close(extent: Extent, concurrency: int, window: Window, clock: Clock) -> None:
    """Requests that shared a wave end together: the window begins and ends between waves, not within one.

    Else those of the first wave that it counts would have cost no time.
    """
    if extent.warmup:
        await window.until(lambda: len(window.warmup) >= extent.warmup)
        await _settled(concurrency, window, clock)
        if window.closed.is_set():
            return
    window.open(window.last_s)
    await window.until(
        lambda: len(window.measured) >= extent.requests and window.last_s - window.opened_s >= extent.seconds
    )
    await _settled(concurrency, window, clock)
    if not window.closed.is_set():
        window.close(window.last_s)


async def _settled(concurrency: int, window: Window, clock: Clock) -> None:
    """Until no request has ended for a moment, or as many have as can share a wave."""
    most = window.ended + concurrency
    while window.ended < most and not window.closed.is_set():
        ended = window.ended
        await clock.until(window.last_s + MOMENT_S)
        if window.ended == ended:
            return


async def open_loop(
    ask: Ask, arrivals: Sequence[Arrival], warmup: int, most_under_way: int, window: Window, clock: Clock
) -> None:
    """Send each prompt when it is due; the first `warmup` of them are not measured. Until all are answered.

    Beyond `most_under_way` at once an arrival waits, which bounds memory; its completion time counts the wait.
    """
    room = asyncio.Semaphore(most_under_way)

    async def one(number: int, arrival: Arrival) -> None:
        try:
            sample = await ask(number, arrival.prompt, arrival.at_s)
        finally:
            room.release()
        window.file(sample, window.warmup if number < warmup else window.measured)

    async with asyncio.TaskGroup() as under_way:
        for number, arrival in enumerate(arrivals):
            await clock.until(arrival.at_s)
            await room.acquire()
            if window.closed.is_set():  # too many failures
                break
            if number == warmup:
                window.open(arrival.at_s)
            under_way.create_task(one(number, arrival))
    window.close(window.last_s)
