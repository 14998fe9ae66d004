"""One daemon in one formation, as the controller reaches it.

Owns the channel and the four long-lived streams (Announce, PinReserve, RunWaves, Watch) from join to
the end of the formation; everything heard becomes an event. The first stream that breaks, and only
the first, posts StreamLost. Nothing here decides anything.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import grpc.aio

from wavepp_controller.core.events import (
    AnnounceAcked,
    BeatArrived,
    DigestArrived,
    Event,
    ReportArrived,
    StreamLost,
    VotesArrived,
)
from wavepp_controller.runtime.report_merger import ReportMerger
from wavepp_proto import convert, limits
from wavepp_proto.errors import ControllerUnavailable, FormationEnded, JoinRefused, StageLost, WaveppError
from wavepp_proto.runtime.channels import ClientSecurity, open_channel
from wavepp_proto.runtime.logs import get_log
from wavepp_proto.runtime.streams import converse
from wavepp_proto.terms import ErrorInfo, Fence, Heartbeat, Inventory, JoinPlan, JoinReply, Round, WaveReport
from wavepp_proto.v1 import (
    admission_pb2,
    admission_pb2_grpc,
    control_pb2_grpc,
    digest_pb2_grpc,
    execution_pb2,
    execution_pb2_grpc,
)

log = get_log(__name__)

_ByteStreams = grpc.aio.StreamStreamMultiCallable[bytes, admission_pb2.AnnounceResponse]
"""Takes its messages serialised."""

END_DEADLINE_S = 1.0
"""How long a daemon may take to answer that a formation ended; it finds out by itself otherwise."""

GATHER_S = 0.004
"""Time to the next announcement, for each frame in the last: the denser they come, the more go together."""
MOST_GATHERS = 4
"""So no announcement waits longer than 16 ms, and the first after a pause leaves at once."""


class DaemonLink:
    """Streams to one incarnation. `join`, then `serve`; `close` at any time."""

    def __init__(self, plan: JoinPlan, address: str, security: ClientSecurity, post: Callable[[Event], None]) -> None:
        self.plan = plan
        self._post = post
        self._channel = open_channel(address, security)
        self._announces: asyncio.Queue[bytes] = asyncio.Queue()
        self._rounds: asyncio.Queue[admission_pb2.Round] = asyncio.Queue()
        self._waves: asyncio.Queue[execution_pb2.WaveRequest] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._watch: asyncio.Task[None] | None = None
        self._lost = False
        self._closed = False

    async def join(self) -> JoinReply:
        """Inventory first (it installs the epoch and fences the controller before us), then Join."""
        deadline = self.plan.deadline_ms / 1000
        try:
            await self.inventory()
            self._check_open()
            control = control_pb2_grpc.StageControlStub(self._channel)
            reply = convert.join_reply_from_pb(
                await control.Join(convert.join_plan_to_pb(self.plan), timeout=deadline + 1)
            )
        except grpc.aio.AioRpcError as error:
            raise convert.error_from_rpc(error) from error
        if reply.fence != self.plan.fence:
            raise JoinRefused("the reply belongs to another join", field="fence", value=str(reply.fence))
        return reply

    async def inventory(self) -> Inventory:
        """Every hold and sequence of the daemon, now."""
        self._check_open()
        stub = admission_pb2_grpc.StageAdmissionStub(self._channel)
        request = convert.inventory_request_to_pb(self.plan.fence)
        try:
            reply = await stub.Inventory(request, timeout=limits.CALL_DEADLINE_MS / 1000)
        except grpc.aio.AioRpcError as error:
            raise convert.error_from_rpc(error) from error
        return convert.inventory_from_pb(reply)

    def serve(self) -> None:
        """Open all streams; whatever they say is posted from now on."""
        self._start(self._run_announces(), "announce")
        self._start(self._run_rounds(), "rounds")
        self._start(self._run_waves(), "waves")
        self._start(self._beat(), "beat")
        self.watch_digest()

    # --- sending ----------------------------------------------------------------------------------

    def announce(self, parts: list[bytes]) -> None:
        """Frames of one request, as `convert.announce_part` makes them."""
        for part in parts:
            self._announces.put_nowait(part)

    def send_round(self, round_: Round) -> None:
        self._rounds.put_nowait(convert.round_to_pb(round_))

    def send_wave(self, message: execution_pb2.WaveRequest) -> None:
        self._waves.put_nowait(message)

    def watch_digest(self) -> None:
        """Ask for a snapshot and what follows; replaces an earlier watch."""
        if self._watch is not None:
            self._watch.cancel()
        self._watch = self._start(self._run_digest(), "digest")

    # --- streams ----------------------------------------------------------------------------------

    async def _run_announces(self) -> None:
        parse = admission_pb2.AnnounceResponse.FromString
        announce: _ByteStreams = self._channel.stream_stream(convert.ANNOUNCE_METHOD, response_deserializer=parse)
        async for message in converse(announce(), self._announcements()):
            self._hear(AnnounceAcked(self.plan.key, convert.announce_ack_from_pb(message), time.monotonic()))

    async def _announcements(self) -> AsyncIterator[bytes]:
        """What queued up since the last message goes out together: a message costs more than the frames in it."""
        while True:
            parts = [await self._announces.get()]
            size = len(parts[0])
            while size < limits.FRAME_BYTES and len(parts) < limits.MAX_ANNOUNCE_FRAMES and self._announces.qsize():
                parts.append(self._announces.get_nowait())
                size += len(parts[-1])
            yield convert.announce_message(self.plan.fence, parts)
            if self._announces.empty():
                await asyncio.sleep(GATHER_S * min(len(parts), MOST_GATHERS))

    async def _run_rounds(self) -> None:
        stub = admission_pb2_grpc.StageAdmissionStub(self._channel)
        async for message in converse(stub.PinReserve(), _drain(self._rounds)):
            self._hear(VotesArrived(self.plan.key, convert.votes_from_pb(message), time.monotonic()))

    async def _run_waves(self) -> None:
        stub = execution_pb2_grpc.StageExecutionStub(self._channel)
        merger = ReportMerger()
        async for message in converse(stub.RunWaves(), _drain(self._waves)):
            body: WaveReport | Heartbeat = convert.wave_response_from_pb(message)
            if isinstance(body, WaveReport):
                if (report := merger.add(body)) is not None:
                    self._hear(ReportArrived(self.plan.key, report, time.monotonic()))
            else:
                self._hear(BeatArrived(self.plan.key, body, time.monotonic()))

    async def _run_digest(self) -> None:
        stub = digest_pb2_grpc.StageDigestStub(self._channel)
        async for message in stub.Watch(convert.watch_digest_to_pb(self.plan.fence, 0)):
            self._hear(DigestArrived(self.plan.key, convert.digest_from_pb(message), time.monotonic()))

    async def _beat(self) -> None:
        """Our own heartbeat: a daemon that does not hear it ends the formation by itself."""
        fence = self.plan.fence
        count = 0
        while True:
            count += 1
            beat = Heartbeat(Fence(fence.epoch, fence.formation, fence.incarnation), count)
            self._waves.put_nowait(convert.wave_request_to_pb(beat))
            await asyncio.sleep(self.plan.heartbeat_ms / 1000)

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(self._guard(work), name=f"{name}-{self.plan.key}")
        self._tasks.append(task)
        return task

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        """Turn the end of a stream, for whatever cause, into StreamLost."""
        stage = self.plan.key.stage
        try:
            await work
            # it lives, and says that it heard nothing of us for too long: it may be asked again at once
            error: WaveppError = FormationEnded(f"stage {stage} closed a stream", stage=stage)
        except grpc.aio.AioRpcError as broken:
            error = convert.error_from_rpc(broken)
            if isinstance(error, ControllerUnavailable):
                # the generic reading of UNAVAILABLE; here the peer is a stage
                error = StageLost(f"stage {stage} is unreachable: {broken.details()}", stage=stage)
        except WaveppError as refused:
            error = refused
        self._lose(error.info())

    def _hear(self, event: Event) -> None:
        if not self._lost:
            self._post(event)

    def _lose(self, error: ErrorInfo) -> None:
        if self._lost:
            return
        self._lost = True
        fence = self.plan.fence
        self._post(StreamLost(self.plan.key, fence.incarnation, fence.formation, error, time.monotonic()))

    # --- the end ----------------------------------------------------------------------------------

    async def end(self, fence: Fence, cause: ErrorInfo) -> None:
        """Tell the daemon that its formation ended (best effort, bounded), then close."""
        self._lost = True
        try:
            self._check_open()
            stub = control_pb2_grpc.StageControlStub(self._channel)
            await stub.EndFormation(convert.end_formation_to_pb(fence, cause), timeout=END_DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            log.info("formation end not acknowledged", stage=self.plan.key.stage, code=error.code().name)
        except FormationEnded:
            log.info("formation end not told: the link is closed", stage=self.plan.key.stage)
        finally:
            await self.close()

    async def close(self) -> None:
        """Close every stream and the channel. Idempotent."""
        self._lost = self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close(0)

    def _check_open(self) -> None:
        """gRPC refuses a call on a closed channel with an error of its own kind; ours is typed."""
        if self._closed:
            number = self.plan.fence.formation
            raise FormationEnded("the link was closed meanwhile", stage=self.plan.key.stage, formation=number)


async def _drain(queue: asyncio.Queue[Any]) -> AsyncIterator[Any]:
    while True:
        yield await queue.get()
