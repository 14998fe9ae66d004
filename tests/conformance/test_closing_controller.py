"""What waits for something when a controller closes: every call ends with a typed status or event of the controller's
own, seen by a plain gRPC client. A server that only stops cancels them, without a word."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from unittest.mock import Mock

import grpc.aio
import pytest

from tests.harness.eventually import eventually
from tests.harness.members import make_record
from wavepp_controller.runtime.controller import Controller
from wavepp_controller.runtime.settings import ControllerSettings
from wavepp_proto import convert
from wavepp_proto.convert.status import DETAILS_KEY
from wavepp_proto.errors import ControllerUnavailable
from wavepp_proto.runtime.channels import open_channel
from wavepp_proto.runtime.memory_store import MemoryStore
from wavepp_proto.runtime.record import encode_record, member_key
from wavepp_proto.runtime.store import Listing
from wavepp_proto.terms import Failed
from wavepp_proto.v1 import admin_pb2, admin_pb2_grpc, prefill_pb2, prefill_pb2_grpc

Call = Callable[[grpc.aio.Channel, asyncio.Event], Awaitable[str]]


async def watch(channel: grpc.aio.Channel, waits: asyncio.Event) -> str:
    """With a period so long that no status would be due before the server has stopped."""
    stub: admin_pb2_grpc.AdminAsyncStub = admin_pb2_grpc.AdminStub(channel)
    async for _ in stub.Watch(admin_pb2.WatchStatusRequest(period_ms=60_000)):
        waits.set()
    return "ended in order"


async def reform(channel: grpc.aio.Channel, waits: asyncio.Event) -> str:
    """Of a pipeline whose one stage answers nothing."""
    stub: admin_pb2_grpc.AdminAsyncStub = admin_pb2_grpc.AdminStub(channel)
    call = stub.Reform(admin_pb2.ReformRequest(pipeline="p0", deadline_ms=60_000))
    waits.set()
    await call
    return "ended in order"


async def submit(channel: grpc.aio.Channel, waits: asyncio.Event) -> str:
    """A prompt whose last frame never comes."""
    stub: prefill_pb2_grpc.PrefillAsyncStub = prefill_pb2_grpc.PrefillStub(channel)

    async def frames() -> AsyncIterator[prefill_pb2.SubmitRequest]:
        header = prefill_pb2.PrefillHeader(request_id="half", prompt_tokens=2)
        yield prefill_pb2.SubmitRequest(header=header, token_ids=b"\1\0\0\0")
        waits.set()
        await asyncio.Event().wait()

    outcomes = [response.event async for response in stub.Submit(frames())]
    (event,) = outcomes
    failed = convert.prefill_event_from_pb(event)
    assert isinstance(failed, Failed)
    return failed.error.reason


CALLS: dict[str, Call] = {"watch": watch, "reform": reform, "submit": submit}


async def outcome(call: Call, channel: grpc.aio.Channel, waits: asyncio.Event) -> str:
    try:
        return await call(channel, waits)
    except grpc.aio.AioRpcError as error:
        # not what the code alone would come to: the reason that the controller gave
        details = dict(error.trailing_metadata() or ())
        return convert.error_from_rpc(error).reason if DETAILS_KEY in details else f"bare {error.code().name}"


@pytest.mark.parametrize("name", CALLS)
async def test_call_that_waits_ends_typed_when_the_controller_closes(name: str) -> None:
    store = MemoryStore()
    record = make_record(cluster="default", stages=1, first_layer=0, last_layer=8, address="127.0.0.1:1")
    await store.put(member_key(record.cluster, record.key), encode_record(record), await store.grant(3600))
    controller = Controller(ControllerSettings(listen="127.0.0.1:0"), store)
    await controller.start()
    try:
        async with open_channel(controller.address) as channel:
            await eventually(lambda: controller.machine.pipelines and controller.machine.epoch)
            reforming = Mock(wraps=controller._admin._serves_after)
            controller._admin._serves_after = reforming  # type: ignore[method-assign]
            arrived = {
                "watch": lambda: True,
                "reform": lambda: reforming.called,
                "submit": lambda: controller._prefill._intake.assembling_bytes,
            }
            waits = asyncio.Event()
            ended = asyncio.create_task(outcome(CALLS[name], channel, waits))
            await waits.wait()
            await eventually(arrived[name])
            await controller.close()
            assert await ended == ControllerUnavailable.reason
    finally:
        await controller.close()


class SlowStore(MemoryStore):
    """Lists members only once it is allowed to."""

    def __init__(self) -> None:
        super().__init__()
        self.allowed = asyncio.Event()

    async def get_prefix(self, prefix: str) -> Listing:
        if "members" in prefix:
            await self.allowed.wait()
        return await super().get_prefix(prefix)


async def test_controller_that_has_not_read_the_members_yet_denies_no_pipeline() -> None:
    """A restarted one could win before its first listing: UNKNOWN_PIPELINE would be final for a client."""
    store = SlowStore()
    controller = Controller(ControllerSettings(listen="127.0.0.1:0"), store)
    await controller.start()
    try:
        async with open_channel(controller.address) as channel:
            stub: prefill_pb2_grpc.PrefillAsyncStub = prefill_pb2_grpc.PrefillStub(channel)
            await eventually(lambda: controller.leadership._authority)
            reasons = []
            for _ in range(2):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await stub.Describe(prefill_pb2.DescribeRequest(pipeline="default"), timeout=20)
                reasons.append(convert.error_from_rpc(refused.value).reason)
                store.allowed.set()
                await eventually(lambda: controller.machine.epoch)
            assert reasons == ["CONTROLLER_UNAVAILABLE", "UNKNOWN_PIPELINE"]
    finally:
        await controller.close()
