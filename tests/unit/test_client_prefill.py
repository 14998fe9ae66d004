"""What the client sends and what it makes of the answer, against the fake controller over real gRPC."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest

from wavepp import AsyncClient, PrefillOutcome, Sampling, errors
from wavepp.testing import Answer, FakeController, Gate, Outcome, Step
from wavepp_proto.terms import (
    Admitted,
    Attempt,
    Finished,
    PipelineId,
    PrefillRequest,
    Progress,
    Queued,
    RequestId,
    StageIndex,
    Timings,
    TokenLogprob,
    TraceContext,
)


@pytest.fixture
async def controller() -> AsyncIterator[FakeController]:
    async with FakeController() as controller:
        yield controller


@pytest.fixture
async def client(controller: FakeController) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(controller.address) as client:
        yield client


async def test_result_carries_every_field_of_the_answer(controller: FakeController, client: AsyncClient) -> None:
    logits = np.linspace(-1, 1, 7, dtype=np.float32)
    pairs = (TokenLogprob(11, -0.5), TokenLogprob(3, -1.5))
    timings = Timings(queue_ms=1, admission_ms=2.5, prefill_ms=30)
    controller.script(
        Answer(
            first_token=11,
            cached_tokens=64,
            candidate=192,
            limiting_stage=StageIndex(2),
            best_stage_hit=256,
            lost_to_snapshots=128,
            shared_tokens=32,
            rounds=2,
            waves=3,
            timings=timings,
            top_logprobs=pairs,
            logits=logits.astype("<f4").tobytes(),
        )
    )
    result = await client.prefill([5] * 300, request_id="mine")
    assert (result.request_id, result.pipeline, result.attempt) == ("mine", "default", 1)
    assert (result.first_token, result.first_text) == (11, None)
    assert (result.prompt_tokens, result.cached_tokens) == (300, 64)
    assert (result.endpoint, result.candidate, result.best_stage_hit) == (64, 192, 256)
    assert (result.limiting_stage, result.rounds, result.waves) == (2, 2, 3)
    assert (result.lost_to_snapshots, result.shared_tokens) == (128, 32)
    assert (result.timings, result.top_logprobs) == (timings, pairs)
    assert result.logits is not None
    np.testing.assert_array_equal(result.logits, logits)
    assert result.elapsed_ms > 0


async def test_result_has_no_logits_when_none_were_asked_for(client: AsyncClient) -> None:
    assert (await client.prefill([1])).logits is None


async def test_request_carries_every_option(controller: FakeController, client: AsyncClient) -> None:
    sampling = Sampling(temperature=0.7, seed=2**63, top_logprobs=5, full_logits=True)
    await client.prefill(
        [7, 8],
        pipeline="default",
        deadline=30,
        priority=-9,
        cache_salt="tenant",
        adapter="legal",
        sampling=sampling,
        request_id="mine",
    )
    sent = controller.requests[0].request
    assert replace(sent, deadline_ms=None, trace=TraceContext()) == PrefillRequest(
        request_id=sent.request_id,
        token_ids=b"\x07\0\0\0\x08\0\0\0",
        pipeline=PipelineId("default"),
        priority=-9,
        cache_salt="tenant",
        adapter="legal",
        sampling=sampling,
    )
    assert sent.request_id == "mine"


@pytest.mark.parametrize(
    "prompt",
    [
        [1, 258, 2**31 - 1],
        (1, 258, 2**31 - 1),
        array("q", [1, 258, 2**31 - 1]),
        np.array([1, 258, 2**31 - 1], dtype=np.int64),
        np.array([1, 258, 2**31 - 1], dtype=">u4"),
        memoryview(array("i", [1, 258, 2**31 - 1])),
        b"\x01\0\0\0\x02\x01\0\0\xff\xff\xff\x7f",
        bytearray(b"\x01\0\0\0\x02\x01\0\0\xff\xff\xff\x7f"),
        memoryview(b"\x01\0\0\0\x02\x01\0\0\xff\xff\xff\x7f"),
    ],
    ids=["list", "tuple", "array", "int64", "big-endian", "memoryview-int", "bytes", "bytearray", "memoryview-bytes"],
)
async def test_prompt_travels_as_packed_int32_whatever_its_form(
    controller: FakeController, client: AsyncClient, prompt: list[int]
) -> None:
    assert (await client.prefill(prompt)).prompt_tokens == 3
    assert controller.requests[0].request.token_ids == b"\x01\0\0\0\x02\x01\0\0\xff\xff\xff\x7f"


async def test_range_is_a_prompt(controller: FakeController, client: AsyncClient) -> None:
    await client.prefill(range(3))
    assert controller.requests[0].request.token_ids == np.arange(3, dtype="<i4").tobytes()


async def test_million_tokens_travel_in_frames_below_the_message_limit(
    controller: FakeController, client: AsyncClient
) -> None:
    prompt = np.arange(1_000_000, dtype=np.int32)
    result = await client.prefill(prompt)
    assert result.prompt_tokens == 1_000_000
    assert controller.requests[0].frames == 4
    assert controller.requests[0].request.token_ids == prompt.astype("<i4").tobytes()


async def test_stream_yields_events_in_order_as_they_happen(controller: FakeController, client: AsyncClient) -> None:
    gate = Gate()
    controller.script(Answer(first_token=4, cached_tokens=64, progress=(80, 90), rounds=3, gates={Step.FINISHED: gate}))
    async with client.stream([1] * 90) as stream:
        request_id = RequestId(stream.request_id)
        first, second = await anext(stream), await anext(stream)
        assert first == Queued(request_id, PipelineId("default"), 0)
        assert second == Admitted(request_id, Attempt(1), 64, 64, None, 64, 3)
        gate.open()
        rest = [event async for event in stream]
        result = await stream.result()
    assert rest == [
        Progress(request_id, 80, 90),
        Progress(request_id, 90, 90),
        Finished(request_id, Attempt(1), 4, 90, 64, Timings(), 1),
    ]
    assert (result.first_token, result.cached_tokens) == (4, 64)
    assert await controller.requests[0].ended() is Outcome.FINISHED


async def test_many_never_exceeds_its_concurrency(controller: FakeController, client: AsyncClient) -> None:
    gate, live = Gate(), []

    def answer(request: PrefillRequest) -> Answer:
        live.append(sum(received.outcome is None for received in controller.requests))
        return Answer(first_token=int.from_bytes(request.token_ids, "little"), gates={Step.FINISHED: gate})

    controller.answer = answer
    many = asyncio.create_task(_all(client, [[number] for number in range(10)], concurrency=3))
    for _ in range(3):
        await controller.next_request()
    assert not many.done()
    gate.open()
    outcomes = await many
    assert max(live) == 3
    assert {outcome.index: outcome.unwrap().first_token for outcome in outcomes} == {n: n for n in range(10)}


async def test_many_yields_in_completion_order_and_keeps_the_others_when_one_fails(
    controller: FakeController, client: AsyncClient
) -> None:
    held, failing = Gate(), Answer(error=errors.NeverFits("too large", field="blocks", value=9, limit=8))
    controller.answer = lambda request: {
        1: Answer(first_token=1, gates={Step.FINISHED: held}),
        2: failing,
        3: Answer(first_token=3),
    }[int.from_bytes(request.token_ids, "little")]
    prompts: list[list[int]] = [[1], [2], [], [3]]
    seen: dict[int, PrefillOutcome] = {}
    async for outcome in client.prefill_many(prompts, concurrency=4):
        seen[outcome.index] = outcome
        if len(seen) == 3:
            assert 0 not in seen
            held.open()
    assert list(seen)[-1] == 0
    assert seen[0].unwrap().first_token == 1
    assert seen[3].unwrap().first_token == 3
    assert type(seen[2].error) is errors.EmptyPrompt
    with pytest.raises(errors.NeverFits, match="too large"):
        seen[1].unwrap()


async def test_many_reads_an_endless_source_only_as_far_as_needed_and_cancels_when_left(
    controller: FakeController, client: AsyncClient
) -> None:
    taken: list[int] = []

    def endless() -> list[int]:
        taken.append(len(taken))
        return [len(taken)]

    never = Answer(gates={Step.FINISHED: Gate()})
    controller.answer = lambda request: Answer() if request.token_ids[0] == 1 else never
    many = client.prefill_many(iter(endless, None), concurrency=3)
    assert (await anext(many)).index == 0
    await many.aclose()
    assert taken == [0, 1, 2]
    outcomes = {received.request.token_ids[0]: await received.ended() for received in controller.requests}
    # Those that were cancelled before they arrived have no outcome.
    assert outcomes.pop(1) is Outcome.FINISHED
    assert set(outcomes.values()) <= {Outcome.CANCELLED}


async def test_describe_and_status_return_values_not_messages(controller: FakeController, client: AsyncClient) -> None:
    gate = Gate()
    controller.script(Answer(gates={Step.ADMITTED: gate}))
    async with client.stream([1], request_id="held") as stream:
        await anext(stream)
        status = await client.status(requests=True)
        gate.open()
        await stream.result()
    assert await client.describe() == await client.describe("default") == controller.description
    assert [request.request_id for request in status.requests] == ["held"]
    assert (status.ready, status.cluster, status.pipelines[0].running_requests) == (True, "fake", 1)
    assert (await client.status()).counters == {"finished": 1}


async def test_unknown_pipeline_is_refused_by_name(client: AsyncClient) -> None:
    for call in (client.describe("other"), client.prefill([1], pipeline="other")):
        with pytest.raises(errors.UnknownPipeline) as caught:
            await call
        assert caught.value.fields == {"field": "pipeline", "value": "other"}


async def _all(client: AsyncClient, prompts: list[list[int]], concurrency: int) -> list[PrefillOutcome]:
    return [outcome async for outcome in client.prefill_many(prompts, concurrency=concurrency)]
