"""Sizes that a client chooses and that once cost more than its own request: each now has a limit at the door.

Real gRPC on loopback where the size of a message is the point, `convert` alone where a rule is.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from tests.harness.cluster import Cluster
from tests.harness.eventually import eventually
from wavepp import Sampling
from wavepp_controller.runtime.prompt_intake import PromptIntake
from wavepp_controller.runtime.report_merger import ReportMerger
from wavepp_proto import convert, errors, limits, terms
from wavepp_proto.runtime.channels import PLAIN_CLIENT, open_channel
from wavepp_proto.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc
from wavepp_stage.engine.emulated import EmulatedEngine
from wavepp_stage.runtime.report_parts import report_parts

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


# --- logits ---------------------------------------------------------------------------------------


def report_with(sizes: list[int]) -> terms.WaveReport:
    fence = terms.Fence(terms.Epoch(1), terms.Formation(1), terms.Incarnation(1), 9)
    results = tuple(terms.RowResult(row, row, (), bytes(4 * size)) for row, size in enumerate(sizes))
    return terms.WaveReport(fence, True, 2, b"h" * 32, terms.StageTimes(5), results, capacity=terms.Capacity(1, 2, 3))


@pytest.mark.parametrize(
    ("sizes", "grouped"),
    [
        ([], [0]),
        ([0] * 128, [128]),
        ([200_000] * 5, [2, 2, 1]),
        ([limits.MAX_VOCABULARY] * 3, [1, 1, 1]),
        ([0, limits.MAX_VOCABULARY, 0, 1], [3, 1]),
    ],
)
def test_report_fits_its_messages_and_comes_back_whole_when_rows_carry_logits(
    sizes: list[int], grouped: list[int]
) -> None:
    report = report_with(sizes)
    messages = [convert.wave_response_to_pb(part) for part in report_parts(report)]
    assert max(message.ByteSize() for message in messages) <= limits.MAX_MESSAGE_BYTES
    assert [len(message.report.results) for message in messages] == grouped
    assert [message.report.partial for message in messages] == [True] * (len(grouped) - 1) + [False]
    merger = ReportMerger()
    merged: list[terms.WaveReport | None] = []
    for message in messages:
        part = convert.wave_response_from_pb(message)
        assert isinstance(part, terms.WaveReport)
        merged.append(merger.add(part))
    assert merged == [None] * (len(grouped) - 1) + [report]
    assert merger.add(report) == report  # nothing stayed behind


def test_parts_are_refused_when_waves_mix_or_rows_exceed_the_lanes() -> None:
    part = replace(report_with([1] * 100), partial=True)
    merger = ReportMerger()
    assert merger.add(part) is None
    with pytest.raises(errors.InvalidRequest) as refused:
        merger.add(replace(part, fence=replace(part.fence, ordinal=10)))
    assert refused.value.fields == {"field": "wave", "value": "10", "limit": "9"}
    with pytest.raises(errors.InvalidRequest) as refused:
        merger.add(part)
    assert refused.value.fields == {"field": "results", "value": "200", "limit": str(limits.MAX_LANES)}


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


async def trickle(first: prefill_pb2.SubmitRequest) -> AsyncIterator[prefill_pb2.SubmitRequest]:
    """One token at a time, for ever."""
    yield first
    while True:
        await asyncio.sleep(0)
        yield frame(tokens=1)


async def outcome(intake: PromptIntake, frames: AsyncIterator[prefill_pb2.SubmitRequest]) -> errors.WaveppError:
    with pytest.raises(errors.WaveppError) as refused:
        await intake.receive(convert.PromptAssembler(), frames)
    return refused.value


async def test_prompt_is_refused_when_others_half_sent_fill_the_room_and_taken_when_they_have_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "MAX_ASSEMBLING_BYTES", 1000)
    intake = PromptIntake()
    halves = [
        asyncio.create_task(intake.receive(convert.PromptAssembler(), sent(frame(f"r{number}", 500, 100))))
        for number in range(2)
    ]
    await eventually(lambda: intake.assembling_bytes == 800)
    refused = await outcome(intake, sent(frame("late", 51, 51)))
    assert type(refused) is errors.QueueFull
    assert refused.retry_after_ms == 1000
    assert refused.fields == {"field": "assembling_bytes", "value": "1004", "limit": "1000"}
    for half in halves:
        half.cancel()
    await asyncio.gather(*halves, return_exceptions=True)
    assert intake.assembling_bytes == 0
    whole = prefill_pb2.SubmitRequest(header=header("late", 250), token_ids=packed(250), last=True)
    assembler = convert.PromptAssembler()
    assert (await intake.receive(assembler, sent(whole))).prompt_tokens == 250
    assert intake.assembling_bytes == 0


async def test_prompt_is_given_up_when_its_own_deadline_passes_between_frames() -> None:
    intake = PromptIntake()
    late = await outcome(intake, sent(frame("r", 100, 10, deadline_ms=50)))
    assert type(late) is errors.DeadlineExpired
    assert late.fields == {"field": "deadline_ms", "value": "50"}
    assert intake.assembling_bytes == 0


async def test_prompt_is_given_up_when_it_trickles_beyond_the_longest_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_ASSEMBLY_MS", 50)
    intake = PromptIntake()
    late = await outcome(intake, trickle(frame("r", limits.MAX_PROMPT_TOKENS, 1)))
    assert type(late) is errors.DeadlineExpired
    assert late.fields == {"field": "assembly_ms", "limit": "50"}
    assert intake.assembling_bytes == 0


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
