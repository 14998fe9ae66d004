"""StageExecution: waves in, reports and heartbeats out, on one stream.

Owns the stream to the controller and both heartbeats. The stream is the controller's hand on this
daemon: when it breaks, or stays silent for the plan's `silence_ms`, the formation ends here, so a
dead controller leaves nothing held.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from wavepp_proto import convert
from wavepp_proto.errors import WaveppError
from wavepp_proto.runtime.context import Context
from wavepp_proto.terms import Fence, Heartbeat, WaveCommand, WaveReport
from wavepp_proto.v1 import execution_pb2 as pb
from wavepp_proto.v1 import execution_pb2_grpc
from wavepp_stage.core.events import WaveArrived, WaveQueued
from wavepp_stage.runtime.admission_service import Successor
from wavepp_stage.runtime.core_shell import CoreShell
from wavepp_stage.runtime.executor import Executor


class ExecutionService(execution_pb2_grpc.StageExecutionServicer):
    def __init__(
        self,
        core: CoreShell,
        executor: Executor,
        standing: Callable[[], tuple[Fence, int, int]],
        on_orphaned: Callable[[Fence, str], None],
        draining: Callable[[], bool],
    ) -> None:
        """`standing` gives (fence, heartbeat ms, silence ms) of the present formation."""
        self._core = core
        self._executor = executor
        self._standing = standing
        self._on_orphaned = on_orphaned
        self._draining = draining
        self._outbox: asyncio.Queue[WaveReport] = asyncio.Queue()
        self._streams = Successor()
        self.loop_delay_us = 0
        self.last_heard = time.monotonic()

    def send(self, report: WaveReport) -> None:
        """Queue a report (on the event loop). Bounded by the ring: at most 2P waves are in flight."""
        self._outbox.put_nowait(report)

    async def RunWaves(
        self, request_iterator: AsyncIterator[pb.WaveRequest], context: Context
    ) -> AsyncIterator[pb.WaveResponse]:
        superseded = self._streams.open()
        fence, heartbeat_ms, silence_ms = self._standing()
        self._outbox = asyncio.Queue()
        self.last_heard = time.monotonic()
        failure: asyncio.Future[WaveppError | None] = asyncio.get_running_loop().create_future()
        reader = asyncio.create_task(self._read(request_iterator, failure), name="run-waves-reader")
        try:
            count = 0
            while not failure.done() and not superseded.is_set():
                count += 1
                yield convert.wave_response_to_pb(self._beat(fence, count))
                deadline = time.monotonic() + heartbeat_ms / 1000
                async for report in self._reports_until(deadline, failure):
                    yield convert.wave_response_to_pb(report)
                if time.monotonic() - self.last_heard > silence_ms / 1000:
                    break
            error = failure.result() if failure.done() else None
            if error is not None:
                await convert.abort(context, error)
        finally:
            reader.cancel()
            self._on_orphaned(fence, "the controller's wave stream ended")

    async def _read(self, requests: AsyncIterator[pb.WaveRequest], failure: asyncio.Future[WaveppError | None]) -> None:
        """Feed the core; ends `failure` with the error, or None when the controller closed."""
        error: WaveppError | None = None
        try:
            async for message in requests:
                self.last_heard = time.monotonic()
                body = convert.wave_request_from_pb(message)
                if isinstance(body, WaveCommand):
                    self._queue_wave(body)
        except WaveppError as caught:
            error = caught
        finally:
            if not failure.done():
                failure.set_result(error)

    def _queue_wave(self, command: WaveCommand) -> None:
        for action in self._core.post(WaveArrived(command, time.monotonic())):
            if isinstance(action, WaveQueued):
                self._executor.enqueue(command.fence.formation, action.command)

    async def _reports_until(
        self, deadline: float, failure: asyncio.Future[WaveppError | None]
    ) -> AsyncIterator[WaveReport]:
        while not failure.done():
            pause = deadline - time.monotonic()
            if pause <= 0:
                return
            get = asyncio.ensure_future(self._outbox.get())
            waiting: set[asyncio.Future[Any]] = {get, failure}
            await asyncio.wait(waiting, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
            if not get.done():
                get.cancel()
                return
            yield get.result()

    def _beat(self, fence: Fence, count: int) -> Heartbeat:
        return Heartbeat(
            fence=Fence(fence.epoch, fence.formation, fence.incarnation),
            count=count,
            executing_wave=self._executor.executing,
            queued_waves=self._executor.queued,
            loop_delay_us=self.loop_delay_us,
            capacity=self._core.read(lambda machine: machine.capacity()),
            draining=self._draining(),
        )
