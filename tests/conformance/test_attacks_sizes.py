"""Sizes that a client chooses and that once cost more than its own request: each now has a limit at the door.

Real gRPC on loopback where the size of a message is the point, `convert` alone where a rule is.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.harness.cluster import Cluster
from wavepp_proto import convert, errors, limits, terms
from wavepp_proto.runtime.channels import PLAIN_CLIENT, open_channel
from wavepp_proto.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc

PARENT = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


def header(name: str, tokens: int, **more: Any) -> prefill_pb2.PrefillHeader:
    return prefill_pb2.PrefillHeader(request_id=name, prompt_tokens=tokens, **more)


def packed(tokens: int) -> bytes:
    return b"\1\0\0\0" * tokens


@asynccontextmanager
async def door(cluster: Cluster) -> AsyncIterator[prefill_pb2_grpc.PrefillAsyncStub]:
    """The controller's own service, without what the client checks first."""
    async with open_channel(cluster.controller.address, PLAIN_CLIENT) as channel:
        yield prefill_pb2_grpc.PrefillStub(channel)


# --- trace context --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parent", "state", "kept"),
    [
        (PARENT, "a=" + "b" * 510, (PARENT, "a=" + "b" * 510)),
        (PARENT, "a=" + "b" * 511, (PARENT, "")),
        ("0" * 65, "a=b", ("", "a=b")),
        ("0" * (1 << 20), "1" * (1 << 20), ("", "")),
    ],
)
def test_trace_context_is_left_out_when_it_is_longer_than_w3c_asks_to_carry(
    parent: str, state: str, kept: tuple[str, str]
) -> None:
    found = convert.trace_from_pb(common_pb2.TraceContext(traceparent=parent, tracestate=state))
    assert found == terms.TraceContext(*kept)


async def test_formation_serves_on_when_a_tracestate_and_its_prompt_together_pass_the_message_limit() -> None:
    trace = common_pb2.TraceContext(traceparent=PARENT, tracestate="a=" + "b" * 4_000_000)
    tokens = 45_000  # with the hashes of its blocks, a frame of 4.27 MB; alone a request of 4.18 MB
    async with Cluster(stages=2, pool_blocks=(3000,), wave_tokens=8192) as cluster, door(cluster) as prefill:
        run = prefill_pb2.RunRequest(header=header("r", tokens, trace=trace), token_ids=packed(tokens))
        assert (await prefill.Run(run, timeout=60)).finished.prompt_tokens == tokens
        assert cluster.controller.machine.status().pipelines[0].formation == 1


# --- sampling -------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 9.9e-5])
def test_temperature_is_refused_when_it_is_too_small_to_divide_by(temperature: float) -> None:
    with pytest.raises(errors.InvalidRequest) as refused:
        convert.sampling_from_pb(common_pb2.Sampling(temperature=temperature))
    assert refused.value.fields == {"field": "temperature", "value": str(temperature), "limit": "0.0001"}


@pytest.mark.parametrize("temperature", [0.0, limits.MIN_TEMPERATURE, 1.0])
def test_temperature_is_taken_when_it_is_greedy_or_large_enough(temperature: float) -> None:
    assert convert.sampling_from_pb(common_pb2.Sampling(temperature=temperature)).temperature == temperature
