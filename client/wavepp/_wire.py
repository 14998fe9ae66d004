"""The client's one channel, and the far side of protobuf.

Owns the channel, the stubs and every message; hands out terms and the SDK's own types, raises typed
errors. Does not own retries, deadlines of requests or tracing. Called by the client and its streams.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

import grpc.aio

from wavepp._runs import CLOSED, Runs, UnknownMethodError
from wavepp._status import ClusterStatus, cluster_status_from_pb
from wavepp._types import Description
from wavepp_proto import convert, limits
from wavepp_proto.errors import Cancelled, InternalError, InvalidRequest, from_info
from wavepp_proto.runtime.channels import ClientSecurity, check_not_forked, open_channel
from wavepp_proto.terms import Admitted, Failed, Finished, PipelineId, PrefillRequest, Progress, Queued
from wavepp_proto.v1 import admin_pb2, admin_pb2_grpc, prefill_pb2, prefill_pb2_grpc

CALL_S: Final = limits.CALL_DEADLINE_MS / 1000

Event = Queued | Admitted | Progress | Finished
"""What a stream yields. A failure is raised instead."""


class Wire:
    """Calls to one controller, multiplexed on one channel. Belongs to the event loop it was made on."""

    def __init__(self, address: str, security: ClientSecurity, proxy: str | None = None) -> None:
        self._loop, self._process = asyncio.get_running_loop(), os.getpid()
        self._channel = open_channel(address, security, proxy)
        self._prefill: prefill_pb2_grpc.PrefillAsyncStub = prefill_pb2_grpc.PrefillStub(self._channel)
        self._runs = Runs(self._channel)
        self._admin: admin_pb2_grpc.AdminAsyncStub = admin_pb2_grpc.AdminStub(self._channel)

    def check_here(self) -> None:
        """Raise InvalidRequest in another process, or on another event loop, than the channel was made in."""
        check_not_forked(self._process)
        if asyncio.get_running_loop() is not self._loop:
            message = "the client is used on another event loop than before: make one client for each loop"
            raise InvalidRequest(message, field="loop", value=str(asyncio.get_running_loop()), limit=str(self._loop))

    def submit(self, request: PrefillRequest) -> Submission:
        """Begin to send `request`. Returns at once; the frames go out while its events are read."""
        with _typed_errors():
            return Submission(self._prefill.Submit(convert.submit_frames(request)))

    def shares_stream(self, request: PrefillRequest) -> bool:
        """Whether `run` sends this request on the stream of all short ones; it has a call of its own otherwise."""
        return self._runs.take(request)

    async def run(self, request: PrefillRequest) -> tuple[PipelineId, Admitted | None, Finished | Failed]:
        """The whole request at once. Raises what it was refused with; what came of it later is returned."""
        if self.shares_stream(request):
            with suppress(UnknownMethodError):
                return await self._runs.run(request)
        with _typed_errors():
            response = await self._prefill.Run(convert.run_request_to_pb(request))
        return convert.run_response_from_pb(request.request_id, response)

    async def cancel(self, request_id: str) -> bool:
        message = prefill_pb2.CancelRequest(request_id=request_id)
        with _typed_errors():
            return (await self._prefill.Cancel(message, timeout=CALL_S)).found

    async def describe(self, pipeline: str | None) -> Description:
        message = prefill_pb2.DescribeRequest(pipeline=pipeline or "")
        with _typed_errors():
            answer = await self._prefill.Describe(message, timeout=CALL_S)
        return Description(
            pipeline=answer.pipeline,
            model=answer.model,
            model_path=answer.model_path,
            model_fingerprint=answer.model_fingerprint,
            vocabulary=answer.vocabulary,
            window=answer.window,
            block_tokens=answer.block_tokens,
            stages=answer.stages,
            ready=answer.ready,
        )

    async def status(self, requests: bool) -> ClusterStatus:
        message = admin_pb2.StatusRequest(requests=requests)
        with _typed_errors():
            return cluster_status_from_pb(await self._admin.Status(message, timeout=CALL_S))

    async def close(self) -> None:
        """Calls under way end with Cancelled, within `limits.CLOSE_S`. From elsewhere than where the channel was made
        it is left to its own loop, or to the end of the process if that loop has ended."""
        if os.getpid() != self._process:
            return
        if asyncio.get_running_loop() is self._loop:
            await self._close()
        elif self._loop.is_running():
            closing = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
            await asyncio.wait((asyncio.wrap_future(closing),), timeout=limits.CLOSE_S)

    async def _close(self) -> None:
        await self._runs.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(limits.CLOSE_S):
                await self._channel.close()


class Submission:
    """One Submit stream. Dropping or cancelling it cancels the request on the controller."""

    def __init__(self, call: grpc.aio.StreamStreamCall[prefill_pb2.SubmitRequest, prefill_pb2.SubmitResponse]) -> None:
        self._call = call
        self._loop, self._process = asyncio.get_running_loop(), os.getpid()

    def __del__(self) -> None:
        # gRPC's own call objects lie in reference cycles: waiting for the collector would keep an
        # abandoned request running. Any thread may drop the last reference.
        here = os.getpid() == self._process  # a forked child would write into its parent's pipe
        if here and not self._call.done() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._call.cancel)

    async def read(self) -> Event:
        """The next event; the typed error if the request failed or the stream ended without an outcome."""
        with _typed_errors():
            response = await self._call.read()
        if not isinstance(response, prefill_pb2.SubmitResponse):
            raise InternalError("the controller ended the stream without an outcome")
        event = convert.prefill_event_from_pb(response.event)
        if isinstance(event, Failed):
            raise from_info(event.error)
        return event

    async def read_end(self) -> None:
        """Wait for the stream's end after its last event, so that the controller sees no cancellation."""
        try:
            await self._call.read()
        except grpc.aio.AioRpcError:
            # The outcome has been delivered: how the stream ends after it changes nothing.
            return

    def cancel(self) -> None:
        """Close the stream; nothing happens if it has ended."""
        self._call.cancel()


@contextmanager
def _typed_errors() -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise convert.error_from_rpc(error) from error
    except grpc.aio.UsageError as error:
        raise Cancelled(CLOSED) from error
    except asyncio.CancelledError:
        # gRPC ends a call whose channel closes like a cancelled task. If nobody cancelled this task,
        # the caller must learn that from an error, not by being torn down.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise Cancelled(CLOSED) from None
