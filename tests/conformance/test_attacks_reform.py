"""Reforms and joins that cannot work: each is refused by name, and the pipeline serves on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from tests.harness.cluster import Cluster
from tests.harness.eventually import eventually
from tests.harness.tiny_models import build
from wavepp_controller.core.config import ControllerConfig
from wavepp_proto import convert, limits
from wavepp_proto.errors import EngineFault, InvalidRequest, JoinRefused, WaveppError
from wavepp_proto.runtime.channels import ClientSecurity, open_channel
from wavepp_proto.terms import LinkKind
from wavepp_proto.v1 import admin_pb2 as pb
from wavepp_proto.v1 import admin_pb2_grpc

PROMPT = list(range(40))


async def _refusal(cluster: Cluster, request: pb.ReformRequest) -> WaveppError:
    async with open_channel(cluster.controller.address, ClientSecurity()) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await admin_pb2_grpc.AdminStub(channel).Reform(request, timeout=30)
    return convert.error_from_rpc(caught.value)


def _shapes(*shapes: tuple[int, int]) -> dict[str, Any]:
    return {"shapes": [pb.StageShape(stage=stage, pool_blocks=blocks) for stage, blocks in shapes]}


def _last_fault(cluster: Cluster) -> str:
    (pipeline,) = cluster.controller.machine.status().pipelines
    return pipeline.last_fault.reason if pipeline.last_fault is not None else ""


RANGE = f"{(ControllerConfig().floor_blocks or 0) + 1}..{limits.MAX_POOL_BLOCKS}"


@pytest.mark.parametrize(
    ("asked", "error", "fields"),
    [
        (_shapes((0, 2**62)), InvalidRequest, {"field": "pool_blocks", "value": str(2**62), "limit": RANGE}),
        (_shapes((1, 2**64 - 1)), InvalidRequest, {"field": "pool_blocks", "value": str(2**64 - 1), "limit": RANGE}),
        (_shapes((1, 90), (1, 100)), InvalidRequest, {"field": "shapes", "value": "1", "limit": "1"}),
        (_shapes((2**32 - 1, 90)), InvalidRequest, {"field": "stage", "value": str(2**32 - 1), "limit": "2"}),
        (
            {"wave_tokens": 2**32 - 16},
            InvalidRequest,
            {"field": "wave_tokens", "limit": f"16..{limits.MAX_WAVE_TOKENS}"},
        ),
        ({"link": "carrier pigeon"}, InvalidRequest, {"field": "link", "value": "carrier pigeon"}),
        pytest.param(
            {"link": "nccl"},
            JoinRefused,
            {"field": "link", "value": "nccl", "limit": "grpc"},
            marks=pytest.mark.engines("emulated", "engine-thread", why="its daemons could link so, were they on GPUs"),
        ),
    ],
)
async def test_pipeline_serves_on_when_a_reform_is_refused(
    asked: dict[str, Any], error: type[WaveppError], fields: dict[str, str]
) -> None:
    async with Cluster() as cluster:
        (pipeline,) = cluster.controller.machine.status().pipelines
        refused = await _refusal(cluster, pb.ReformRequest(pipeline=pipeline.pipeline, **asked))
        assert type(refused) is error
        assert fields.items() <= refused.fields.items()
        assert (await cluster.client.prefill(PROMPT)).endpoint == 0
        (after,) = cluster.controller.machine.status().pipelines
        assert (after.state, after.formation) == ("serving", 1)


@pytest.mark.engines("emulated", why="it is about the torch engine")
async def test_pipeline_serves_on_over_gloo_when_nccl_is_asked_for_on_cpus(tmp_path: Path) -> None:
    async with Cluster(model=str(build("qwen3", tmp_path)), engine="torch") as cluster:
        (pipeline,) = cluster.controller.machine.status().pipelines
        refused = await _refusal(cluster, pb.ReformRequest(pipeline=pipeline.pipeline, link="nccl"))
        assert type(refused) is InvalidRequest
        assert refused.fields == {"field": "link", "value": "nccl", "limit": "cuda", "stage": "0", "device": "cpu"}
        assert (await cluster.client.prefill(PROMPT)).endpoint == 0
        (after,) = cluster.controller.machine.status().pipelines
        assert (after.state, after.formation, after.link) == ("serving", 1, LinkKind.GLOO)


@pytest.mark.engines("emulated", "engine-thread", why="it looks into a daemon, which is a process here")
async def test_join_is_refused_typed_when_the_engine_raises_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Cluster() as cluster:
        control = cluster.daemons[1].control

        async def broken(*_: object) -> None:
            raise ValueError("maximum allowed dimension exceeded")

        with monkeypatch.context() as patched:
            patched.setattr(control, "load", broken)
            (pipeline,) = cluster.controller.machine.status().pipelines
            shape = pb.StageShape(stage=1, pool_blocks=90)
            request = pb.ReformRequest(pipeline=pipeline.pipeline, shapes=[shape], deadline_ms=300)
            await _refusal(cluster, request)
            await eventually(lambda: _last_fault(cluster) == EngineFault.reason, about="the join to fail typed")
        await cluster.serving(formation=2)
        assert (await cluster.client.prefill(PROMPT)).prompt_tokens == len(PROMPT)
