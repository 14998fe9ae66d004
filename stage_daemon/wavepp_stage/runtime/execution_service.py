"""StageExecution: waves in, reports and heartbeats out, on one stream.

Owns the stream to the controller and both heartbeats. The stream is the controller's hand on this
daemon: when it breaks, or stays silent for the plan's `silence_ms`, the formation ends here, so a
dead controller leaves nothing held.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Final

from wavepp_proto import convert
from wavepp_proto.errors import StaleMessage, WaveppError
from wavepp_proto.runtime.context import Context
from wavepp_proto.terms import Fence, Heartbeat, WaveCommand, WaveReport
from wavepp_proto.v1 import execution_pb2 as pb
from wavepp_proto.v1 import execution_pb2_grpc
from wavepp_stage.core.events import WaveArrived, WaveQueued
from wavepp_stage.runtime.admission_service import Successor
from wavepp_stage.runtime.core_shell import CoreShell
from wavepp_stage.runtime.executor import Executor
from wavepp_stage.runtime.report_parts import report_parts

OPENING_S: Final = 5.0
"""Longest wait for the first message of a stream."""
END: Final = "end"
"""The controller closed its side."""
Said = WaveReport | WaveppError | str | None


class ExecutionService(execution_pb2_grpc.StageExecutionServicer):
    def __init__(
        self,
        core: CoreShell,
        executor: Executor,
        standing: Callable[[], tuple[Fence, int, int]],
        on_orphaned: Callable[[Fence, str], None],
        draining: Callable[[], bool],
        take_loop_delay_us: Callable[[], int],
    ) -> None:
        """`standing` gives (fence, heartbeat ms, silence ms) of the present formation; `take_loop_delay_us`
        the worst lateness of the event loop since it was last asked."""
        self._core = core
        self._executor = executor
        self._standing = standing
        self._on_orphaned = on_orphaned
        self._draining = draining
        self._outbox: asyncio.Queue[Said] = asyncio.Queue()
        self._streams = Successor()
        self._take_loop_delay_us = take_loop_delay_us
        self.last_heard = time.monotonic()

    def send(self, report: WaveReport) -> None:
        """Queue a report (on the event loop). Bounded by the ring: at most 2P waves are in flight.

        Part by part: heartbeats go between the parts of a long one.
        """
        for part in report_parts(report):
            self._outbox.put_nowait(part)

    async def RunWaves(
        self, request_iterator: AsyncIterator[pb.WaveRequest], context: Context
    ) -> AsyncIterator[pb.WaveResponse]:
        try:
            # The caller's first heartbeat shows its fence: until then nothing is superseded.
            async with asyncio.timeout(OPENING_S):
                opening = convert.wave_request_from_pb(await anext(request_iterator))
            superseded = self._streams.admit(self._core, opening.fence, None)
            fence, heartbeat_ms, silence_ms = self._standing()
        except (TimeoutError, StopAsyncIteration):
            await convert.abort(
                context, StaleMessage("no heartbeat opened this stream", field="stream", value="silent")
            )
        except WaveppError as error:
            await convert.abort(context, error)
        outbox = self._outbox = asyncio.Queue()
        self.last_heard = time.monotonic()
        reader = asyncio.create_task(self._read(request_iterator, outbox, superseded), name="run-waves-reader")
        try:
            count, beat_at, said = 0, 0.0, None
            while said is not END and not superseded.is_set():
                now = time.monotonic()
                if now - self.last_heard > silence_ms / 1000:
                    break
                if now >= beat_at:
                    count, beat_at = count + 1, now + heartbeat_ms / 1000
                    yield convert.wave_response_to_pb(self._beat(fence, count))
                said = await _next(outbox, beat_at - now)
                if isinstance(said, WaveReport):
                    yield convert.wave_response_to_pb(said)
                elif isinstance(said, WaveppError):
                    await convert.abort(context, said)
        finally:
            reader.cancel()
            if not superseded.is_set():
                self._on_orphaned(fence, "the controller's wave stream ended")

    async def _read(
        self, requests: AsyncIterator[pb.WaveRequest], outbox: asyncio.Queue[Said], superseded: asyncio.Event
    ) -> None:
        """Feed the core; what ends the stream goes into the outbox, behind the reports."""
        said: Said = END
        try:
            async for message in requests:
                body = convert.wave_request_from_pb(message)
                self._streams.admit(self._core, body.fence, superseded)
                self.last_heard = time.monotonic()
                if isinstance(body, WaveCommand):
                    self._queue_wave(body)
        except WaveppError as error:
            said = error
        finally:
            outbox.put_nowait(said)

    def _queue_wave(self, command: WaveCommand) -> None:
        for action in self._core.post(WaveArrived(command, time.monotonic())):
            if isinstance(action, WaveQueued):
                self._executor.enqueue(command.fence.formation, action.command)

    def _beat(self, fence: Fence, count: int) -> Heartbeat:
        return Heartbeat(
            fence=Fence(fence.epoch, fence.formation, fence.incarnation),
            count=count,
            executing_wave=self._executor.executing,
            queued_waves=self._executor.queued,
            loop_delay_us=self._take_loop_delay_us(),
            capacity=self._core.read(lambda machine: machine.capacity()),
            draining=self._draining(),
        )


async def _next(outbox: asyncio.Queue[Said], seconds: float) -> Said:
    """The next thing to say, or None after `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            return await outbox.get()
    except TimeoutError:
        return None
