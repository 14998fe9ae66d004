"""Prompts on their way in: frames become requests, within bounds of memory and of time.

Owns the count of bytes under assembly over all streams, and the three deadlines of one prompt: the
pause between two frames, the request's own deadline, and a longest time for any prompt. Called by
`prefill_service`; what a whole request may cost from then on is the core's to judge.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

from wavepp_proto import convert, limits
from wavepp_proto.errors import ControllerUnavailable, DeadlineExpired, InvalidRequest, QueueFull
from wavepp_proto.terms import PrefillRequest
from wavepp_proto.v1 import prefill_pb2 as pb

FRAME_DEADLINE_S = 30.0
"""Longest pause between two frames of one prompt."""
RETRY_AFTER_MS = 1000


class PromptIntake:
    """One for all streams of a controller."""

    def __init__(self) -> None:
        self.assembling_bytes = 0
        """Tokens of prompts that are not whole yet."""
        self._closed = False
        self._ends: set[asyncio.Timeout] = set()
        """Of the prompts that arrive now: moved to the present instant by `close`."""

    def close(self) -> None:
        """End every `receive`, under way or later, with ControllerUnavailable."""
        self._closed = True
        now = asyncio.get_running_loop().time()
        for end in self._ends:
            end.reschedule(now)

    async def receive(
        self, assembler: convert.PromptAssembler, frames: AsyncIterator[pb.SubmitRequest]
    ) -> PrefillRequest:
        """The whole request, its deadline shortened by what its frames took.

        Raises InvalidRequest or MessageTooLarge for malformed frames, QueueFull beyond MAX_ASSEMBLING_BYTES,
        DeadlineExpired when a frame or the whole prompt takes too long, ControllerUnavailable once closed.
        """
        if self._closed:
            raise _closing()
        try:
            async with asyncio.timeout(None) as end:
                self._ends.add(end)
                try:
                    return await self._assemble(assembler, frames)
                finally:
                    self._ends.discard(end)
        except TimeoutError:
            raise _closing() from None

    async def _assemble(
        self, assembler: convert.PromptAssembler, frames: AsyncIterator[pb.SubmitRequest]
    ) -> PrefillRequest:
        arrived = time.monotonic()
        counted = 0
        try:
            while True:
                frame = await _next(frames, assembler.header, time.monotonic() - arrived)
                size = len(frame.token_ids)
                self._check_room(size)
                self.assembling_bytes += size
                counted += size
                if (request := assembler.add(frame)) is not None:
                    return _aged(request, time.monotonic() - arrived)
        finally:
            assembler.drop()
            self.assembling_bytes -= counted

    def _check_room(self, size: int) -> None:
        wanted, limit = self.assembling_bytes + size, limits.MAX_ASSEMBLING_BYTES
        if wanted > limit:
            raise QueueFull(
                f"prompts under assembly would hold {wanted} bytes, at most {limit}",
                field="assembling_bytes",
                value=wanted,
                limit=limit,
                retry_after_ms=RETRY_AFTER_MS,
            )


async def _next(frames: AsyncIterator[pb.SubmitRequest], header: PrefillRequest | None, age: float) -> pb.SubmitRequest:
    """The next frame of a prompt whose first one was asked for `age` seconds ago."""
    seconds, late = min(_bounds(header, age), key=lambda bound: bound[0])
    if seconds <= 0:
        raise late
    try:
        async with asyncio.timeout(seconds):
            return await anext(frames)
    except TimeoutError:
        raise late from None
    except StopAsyncIteration:
        raise InvalidRequest("the prompt ended before its last frame", field="last", value="false") from None


def _bounds(header: PrefillRequest | None, age: float) -> Iterator[tuple[float, DeadlineExpired]]:
    """Every time limit of the next frame: seconds left, and what to say when they are over."""
    message = "the next frame of the prompt did not come"
    yield FRAME_DEADLINE_S, DeadlineExpired(message, field="frame", limit=FRAME_DEADLINE_S)
    longest = limits.MAX_ASSEMBLY_MS
    message = f"the prompt did not arrive within {longest} ms"
    yield longest / 1000 - age, DeadlineExpired(message, field="assembly_ms", limit=longest)
    if header is not None and header.deadline_ms:
        yield header.deadline_ms / 1000 - age, _deadline_passed(header.deadline_ms)


def _aged(request: PrefillRequest, seconds: float) -> PrefillRequest:
    """The deadline counts from when the first frame came; framing a long prompt takes time."""
    if not request.deadline_ms:
        return request
    left = request.deadline_ms - round(seconds * 1000)
    if left <= 0:
        raise _deadline_passed(request.deadline_ms)
    return replace(request, deadline_ms=left)


def _closing() -> ControllerUnavailable:
    return ControllerUnavailable("the controller closes while the prompt arrives", retry_after_ms=RETRY_AFTER_MS)


def _deadline_passed(deadline_ms: int) -> DeadlineExpired:
    return DeadlineExpired("the deadline passed while the prompt arrived", field="deadline_ms", value=deadline_ms)
