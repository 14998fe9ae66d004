"""One daemon in one formation, as the controller reaches it.

Owns the channel and the four long-lived streams (Announce, PinReserve, RunWaves, Watch) from join to
the end of the formation; everything heard becomes an event. The unary calls are `calls`. The first stream
that breaks, and only the first, posts StreamLost; `reopen` opens them again on the same channel. Decides
nothing but whether what ended a stream leaves anything to resume.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any

import grpc.aio

from wavepp_controller.core.events import (
    AnnounceAcked,
    BeatArrived,
    DigestArrived,
    Event,
    ReportArrived,
    StreamLost,
    StreamsReopened,
    VotesArrived,
)
from wavepp_controller.core.riding import Riding
from wavepp_controller.runtime.announcing import AnnounceQueue
from wavepp_controller.runtime.daemon_calls import DaemonCalls
from wavepp_controller.runtime.report_merger import ReportMerger
from wavepp_controller.runtime.stream_endings import StreamEnding, is_refused, judge
from wavepp_proto import convert
from wavepp_proto.errors import StageLost, WaveppError
from wavepp_proto.runtime.channels import ClientSecurity, open_channel
from wavepp_proto.runtime.closers import end_tasks
from wavepp_proto.runtime.streams import converse
from wavepp_proto.terms import (
    ErrorInfo,
    Fence,
    Heartbeat,
    HoldKey,
    JoinPlan,
    Round,
    WaveOrdinal,
    WaveReport,
)
from wavepp_proto.v1 import (
    admission_pb2,
    digest_pb2_grpc,
    execution_pb2,
)

_Announces = grpc.aio.StreamStreamMultiCallable[bytes, admission_pb2.AnnounceResponse]
_Rounds = grpc.aio.StreamStreamMultiCallable[bytes, admission_pb2.Votes]
_Waves = grpc.aio.StreamStreamMultiCallable[bytes, execution_pb2.WaveResponse]
"""They take their messages serialised: what daemons are sent alike is serialised once."""

_Stream = Callable[[], Coroutine[Any, Any, None]]

REOPEN_PAUSE_S = 0.1
"""Between two tries to open broken streams again; the core ends them when the daemon is silent for too long."""


class DaemonLink:
    """Streams to one incarnation. `calls.join`, then `serve`; `reopen` after a loss; `close` at any time."""

    def __init__(
        self,
        plan: JoinPlan,
        address: str,
        security: ClientSecurity,
        post: Callable[[Event], None],
        reported_wave: Callable[[], WaveOrdinal] = lambda: WaveOrdinal(0),
    ) -> None:
        """`reported_wave` gives the last wave whose report the core has taken from this daemon."""
        self.plan = plan
        self._address = address
        self._post = post
        self._reported_wave = reported_wave
        self._channel = open_channel(address, security)
        self.calls = DaemonCalls(plan, self._channel)
        self._riding = Riding[bytes]()
        self._new_queues()
        self._tasks: set[asyncio.Task[None]] = set()
        self._watch: asyncio.Task[None] | None = None
        self._reopening: asyncio.Task[None] | None = None
        self._opening: asyncio.Future[StreamEnding | None] | None = None
        """While streams are being opened again: how that ended, None for the daemon's answer."""
        self._lost = False
        """A stream has ended: nothing is heard or sent until the streams are open again."""
        self._beats = 0
        self._acknowledged = WaveOrdinal(0)
        """What the daemon was last told that we have."""

    def _new_queues(self) -> None:
        """Nothing that was meant for broken streams goes out on new ones: the core says it again."""
        self._announces = AnnounceQueue(self.plan.fence)
        self._rounds: asyncio.Queue[bytes] = asyncio.Queue()
        self._waves: asyncio.Queue[bytes] = asyncio.Queue()

    def serve(self) -> None:
        """Open all streams; whatever they say is posted from now on."""
        self._open(WaveOrdinal(0))
        self.watch_digest(0)

    def reopen(self, reported_wave: WaveOrdinal) -> None:
        """Open all streams but the digest's again; the daemon reports every wave after `reported_wave` anew.

        Posts StreamsReopened once the daemon has answered, or StreamLost when there is nothing to resume; a
        daemon that cannot be reached is tried until `close`."""
        self._stop_reopening()
        if not self.calls.closed:
            self._reopening = asyncio.create_task(self._reopen(reported_wave), name=f"reopen-{self.plan.key}")

    # --- sending ----------------------------------------------------------------------------------

    def announce(self, parts: list[bytes]) -> None:
        """Frames of one request, as `convert.announce_part` makes them."""
        if not self._lost:
            self._announces.put(parts)

    @property
    def riding(self) -> Riding[bytes] | None:
        """What waits to go with the next round; None while nothing can be sent."""
        return None if self._lost else self._riding

    def take_along(self, key: HoldKey, part: bytes) -> None:
        """Send the only frame of a request in front of the next round."""
        self._riding.put(key, part, len(part))

    def send_round(self, round_: Round, body: bytes) -> None:
        """`body`: the round as `convert.round_body` makes it."""
        if not self._lost:
            parts = self._riding.take(release.key for release in round_.releases if release.ended)
            self._rounds.put_nowait(convert.round_message(round_.fence, body, parts))

    def send_wave(self, message: bytes) -> None:
        """As `convert.wave_message` makes it."""
        if not self._lost:
            self._waves.put_nowait(message)

    def watch_digest(self, from_seq: int) -> None:
        """Ask for what follows `from_seq` (0: for a snapshot, and what follows); replaces an earlier watch."""
        if self._watch is not None:
            self._watch.cancel()
        if not self._lost:
            self._watch = self._start(partial(self._run_digest, from_seq), "digest")

    # --- opening ----------------------------------------------------------------------------------

    def _open(self, reported_wave: WaveOrdinal) -> None:
        """Start all streams but the digest's; the first word on RunWaves is a heartbeat."""
        self._new_queues()
        self._put_beat(reported_wave)
        self._start(self._run_announces, "announce")
        self._start(self._run_rounds, "rounds")
        self._start(self._run_waves, "waves")
        self._start(self._beat, "beat")

    async def _reopen(self, reported_wave: WaveOrdinal) -> None:
        while True:
            await self._cancel_streams()
            if await is_refused(self._address):
                key = self.plan.key
                why = f"{key.place} is gone: {self._address} refuses connections"
                error = StageLost(why, stage=key.stage, rank=key.rank)
                self._post_lost(StreamEnding(error.info(), resumable=False))
                return
            opening = self._opening = asyncio.get_running_loop().create_future()
            self._open(reported_wave)
            ending = await opening
            if ending is None:
                return
            if not ending.resumable:
                self._post_lost(ending)
                return
            await asyncio.sleep(REOPEN_PAUSE_S)

    def _opened(self) -> None:
        """The daemon has spoken on the new wave stream."""
        opening, self._opening = self._opening, None
        if opening is not None and not opening.done():  # a newer opening cancels the one under way
            opening.set_result(None)
            self._lost = False
            self._post(StreamsReopened(self.plan.key, self.plan.fence.formation, time.monotonic()))

    async def _cancel_streams(self) -> None:
        await end_tasks(*self._tasks)

    # --- streams ----------------------------------------------------------------------------------

    async def _run_announces(self) -> None:
        parse = admission_pb2.AnnounceResponse.FromString
        announce: _Announces = self._channel.stream_stream(convert.ANNOUNCE_METHOD, response_deserializer=parse)
        async for message in converse(announce(), self._announces.messages()):
            self._hear(AnnounceAcked(self.plan.key, convert.announce_ack_from_pb(message), time.monotonic()))

    async def _run_rounds(self) -> None:
        parse = admission_pb2.Votes.FromString
        rounds: _Rounds = self._channel.stream_stream(convert.ROUND_METHOD, response_deserializer=parse)
        async for message in converse(rounds(), _drain(self._rounds)):
            self._hear(VotesArrived(self.plan.key, convert.votes_from_pb(message), time.monotonic()))

    async def _run_waves(self) -> None:
        parse = execution_pb2.WaveResponse.FromString
        waves: _Waves = self._channel.stream_stream(convert.WAVES_METHOD, response_deserializer=parse)
        merger = ReportMerger()
        async for message in converse(waves(), _drain(self._waves)):
            self._opened()
            body: WaveReport | Heartbeat = convert.wave_response_from_pb(message)
            if not isinstance(body, WaveReport):
                self._hear(BeatArrived(self.plan.key, body, time.monotonic()))
            elif (report := merger.add(body)) is not None:
                self._hear(ReportArrived(self.plan.key, report, time.monotonic()))
                self._acknowledge()

    async def _run_digest(self, from_seq: int) -> None:
        stub = digest_pb2_grpc.StageDigestStub(self._channel)
        async for message in stub.Watch(convert.watch_digest_to_pb(self.plan.fence, from_seq)):
            self._hear(DigestArrived(self.plan.key, convert.digest_from_pb(message), time.monotonic()))

    async def _beat(self) -> None:
        """Our own heartbeat: a daemon that does not hear it fences itself."""
        while True:
            await asyncio.sleep(self.plan.heartbeat_ms / 1000)
            self._put_beat(self._reported_wave())

    def _acknowledge(self) -> None:
        """A daemon keeps its reports until it hears that we have them: say so once a ring at the latest."""
        reported = self._reported_wave()
        if reported >= self._acknowledged + 2 * self.plan.stages:
            self._put_beat(reported)

    def _put_beat(self, reported_wave: WaveOrdinal) -> None:
        fence = self.plan.fence
        self._beats += 1
        self._acknowledged = reported_wave
        beat = Heartbeat(
            Fence(fence.epoch, fence.formation, fence.incarnation), self._beats, reported_wave=reported_wave
        )
        self._waves.put_nowait(convert.wave_request_to_pb(beat).SerializeToString())

    def _start(self, stream: _Stream, name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(self._guard(stream), name=f"{name}-{self.plan.key}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _guard(self, stream: _Stream) -> None:
        """Turn the end of a stream, for whatever cause, into StreamLost.

        Called here, not by who starts it: cancelled before its first step, a task never awaits what it was given."""
        cause: grpc.aio.AioRpcError | WaveppError | None = None
        try:
            await stream()
        except (grpc.aio.AioRpcError, WaveppError) as error:
            cause = error
        self._ended(judge(self.plan.key, cause))

    def _hear(self, event: Event) -> None:
        if not self._lost:
            self._post(event)

    def _ended(self, ending: StreamEnding) -> None:
        """One stream has ended: the first word counts, the others share its fate."""
        opening, self._opening = self._opening, None
        if opening is not None:
            if not opening.done():
                opening.set_result(ending)
        elif not self._lost:
            self._post_lost(ending)

    def _post_lost(self, ending: StreamEnding) -> None:
        self._lost = True
        key, fence = self.plan.key, self.plan.fence
        self._post(
            StreamLost(
                key, fence.incarnation, fence.formation, ending.error, time.monotonic(), resumable=ending.resumable
            )
        )

    # --- the end ----------------------------------------------------------------------------------

    async def end(self, fence: Fence, cause: ErrorInfo) -> None:
        """Tell the daemon that its formation ended (best effort, bounded), then close."""
        self._lost = True
        self._stop_reopening()
        try:
            await self.calls.end_formation(fence, cause)
        finally:
            await self.close()

    async def close(self) -> None:
        """Close every stream and the channel. Idempotent."""
        self._lost = self.calls.closed = True
        self._stop_reopening()
        await self._cancel_streams()
        await self._channel.close(0)

    def _stop_reopening(self) -> None:
        if self._reopening is not None:
            self._reopening.cancel()


async def _drain(queue: asyncio.Queue[Any]) -> AsyncIterator[Any]:
    while True:
        yield await queue.get()
