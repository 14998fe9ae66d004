"""Many runs on one stream of the fake controller, each answered by itself.

Owns the tasks of one stream's runs; what a run answers is `_fake_service.py`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from wavepp_proto import convert
from wavepp_proto.errors import WaveppError
from wavepp_proto.v1 import prefill_pb2

Run = Callable[[prefill_pb2.RunRequest], Awaitable[prefill_pb2.RunResponse]]
Write = Callable[[prefill_pb2.RunManyResponse], Awaitable[None]]


async def serve_runs(messages: AsyncIterator[prefill_pb2.RunManyRequest], write: Write, run: Run) -> None:
    """Until the client closes its side and every run has ended; what lives is cancelled with the stream."""
    live: dict[int, asyncio.Task[None]] = {}
    writing = asyncio.Lock()

    async def answer(asked: prefill_pb2.NumberedRun) -> None:
        try:
            answered = prefill_pb2.RunAnswer(number=asked.number, response=await run(asked.run))
        except WaveppError as error:
            answered = convert.refusal_to_pb(asked.number, error)
        # Too late to be cancelled: gRPC takes one write at a time, and each to its end.
        live.pop(asked.number, None)
        async with writing:
            await write(prefill_pb2.RunManyResponse(answers=[answered]))

    answering: set[asyncio.Task[None]] = set()
    try:
        async for message in messages:
            for number in message.cancels:
                if (gone := live.pop(number, None)) is not None:
                    gone.cancel()
            for asked in message.runs:
                task = live[asked.number] = asyncio.create_task(answer(asked))
                answering.add(task)
                task.add_done_callback(answering.discard)
        if answering:
            await asyncio.wait(answering)
    finally:
        for task in answering:
            task.cancel()
