"""What a peer without the present fence sends changes nothing: the formation goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from tests.conformance.test_serving import oracle, prompt
from tests.harness.cluster import Cluster
from wavepp import errors
from wavepp_proto import convert
from wavepp_proto.runtime.channels import open_channel
from wavepp_proto.terms import Epoch, Fence, Formation, Heartbeat, Incarnation, PrefillRequest, RequestId, Round
from wavepp_proto.v1 import (
    admission_pb2_grpc,
    control_pb2,
    control_pb2_grpc,
    digest_pb2,
    digest_pb2_grpc,
    execution_pb2_grpc,
    prefill_pb2_grpc,
)

WRONG = Fence(Epoch(1), Formation(77), Incarnation(3), 1)


async def _messages(*messages: Any) -> AsyncIterator[Any]:
    for message in messages:
        yield message


@pytest.mark.engines("emulated", "engine-thread", why="it looks into a daemon, which is a process here")
async def test_formation_goes_on_when_strangers_open_every_stream_of_a_daemon() -> None:
    async with Cluster(stages=2) as cluster:
        formation = cluster.controller.machine.status().pipelines[0].formation
        async with open_channel(cluster.daemons[1].address) as channel:
            admission = admission_pb2_grpc.StageAdmissionStub(channel)
            execution = execution_pb2_grpc.StageExecutionStub(channel)
            digests = digest_pb2_grpc.StageDigestStub(channel)
            control = control_pb2_grpc.StageControlStub(channel)
            calls: list[Any] = [
                admission.PinReserve(_messages()),
                admission.PinReserve(_messages(convert.round_to_pb(Round(WRONG, 100)))),
                admission.Announce(_messages()),
                execution.RunWaves(_messages()),
                execution.RunWaves(_messages(convert.wave_request_to_pb(Heartbeat(WRONG, 1)))),
                digests.Watch(digest_pb2.WatchDigestRequest()),
                digests.Watch(convert.watch_digest_to_pb(WRONG, 0)),
            ]
            for call in calls:
                with pytest.raises((grpc.aio.AioRpcError, StopAsyncIteration)):
                    await asyncio.wait_for(anext(aiter(call)), 30)
            with pytest.raises(grpc.aio.AioRpcError):
                await control.DrainStage(control_pb2.DrainStageRequest(), timeout=30)
        tokens = prompt(50, 1)
        assert (await cluster.client.prefill(tokens)).first_token == oracle(tokens)
        assert cluster.controller.machine.status().pipelines[0].formation == formation


async def test_every_request_is_answered_when_ids_are_used_again_at_once() -> None:
    async with Cluster(stages=2) as cluster, open_channel(cluster.controller.address) as channel:
        stub = prefill_pb2_grpc.PrefillStub(channel)

        async def submit(index: int) -> str:
            tokens = prompt(20, index) if index % 2 else [2_000_000]
            packed = b"".join(token.to_bytes(4, "little") for token in tokens)
            request = PrefillRequest(RequestId(f"twin-{index % 3}"), packed)
            last = ""
            async for message in stub.Submit(_messages(*convert.submit_frames(request))):
                last = message.event.WhichOneof("event") or ""
            return last

        async def storm(start: int) -> list[str]:
            return [await asyncio.wait_for(submit(start + step), 60) for step in range(40)]

        endings = await asyncio.gather(*(storm(start) for start in range(8)))
        assert {ending for run in endings for ending in run} <= {"finished", "failed"}


async def test_queue_limit_is_typed_when_far_more_calls_come_at_once() -> None:
    async with Cluster(stages=2, max_queued_requests=64) as cluster:

        async def one(index: int) -> str:
            tokens = prompt(30, index)
            try:
                result = await cluster.client.prefill(tokens, deadline=60)
            except errors.QueueFull:
                return "full"
            return "right" if result.first_token == oracle(tokens) else "wrong"

        outcomes = await asyncio.gather(*(one(index) for index in range(1500)))
        assert set(outcomes) <= {"right", "full"}
