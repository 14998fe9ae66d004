"""The grpc activation link: payloads as frames on one stream to the next stage.

Owns the sending stream and the assembly of received frames. For engines without tensors, and where
no torch.distributed group can be formed. The next stage is dialled at its gRPC address and expected
at its incarnation; frames are at most limits.FRAME_BYTES. Everything here runs on the event loop;
`send` may be called from the executor thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import grpc.aio

from wavepp_proto import convert, limits
from wavepp_proto.errors import LinkFault, MessageTooLarge, StaleMessage, WaveppError
from wavepp_proto.runtime.channels import ClientSecurity, open_channel
from wavepp_proto.runtime.context import Context
from wavepp_proto.runtime.logs import get_log
from wavepp_proto.runtime.streams import write_all
from wavepp_proto.terms import Epoch, Fence, Formation, Incarnation, WaveOrdinal
from wavepp_proto.v1 import execution_pb2 as pb
from wavepp_proto.v1 import execution_pb2_grpc
from wavepp_stage.engine.base import LinkListener, LinkPlan, Payload, WaveHeader

log = get_log("wavepp.stage.link")
MAX_PENDING_WAVES = 256
"""Sent, not yet on the wire: the ring bounds it far lower, this bounds a broken peer."""
HELD_APART_S = 1e-6
"""Between two waves that a modelled wire delivers: above the resolution of a loop's clock."""


class GrpcLink:
    """ActivationLink over StageLink.Carry, for one formation."""

    def __init__(
        self,
        plan: LinkPlan,
        listener: LinkListener,
        encode: Callable[[Payload], bytes],
        decode: Callable[[bytes, int], Payload],
        hub: LinkHub,
        security: ClientSecurity,
        loop: asyncio.AbstractEventLoop,
        arrival: Callable[[int], float] | None = None,
    ) -> None:
        """`arrival(tokens)`, of an engine that models the wire: when a wave sent now shall leave here (monotonic
        seconds), 0 for at once."""
        self.plan = plan
        self.listener = listener
        self._encode, self.decode = encode, decode
        self._hub, self._security, self._loop = hub, security, loop
        self._arrival = arrival
        self._last_held = 0.0
        self._outbox: asyncio.Queue[tuple[WaveHeader, bytes]] = asyncio.Queue(MAX_PENDING_WAVES)
        self._sender: asyncio.Task[None] | None = None
        self._channel: grpc.aio.Channel | None = None
        self.expected: dict[WaveOrdinal, int] = {}
        self.closed = False

    def open(self) -> None:
        """Register for frames and dial the next stage (called off the loop)."""
        opened: Future[None] = asyncio.run_coroutine_threadsafe(self._open(), self._loop)
        try:
            opened.result(self.plan.connect_timeout_s + 1)
        except TimeoutError as error:
            raise self._fault("cannot reach the next stage in time") from error

    async def _open(self) -> None:
        self._hub.attach(self)
        if not self.plan.next_address:
            return
        self._channel = open_channel(self.plan.next_address, self._security)
        try:
            await asyncio.wait_for(self._channel.channel_ready(), self.plan.connect_timeout_s)
        except TimeoutError as error:
            raise self._fault(f"stage {self.plan.stage + 1} at {self.plan.next_address} does not answer") from error
        self._sender = asyncio.create_task(self._send_all(), name=f"link-{self.plan.stage}")

    def expect(self, ordinal: WaveOrdinal, tokens: int) -> None:
        self.expected[ordinal] = tokens

    def send(self, header: WaveHeader, payload: Payload) -> None:
        data = self._encode(payload)
        header = replace(header, payload_bytes=len(data))
        until = self._arrival(header.tokens) if self._arrival is not None else 0.0
        if until:
            self._loop.call_soon_threadsafe(self._hold, until, header, data)
        else:
            self._loop.call_soon_threadsafe(self._put, header, data)

    def _hold(self, until: float, header: WaveHeader, data: bytes) -> None:
        """Put it out at `until`, and after whatever was held before it: the loop keeps no order of equal times."""
        self._last_held = max(self._loop.time() + until - time.monotonic(), self._last_held + HELD_APART_S)
        self._loop.call_at(self._last_held, self._put, header, data)

    def _put(self, header: WaveHeader, data: bytes) -> None:
        if self.closed:
            return
        try:
            self._outbox.put_nowait((header, data))
        except asyncio.QueueFull:
            self.listener.on_link_lost(f"stage {self.plan.stage + 1} does not take activations")

    def close(self) -> None:
        self.closed = True
        self._loop.call_soon_threadsafe(self._close)

    def _close(self) -> None:
        self._hub.detach(self)
        if self._sender is not None:
            self._sender.cancel()
        if self._channel is not None:
            closing = asyncio.ensure_future(self._channel.close(0))
            self._hub.keep(closing)

    async def _send_all(self) -> None:
        try:
            await self._carry()
            reason: str | LinkFault = "the next stage closed the link"
        except grpc.aio.AioRpcError as error:
            told = convert.error_from_rpc(error, LinkFault)
            if isinstance(told, LinkFault) and told.fields:
                reason = told
            else:  # gRPC itself ended the call, and names nothing
                reason = f"stage {self.plan.stage + 1} at {self.plan.next_address} ended the link: {told.message}"
        except (grpc.aio.UsageError, asyncio.InvalidStateError):
            reason = "the channel to the next stage was closed"
        if not self.closed:
            self.listener.on_link_lost(reason)

    async def _carry(self) -> None:
        """Write frames until the next stage ends the call."""
        assert self._channel is not None
        call = execution_pb2_grpc.StageLinkStub(self._channel).Carry()
        writer = asyncio.create_task(write_all(call, self._frames()), name=f"link-writer-{self.plan.stage}")
        try:
            await call
        finally:
            writer.cancel()

    async def _frames(self) -> AsyncIterator[pb.ActivationFrame]:
        while True:
            header, data = await self._outbox.get()
            fence = Fence(
                Epoch(self.plan.epoch),
                Formation(self.plan.formation),
                Incarnation(self.plan.next_incarnation),
                header.ordinal,
            )
            for at in range(0, max(1, len(data)), limits.FRAME_BYTES):
                end = at + limits.FRAME_BYTES
                yield pb.ActivationFrame(
                    fence=convert.fence_to_pb(fence),
                    header=header.pack() if at == 0 else b"",
                    payload=data[at:end],
                    last=end >= len(data),
                )

    def _fault(self, reason: str) -> LinkFault:
        return LinkFault(reason, stage=self.plan.stage, formation=self.plan.formation)


@dataclass(slots=True)
class _Assembly:
    header: WaveHeader
    pieces: list[bytes] = field(default_factory=list)
    size: int = 0


class LinkHub(execution_pb2_grpc.StageLinkServicer):
    """Receives frames for whichever link of this daemon they belong to."""

    def __init__(self, incarnation: Incarnation) -> None:
        self.incarnation = incarnation
        """Whom frames must be meant for."""
        self._links: dict[tuple[int, int], GrpcLink] = {}
        self._kept: set[asyncio.Future[None]] = set()

    def attach(self, link: GrpcLink) -> None:
        self._links[(link.plan.epoch, link.plan.formation)] = link

    def detach(self, link: GrpcLink) -> None:
        self._links.pop((link.plan.epoch, link.plan.formation), None)

    def keep(self, task: asyncio.Future[None]) -> None:
        """Hold a closing task until it is done."""
        self._kept.add(task)
        task.add_done_callback(self._kept.discard)

    async def Carry(self, request_iterator: AsyncIterator[pb.ActivationFrame], context: Context) -> pb.CarryResponse:
        link: GrpcLink | None = None
        assembly: _Assembly | None = None
        last = 0
        try:
            async for frame in request_iterator:
                link = self._link_of(frame)
                assembly = _extend(assembly, frame)
                if frame.last:
                    last = assembly.header.ordinal
                    _deliver(link, assembly, frame.fence.ordinal)
                    assembly = None
            return pb.CarryResponse(last_wave=last)
        except WaveppError as error:
            log.warning("activations refused", **{**error.fields, "reason": error.reason, "error": error.message})
            if link is not None:
                link.listener.on_link_lost(error if isinstance(error, LinkFault) else error.message)
            await convert.abort(context, error)
        finally:
            if link is not None and not link.closed:
                link.listener.on_link_lost(f"stage {link.plan.stage - 1} closed the link")

    def _link_of(self, frame: pb.ActivationFrame) -> GrpcLink:
        fence = frame.fence
        if fence.incarnation != self.incarnation:
            raise StaleMessage("activations for another incarnation", field="incarnation", value=fence.incarnation)
        link = self._links.get((fence.epoch, fence.formation))
        if link is None:
            raise StaleMessage("activations of no present formation", field="formation", value=fence.formation)
        return link


def _extend(assembly: _Assembly | None, frame: pb.ActivationFrame) -> _Assembly:
    """Add a piece; the header states the size, so nothing larger is ever kept."""
    if frame.header:
        if assembly is not None:
            raise LinkFault("a payload began before the earlier one ended", field="header")
        assembly = _Assembly(WaveHeader.unpack(frame.header))
    if assembly is None:
        raise LinkFault("a piece of a payload without its header", field="payload")
    piece = frame.payload
    assembly.size += len(piece)
    if assembly.size > assembly.header.payload_bytes:
        raise MessageTooLarge(
            "a payload is longer than its header says",
            field="payload",
            value=assembly.size,
            limit=assembly.header.payload_bytes,
        )
    assembly.pieces.append(piece)
    return assembly


def _deliver(link: GrpcLink, assembly: _Assembly, ordinal: int) -> None:
    """`ordinal` is the fence's. Raises LinkFault for what is not the next payload of this link."""
    header = assembly.header
    header.check(link.plan.stage, formation=link.plan.formation, ordinal=ordinal)
    if assembly.size != header.payload_bytes:
        raise LinkFault("a payload is shorter than its header says", field="payload", value=assembly.size)
    try:
        payload = link.decode(b"".join(assembly.pieces), header.tokens)
    except ValueError as error:
        raise LinkFault(str(error), field="payload", value=assembly.size, wave=header.ordinal) from error
    link.expected.pop(WaveOrdinal(header.ordinal), None)
    link.listener.on_activation(header, payload)
