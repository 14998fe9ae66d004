"""Many prompts at once, a bounded number of them under way, outcomes in the order they come.

Owns the window of running tasks; knows nothing of how one prompt is served. An error is the outcome
of its own prompt and ends nothing else; leaving the iteration early cancels what is under way.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator

from wavepp._types import PrefillOutcome, PrefillResult, Prompt
from wavepp_proto.errors import WaveppError
from wavepp_proto.runtime.closers import end_tasks


async def in_completion_order(
    prefill: Callable[[Prompt], Awaitable[PrefillResult]], prompts: Iterable[Prompt], concurrency: int
) -> AsyncGenerator[PrefillOutcome, None]:
    """One outcome a prompt. `prompts` is read only as far as requests are begun, so it may be endless."""
    waiting = enumerate(prompts)
    running: set[asyncio.Task[PrefillOutcome]] = set()
    try:
        while True:
            for index, prompt in _take(waiting, concurrency - len(running)):
                running.add(asyncio.create_task(_outcome(prefill, index, prompt), name=f"prefill {index}"))
            if not running:
                return
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda task: task.result().index):
                yield task.result()
    finally:
        # Their streams are closed before we are: nothing of ours outlives the iteration.
        await end_tasks(*running)


async def _outcome(prefill: Callable[[Prompt], Awaitable[PrefillResult]], index: int, prompt: Prompt) -> PrefillOutcome:
    try:
        return PrefillOutcome(index, result=await prefill(prompt))
    except WaveppError as error:
        return PrefillOutcome(index, error=error)


def _take(items: Iterator[tuple[int, Prompt]], count: int) -> Iterator[tuple[int, Prompt]]:
    for _ in range(count):
        item = next(items, None)
        if item is None:
            return
        yield item
