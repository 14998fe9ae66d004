"""StageExecution: waves in, reports and heartbeats out, on one stream.

Owns the stream to the controller, both heartbeats, and what is said again on the next stream when one
was cut. A broken stream ends nothing: the formation stays until the core has not heard the controller
for too long and fences this daemon, so a dead controller leaves nothing held. Owns the timer for that.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Final

from wavepp_proto import convert
from wavepp_proto.errors import FormationEnded, StaleMessage, WaveppError
from wavepp_proto.runtime.context import Context
from wavepp_proto.terms import Fence, Heartbeat, JoinPlan, WaveCommand, WaveReport
from wavepp_proto.v1 import execution_pb2 as pb
from wavepp_proto.v1 import execution_pb2_grpc
from wavepp_stage.core.events import ControllerHeard, WaveArrived, WaveQueued
from wavepp_stage.runtime.admission_service import Successor
from wavepp_stage.runtime.core_shell import CoreShell, ended_formation
from wavepp_stage.runtime.executor import Executor
from wavepp_stage.runtime.observability import Observer
from wavepp_stage.runtime.report_log import ReportLog
from wavepp_stage.runtime.report_parts import report_parts

OPENING_S: Final = 5.0
"""Longest wait for the first message of a stream."""
END: Final = "end"
"""The controller closed its side."""
Said = WaveReport | WaveppError | str | None
Outbox = asyncio.Queue[Said]


class ExecutionService(execution_pb2_grpc.StageExecutionServicer):
    def __init__(self, core: CoreShell, executor: Executor, observer: Observer, draining: Callable[[], bool]) -> None:
        self._core = core
        self._executor = executor
        self._observer = observer
        self._draining = draining
        self._plan: JoinPlan | None = None
        self._reports: ReportLog | None = None
        self._outbox: Outbox | None = None
        """Of the present stream; None while there is none."""
        self._streams = Successor()
        self._timer: asyncio.TimerHandle | None = None
        self._opened = False
        """The present formation had a stream already."""

    # --- the formation ----------------------------------------------------------------------------

    def begin(self, plan: JoinPlan) -> None:
        """A formation is served from now on. Its controller, who asked for it, was just heard."""
        self._plan, self._reports, self._opened = plan, ReportLog(plan), False
        self._core.post(ControllerHeard(plan.fence, time.monotonic()))
        self._watch_silence()

    def end(self) -> None:
        """The formation is over: say so on its stream, behind the reports. Idempotent."""
        plan, self._plan, self._reports = self._plan, None, None
        if self._timer is not None:
            self._timer.cancel()
        if plan is not None and self._outbox is not None:
            formation = plan.fence.formation
            self._outbox.put_nowait(FormationEnded(f"formation {formation} has ended", formation=formation))

    def send(self, report: WaveReport) -> None:
        """Report a wave of the present formation (on the event loop), on this stream or the next.

        Part by part: heartbeats go between the parts of a long one."""
        if self._reports is None:
            return
        self._reports.add(report)
        if self._outbox is not None:
            for part in report_parts(report):
                self._outbox.put_nowait(part)

    def _watch_silence(self) -> None:
        """Once the controller has said nothing until the core's deadline, and nothing came that the core could
        refuse, the timer does."""
        self._core.fence_if_silent(time.monotonic())
        deadline = self._core.read(lambda machine: machine.fence_deadline())
        if deadline is not None:
            wait_s = max(0.0, deadline - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._watch_silence)

    # --- the stream -------------------------------------------------------------------------------

    async def RunWaves(
        self, request_iterator: AsyncIterator[pb.WaveRequest], context: Context
    ) -> AsyncIterator[pb.WaveResponse]:
        try:
            # The caller's first heartbeat shows its fence: until then nothing is superseded.
            async with asyncio.timeout(OPENING_S):
                opening = convert.wave_request_from_pb(await anext(request_iterator))
            plan, outbox, superseded = self._open(opening)
        except (TimeoutError, StopAsyncIteration):
            await convert.abort(
                context, StaleMessage("no heartbeat opened this stream", field="stream", value="silent")
            )
        except WaveppError as error:
            await convert.abort(context, error)
        reader = asyncio.create_task(self._read(request_iterator, outbox, superseded), name="run-waves-reader")
        try:
            count, beat_at, said = 0, 0.0, None
            while said is not END and not superseded.is_set():
                now = time.monotonic()
                if now >= beat_at:
                    count, beat_at = count + 1, now + plan.heartbeat_ms / 1000
                    yield convert.wave_response_to_pb(self._beat(plan.fence, count))
                said = await _next(outbox, beat_at - now)
                if isinstance(said, WaveReport):
                    yield convert.wave_response_to_pb(said)
                elif isinstance(said, WaveppError):
                    await convert.abort(context, said)
        finally:
            reader.cancel()
            if self._outbox is outbox:
                self._outbox = None

    def _open(self, opening: WaveCommand | Heartbeat) -> tuple[JoinPlan, Outbox, asyncio.Event]:
        """Let a new stream take over: what its controller has not heard goes into its outbox."""
        superseded = self._streams.admit(self._core, opening.fence, None)
        if not isinstance(opening, Heartbeat):
            raise StaleMessage("a wave stream opens with a heartbeat", field="stream", value="wave")
        plan = self._present()
        self._hear(plan, opening)
        outbox: Outbox = asyncio.Queue()
        for report in self._kept().after(opening.reported_wave):
            for part in report_parts(report):
                outbox.put_nowait(part)
        self._outbox = outbox
        if self._opened:
            self._observer.resumed()
        self._opened = True
        return plan, outbox, superseded

    async def _read(self, requests: AsyncIterator[pb.WaveRequest], outbox: Outbox, superseded: asyncio.Event) -> None:
        """Feed the core; what ends the stream goes into the outbox, behind the reports."""
        said: Said = END
        try:
            async for message in requests:
                body = convert.wave_request_from_pb(message)
                self._streams.admit(self._core, body.fence, superseded)
                if isinstance(body, WaveCommand):
                    self._queue_wave(body)
                else:
                    self._hear(self._present(), body)
        except WaveppError as error:
            said = error
        finally:
            outbox.put_nowait(said)

    def _hear(self, plan: JoinPlan, beat: Heartbeat) -> None:
        """The controller lives, unless the beat waited here while this process was frozen: the core tells."""
        if ended_formation(self._core.post(ControllerHeard(beat.fence, time.monotonic()))):
            raise FormationEnded("this daemon has fenced itself", field="formation", value=plan.fence.formation)
        self._kept().acknowledge(beat.reported_wave)

    def _queue_wave(self, command: WaveCommand) -> None:
        for action in self._core.post(WaveArrived(command, time.monotonic())):
            if isinstance(action, WaveQueued):
                self._executor.enqueue(command.fence.formation, action.command)

    def _present(self) -> JoinPlan:
        if self._plan is None:
            raise FormationEnded("this daemon serves no formation", field="formation", value="none")
        return self._plan

    def _kept(self) -> ReportLog:
        self._present()
        assert self._reports is not None
        return self._reports

    def _beat(self, fence: Fence, count: int) -> Heartbeat:
        executing = self._executor.executing
        return Heartbeat(
            fence=Fence(fence.epoch, fence.formation, fence.incarnation),
            count=count,
            executing_wave=None if executing is None else executing[0],
            executing_ms=0 if executing is None else int(executing[1] * 1000),
            queued_waves=self._executor.queued,
            loop_delay_us=self._observer.take_loop_delay_us(),
            capacity=self._core.read(lambda machine: machine.capacity()),
            draining=self._draining(),
        )


async def _next(outbox: Outbox, seconds: float) -> Said:
    """The next thing to say, or None after `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            return await outbox.get()
    except TimeoutError:
        return None
