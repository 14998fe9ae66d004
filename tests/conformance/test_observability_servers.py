"""Health, reflection and counters of a real cluster, as any client sees them."""

from __future__ import annotations

from functools import partial

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.harness.cluster import Cluster
from tests.harness.eventually import eventually
from wavepp import errors

pytestmark = pytest.mark.engines("emulated", "engine-thread", why="it looks into daemons, which are processes here")

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def health(address: str, service: str = "") -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=30)
        return int(answer.status)


async def test_health_tells_who_can_serve_when_a_controller_comes_and_goes() -> None:
    async with Cluster(stages=2) as cluster:
        stages = [daemon.address for daemon in cluster.daemons]

        async def all_are(wanted: int) -> bool:
            found = [await health(address) for address in stages]
            return found == [wanted, wanted]

        await eventually(lambda: all_are(SERVING), about="the stages to serve")

        async def ready() -> bool:
            return await health(cluster.controller.address) == int(SERVING)

        await eventually(ready, about="the controller to be ready")
        assert cluster.controller.machine.status().ready
        named = [await health(address, "pipeline/default") for address in (cluster.controller.address, *stages)]
        assert named == [SERVING] * 3
        await cluster.controller.close()
        await eventually(lambda: all_are(NOT_SERVING), about="the stages to serve no formation")


async def test_health_of_controller_and_pipeline_ends_when_its_stage_is_lost() -> None:
    async with Cluster(stages=2) as cluster:
        address = cluster.controller.address

        await eventually(lambda: _is(address, "", SERVING), about="the controller to be ready")
        assert await health(address, "pipeline/default") == SERVING
        await cluster.daemons[1].close()
        for service in ("", "pipeline/default"):
            await eventually(partial(_is, address, service, NOT_SERVING), about="nothing to be ready")


async def _is(address: str, service: str, wanted: int) -> bool:
    return await health(address, service) == wanted


@pytest.mark.parametrize("wanted", [True, False])
async def test_reflection_lists_services_only_when_asked_for(wanted: bool) -> None:
    async with Cluster(stages=1, reflection=wanted) as cluster:
        if not wanted:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await services(cluster.controller.address)
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
            return
        shared = {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}
        assert await services(cluster.controller.address) == shared | {"wavepp.v1.Prefill", "wavepp.v1.Admin"}
        assert await services(cluster.daemons[0].address) == shared | {
            "wavepp.v1.StageAdmission",
            "wavepp.v1.StageDigest",
            "wavepp.v1.StageExecution",
            "wavepp.v1.StageLink",
            "wavepp.v1.StageControl",
        }


async def services(address: str) -> set[str]:
    async with grpc.aio.insecure_channel(address) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(timeout=30)
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        answer = await call.read()
        assert answer is not grpc.aio.EOF
        await call.done_writing()
        return {service.name for service in answer.list_services_response.service}


# --- status -------------------------------------------------------------------------------------


async def test_status_shows_every_refusal_by_its_reason() -> None:
    async with Cluster(stages=2, pool_blocks=(64, 32)) as cluster:
        for tokens in ([1000], [1] * (32 * 16 + 1), [1] * 65_537):
            with pytest.raises(errors.InvalidRequest):
                await cluster.client.prefill(tokens)
        await cluster.client.prefill([1, 2, 3])
        counters = (await cluster.client.status()).counters
    refused = {name: count for name, count in counters.items() if name.startswith("rejected")}
    assert refused == {
        "rejected": 3,
        "rejected.TOKEN_OUT_OF_RANGE": 1,
        "rejected.NEVER_FITS": 1,
        "rejected.PROMPT_TOO_LONG": 1,
    }
    assert (counters["submitted"], counters["admitted"], counters["finished"]) == (4, 1, 1)
