"""Sizes that a client chooses and that once cost more than its own request: each now has a limit at the door.

Real gRPC on loopback where the size of a message is the point, `convert` alone where a rule is.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.harness.cluster import Cluster
from tests.harness.eventually import eventually
from wavepp import Sampling
from wavepp_proto import convert, errors, limits, terms
from wavepp_proto.runtime.channels import PLAIN_CLIENT, open_channel
from wavepp_proto.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc
from wavepp_stage.engine.emulated import EmulatedEngine

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


@pytest.mark.engines("emulated", "engine-thread", why="the stand-in takes minutes for a prompt of this length")
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


# --- logits ---------------------------------------------------------------------------------------


@pytest.mark.engines("emulated", why="others are to be admitted while a wave stands still on the engine's thread")
@pytest.mark.parametrize(("vocabulary", "requests"), [(200_000, 16), (limits.MAX_VOCABULARY, 4)])
async def test_every_row_gets_its_logits_when_those_of_one_wave_exceed_a_message(
    vocabulary: int, requests: int
) -> None:
    ring_waves, budget, leave = 4, 128, threading.Event()
    model = f"emulated:layers=8,vocabulary={vocabulary},window=65536"
    async with Cluster(stages=2, model=model, wave_tokens=budget) as cluster:
        engine = cluster.daemons[0].equipment.engine
        assert isinstance(engine, EmulatedEngine)
        engine._gate = lambda wave: assert_set(leave)
        status = cluster.controller.machine.status
        # The ring is full while the first stage stands still: all that come meanwhile go into one wave.
        full = asyncio.create_task(cluster.client.prefill([1] * budget * ring_waves))
        await eventually(lambda: status().counters.get("waves") == ring_waves)
        asked = [
            asyncio.create_task(cluster.client.prefill([2, number], sampling=Sampling(full_logits=True)))
            for number in range(requests)
        ]
        await eventually(lambda: status().pipelines[0].running_requests == 1 + requests)
        leave.set()
        for result in await asyncio.gather(*asked):
            assert result.logits is not None
            assert result.logits.shape == (vocabulary,)
            assert int(result.logits.argmax()) == result.first_token
        assert (await full).waves == ring_waves
        assert status().counters["waves"] == ring_waves + 1
        assert status().pipelines[0].formation == 1


def assert_set(event: threading.Event) -> None:
    assert event.wait(60)


# --- prompts under assembly -----------------------------------------------------------------------


def frame(name: str = "", said: int = 0, tokens: int = 0, **more: Any) -> prefill_pb2.SubmitRequest:
    """With a header if `name` is given; never the last."""
    said_by = header(name, said, **more) if name else None
    return prefill_pb2.SubmitRequest(header=said_by, token_ids=packed(tokens))


async def sent(*frames: prefill_pb2.SubmitRequest) -> AsyncIterator[prefill_pb2.SubmitRequest]:
    """These frames; then the stream stays open and silent."""
    for each in frames:
        yield each
    await asyncio.Event().wait()


@pytest.mark.engines("emulated", "engine-thread", why="it looks into a daemon, which is a process here")
async def test_refusals_before_the_core_are_counted_when_frames_are_bad_late_or_of_a_live_request() -> None:
    async with Cluster(stages=1) as cluster, door(cluster) as prefill:

        async def refusal(*frames: prefill_pb2.SubmitRequest) -> str:
            call = prefill.Submit(sent(*frames), timeout=60)
            return [message.event.failed.reason async for message in call][-1]

        assert await refusal(frame(tokens=5)) == "INVALID_REQUEST"
        assert await refusal(frame("slow", 100, 10, deadline_ms=50)) == "DEADLINE_EXPIRED"
        leave = threading.Event()
        engine = cluster.daemons[0].equipment.engine
        assert isinstance(engine, EmulatedEngine)
        engine._gate = lambda wave: assert_set(leave)
        live = asyncio.create_task(cluster.client.prefill([1, 2, 3], request_id="twice"))
        await eventually(lambda: cluster.controller.shell.is_open(terms.RequestId("twice")))
        whole = prefill_pb2.SubmitRequest(header=header("twice", 1), token_ids=packed(1), last=True)
        assert await refusal(whole) == "DUPLICATE_REQUEST"
        leave.set()
        await live
        counters = cluster.controller.machine.status().counters
        counted = {name: count for name, count in counters.items() if name.startswith(("rejected", "submitted"))}
        assert counted == {
            "submitted": 4,
            "rejected": 3,
            "rejected.INVALID_REQUEST": 1,
            "rejected.DEADLINE_EXPIRED": 1,
            "rejected.DUPLICATE_REQUEST": 1,
        }
