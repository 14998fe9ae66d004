"""The client's side of `RunMany`: all short runs of one client on one stream.

Owns the stream, opened again when it has ended, the numbers of runs, and who waits for which. Runs that are begun at
the same time travel in one message. A stream that breaks ends every run on it as a call of its own would end: with
what gRPC says of the connection. Does not own retries or deadlines: who stops waiting cancels. Called by `_wire.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

import grpc
import grpc.aio

from wavepp_proto import convert, limits
from wavepp_proto.errors import Cancelled, ControllerUnavailable, WaveppError
from wavepp_proto.terms import Admitted, Failed, Finished, PipelineId, PrefillRequest
from wavepp_proto.v1 import prefill_pb2 as pb

CLOSED: Final = "the client was closed while the call was under way"
MESSAGE_BYTES: Final = 4 * limits.MAX_STREAM_RUN_BYTES
"""Runs are added to a message up to this: the first of them is served while the rest travels."""

Answer = tuple[PipelineId, Admitted | None, Finished | Failed]
Call = grpc.aio.StreamStreamCall[bytes, pb.RunManyResponse]


class UnknownMethodError(Exception):
    """The controller is older than this method."""


class Runs:
    """Runs of one client. Belongs to the event loop it is used on."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._open: Callable[[], Call] = channel.stream_stream(
            convert.RUN_MANY_METHOD, response_deserializer=pb.RunManyResponse.FromString
        )
        self._stream: _Stream | None = None
        self._unknown = False

    def take(self, request: PrefillRequest) -> bool:
        """Whether `run` serves this request now; it has a call of its own otherwise."""
        if self._unknown or not convert.may_share_stream(request):
            return False
        return self._stream is None or not self._stream.full

    async def run(self, request: PrefillRequest) -> Answer:
        """The outcome of a request for which `take` said yes. Raises what it was refused with, or how the stream
        ended; UnknownMethodError if it has to have a call of its own."""
        if self._stream is None or self._stream.ended:
            self._stream = _Stream(self._open())
        try:
            return convert.run_answer_from_pb(request.request_id, await self._stream.run(request))
        except UnknownMethodError:
            self._unknown = True
            raise

    async def close(self) -> None:
        """What is under way ends with Cancelled."""
        if self._stream is not None:
            await self._stream.close()


class _Stream:
    """One RunMany call and what waits for its answers."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._last = 0
        self._waiting: dict[int, asyncio.Future[pb.RunAnswer]] = {}
        self._unsent: dict[int, bytes] = {}
        """Runs that no message has taken yet, in order."""
        self._cancels: list[int] = []
        self._wake = asyncio.Event()
        self.ended = False
        """No new run: another stream has to be opened."""
        self._reader = asyncio.create_task(self._read(), name="runs-reader")
        self._writer = asyncio.create_task(self._write(), name="runs-writer")

    @property
    def full(self) -> bool:
        return len(self._waiting) >= limits.MAX_STREAM_RUNS

    async def run(self, request: PrefillRequest) -> pb.RunAnswer:
        """One run and its answer; leaving early cancels it."""
        number = self._last + 1
        self._unsent[number] = convert.run_part(number, request)
        self._last = number
        answer: asyncio.Future[pb.RunAnswer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        self._wake.set()
        try:
            return await answer
        finally:
            if self._waiting.pop(number, None) is not None:
                self._cancel(number)
            elif not answer.cancelled():
                answer.exception()  # seen, although whoever was cancelled in this instant does not raise it

    async def close(self) -> None:
        self._end(lambda: Cancelled(CLOSED))
        tasks = (self._reader, self._writer)
        for task in tasks:
            task.cancel()
        self._call.cancel()
        await asyncio.wait(tasks, timeout=limits.CLOSE_S)

    def _cancel(self, number: int) -> None:
        if self._unsent.pop(number, None) is None and not self.ended:
            self._cancels.append(number)
            self._wake.set()

    # --- the call ---------------------------------------------------------------------------------

    async def _write(self) -> None:
        """Whatever there is to say at the same time in one message; how the call ended is for its reader to tell."""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # gRPC's asyncio client puts INTERNAL over the status of a call that ends under a write, and whether the
            # method is known must be told apart from a connection that broke.
            await self._call.initial_metadata()
            await asyncio.sleep(0)  # a method that is not known answers metadata and status at once: let both be seen
            if self._call.done():
                return
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._unsent or self._cancels:
                    await self._call.write(self._message())

    def _message(self) -> bytes:
        parts, size = [], 0
        if self._cancels:
            parts.append(convert.cancels_part(self._cancels))
            self._cancels.clear()
        for number in list(self._unsent)[: limits.MAX_MESSAGE_RUNS]:
            part = self._unsent[number]
            size += len(part)
            if parts and size > MESSAGE_BYTES:
                break
            parts.append(part)
            del self._unsent[number]
        return b"".join(parts)

    async def _read(self) -> None:
        try:
            while isinstance(response := await self._call.read(), pb.RunManyResponse):
                for answer in response.answers:
                    waiting = self._waiting.pop(answer.number, None)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(answer)
            self._end(lambda: ControllerUnavailable("the controller ended the stream"))
        except grpc.aio.AioRpcError as error:
            self._end(_ending(error))
        except asyncio.CancelledError:
            # gRPC ends a call whose channel closes like a cancelled task.
            self._end(lambda: Cancelled(CLOSED))
        finally:
            self._writer.cancel()
            self._call.cancel()

    def _end(self, why: Callable[[], WaveppError | UnknownMethodError]) -> None:
        """Every run on the stream ends with an error of its own."""
        self.ended = True
        waiting, self._waiting = self._waiting, {}
        self._unsent.clear()
        for answer in waiting.values():
            if not answer.done():
                answer.set_exception(why())


def _ending(error: grpc.aio.AioRpcError) -> Callable[[], WaveppError | UnknownMethodError]:
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return lambda: UnknownMethodError(error.details())
    return lambda: convert.error_from_rpc(error)
