"""StageAdmission and StageDigest: announcements, rounds, inventory and the digest feed.

Owns the gRPC side of admission (the paper's WAVE): every message becomes one event for the core and
is answered from its actions, on the event loop, while the executor computes; rounds go through the
cache's door (cache_door.py). Opening a stream closes its predecessor: one controller, one stream of a kind.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace

from wavepp_proto import convert
from wavepp_proto.errors import StaleMessage, WaveppError
from wavepp_proto.runtime.context import Context
from wavepp_proto.terms import AnnounceAck, AnnounceFrame, Fence
from wavepp_proto.v1 import admission_pb2 as pb
from wavepp_proto.v1 import admission_pb2_grpc, digest_pb2, digest_pb2_grpc
from wavepp_stage.core.events import Announced, InventoryAsked, InventoryTaken, RoundArrived, SendAck, SendVotes
from wavepp_stage.runtime.cache_door import CacheDoor
from wavepp_stage.runtime.core_shell import CoreShell, ended_formation
from wavepp_stage.runtime.observability import Observer

DIGEST_COALESCE_S = 0.01
"""Pause between two digests: changes of one wave travel in one message."""


class Successor:
    """At most one live stream of a kind: the newest that showed the present fence."""

    def __init__(self) -> None:
        self._current: asyncio.Event | None = None

    def admit(self, core: CoreShell, fence: Fence, superseded: asyncio.Event | None) -> asyncio.Event:
        """Let one message of a stream in; its first one closes the predecessor, if the fence is ours.

        A stranger's stream changes nothing: raises StaleMessage before anything is superseded, and for
        a stream that was itself superseded. Returns the event to pass in with the next message."""
        core.read(lambda machine: machine.check_reader(fence))
        if superseded is None:
            if self._current is not None:
                self._current.set()
            superseded = self._current = asyncio.Event()
        if superseded.is_set():
            raise StaleMessage("a newer stream of this kind was opened", field="stream", value="superseded")
        return superseded


class AdmissionService(admission_pb2_grpc.StageAdmissionServicer):
    def __init__(self, core: CoreShell, door: CacheDoor, observer: Observer, on_ended: Callable[[int], None]) -> None:
        """`on_ended` is told of the formation that a newer authority ended."""
        self._core = core
        self._door = door
        self._observer = observer
        self._on_ended = on_ended
        self._announces = Successor()
        self._rounds = Successor()

    async def Announce(
        self, request_iterator: AsyncIterator[pb.AnnounceRequest], context: Context
    ) -> AsyncIterator[pb.AnnounceResponse]:
        superseded: asyncio.Event | None = None
        try:
            async for message in request_iterator:
                frames = convert.announce_frames_from_pb(message)
                superseded = self._announces.admit(self._core, frames[0].fence, superseded)
                for ack in _together(self._announced(frames)):
                    yield convert.announce_ack_to_pb(ack)
        except WaveppError as error:
            await convert.abort(context, error)

    def _announced(self, frames: Sequence[AnnounceFrame]) -> list[AnnounceAck]:
        """One acknowledgement for each request that these frames complete, or that is refused."""
        now = time.monotonic()
        actions = [action for frame in frames for action in self._core.post(Announced(frame, now))]
        return [action.ack for action in actions if isinstance(action, SendAck)]

    async def PinReserve(self, request_iterator: AsyncIterator[pb.Round], context: Context) -> AsyncIterator[pb.Votes]:
        superseded: asyncio.Event | None = None
        try:
            async for message in request_iterator:
                started_ns = time.time_ns()
                round_ = convert.round_from_pb(message)
                superseded = self._rounds.admit(self._core, round_.fence, superseded)
                announces = tuple(convert.round_announces_from_pb(message))
                for action in await self._door.post(RoundArrived(round_, time.monotonic(), announces)):
                    if isinstance(action, SendVotes):
                        ended_ns = time.time_ns()
                        yield convert.votes_to_pb(action.votes)
                        self._observer.voted(action.votes, started_ns, ended_ns)
        except WaveppError as error:
            await convert.abort(context, error)

    async def Inventory(self, request: pb.InventoryRequest, context: Context) -> pb.InventoryResponse:
        try:
            actions = self._core.post(InventoryAsked(convert.inventory_request_from_pb(request), time.monotonic()))
            if ended := ended_formation(actions):
                self._on_ended(ended)
        except WaveppError as error:
            await convert.abort(context, error)
        taken = next(action for action in actions if isinstance(action, InventoryTaken))
        return convert.inventory_to_pb(taken.inventory)


def _together(acks: list[AnnounceAck]) -> Iterator[AnnounceAck]:
    """What was accepted shares one message; a refusal is about one request and travels alone."""
    accepted = [ack for ack in acks if ack.refused is None]
    if accepted:
        yield replace(accepted[0], behind=tuple(ack.key for ack in accepted[1:]))
    yield from (ack for ack in acks if ack.refused is not None)


class DigestService(digest_pb2_grpc.StageDigestServicer):
    """Sends deltas as they come; a reader that fell behind, or asks from 0, gets one snapshot."""

    def __init__(self, core: CoreShell) -> None:
        self._core = core
        self._watches = Successor()
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Residency or capacity changed (on the event loop)."""
        self._changed.set()

    async def Watch(self, request: digest_pb2.WatchDigestRequest, context: Context) -> AsyncIterator[digest_pb2.Digest]:
        superseded: asyncio.Event | None = None
        try:
            fence, seq = convert.watch_digest_from_pb(request)
            while True:
                superseded = self._watches.admit(self._core, fence, superseded)
                self._changed.clear()
                for digest in self._core.digests_since(seq):
                    seq = digest.seq
                    yield convert.digest_to_pb(digest)
                await self._changed.wait()
                await asyncio.sleep(DIGEST_COALESCE_S)
        except WaveppError as error:
            await convert.abort(context, error)
