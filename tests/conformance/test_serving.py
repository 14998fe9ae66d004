"""The whole system with emulated stages over real gRPC: exact answers, exact reuse, nothing left held."""

from __future__ import annotations

import asyncio
import random
import threading

import numpy as np
import pytest

from tests.harness.cluster import Cluster
from tests.harness.eventually import eventually
from tests.harness.variant import expected_first_token
from wavepp import Sampling, errors
from wavepp_proto.hashing import reuse_cap
from wavepp_proto.terms import LinkKind
from wavepp_stage.core.work import WaveWork
from wavepp_stage.engine.emulated import EmulatedEngine

VOCABULARY = 1000
B = 16
M = 128


def prompt(tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(tokens)]


def oracle(tokens: list[int]) -> int:
    return expected_first_token(np.asarray(tokens, dtype=np.int32), VOCABULARY)


@pytest.mark.parametrize("stages", [1, 2, 4])
async def test_first_token_is_exact_when_lengths_lie_around_blocks_and_waves(stages: int) -> None:
    lengths = [1, B - 1, B, B + 1, 2 * B, M - 1, M, M + 1, 3 * M + 5]
    async with Cluster(stages=stages) as cluster:
        for seed, length in enumerate(lengths):
            tokens = prompt(length, seed)
            first = await cluster.client.prefill(tokens)
            assert (first.first_token, first.cached_tokens) == (oracle(tokens), 0)
            again = await cluster.client.prefill(tokens)
            assert (again.first_token, again.cached_tokens) == (oracle(tokens), reuse_cap(length, B))


async def test_concurrent_requests_share_waves_and_stay_exact() -> None:
    shared = prompt(100, 1)
    prompts = [shared + prompt(1 + 37 * index % 200, 100 + index) for index in range(40)]
    async with Cluster(stages=3, pool_blocks=(200, 90, 150)) as cluster:
        outcomes = [outcome async for outcome in cluster.client.prefill_many(prompts, concurrency=16)]
        found = {outcome.index: outcome.result.first_token for outcome in outcomes if outcome.result}
        assert found == {index: oracle(tokens) for index, tokens in enumerate(prompts)}


@pytest.mark.engines("emulated", "engine-thread", why="TensorRT-LLM gives every stage the smallest pool of all")
async def test_endpoint_is_the_least_of_all_stages_and_names_the_limiting_one() -> None:
    # Stage 1 holds 12 blocks: after the second prompt it has evicted most of the first.
    long, other = prompt(10 * B + 1, 1), prompt(9 * B + 1, 2)
    async with Cluster(stages=3, pool_blocks=(100, 12, 100)) as cluster:
        await cluster.client.prefill(long)
        await cluster.client.prefill(other)
        again = await cluster.client.prefill(long)
        assert again.first_token == oracle(long)
        assert again.best_stage_hit == 10 * B
        assert again.endpoint < 10 * B
        assert again.limiting_stage == 1


async def test_prompt_waits_for_room_when_the_pool_is_full_and_then_runs() -> None:
    prompts = [prompt(10 * B, seed) for seed in range(6)]
    async with Cluster(stages=2, pool_blocks=(100, 24)) as cluster:
        outcomes = [outcome async for outcome in cluster.client.prefill_many(prompts, concurrency=6)]
        assert {o.index: o.result and o.result.first_token for o in outcomes} == {
            index: oracle(tokens) for index, tokens in enumerate(prompts)
        }


async def test_grpc_and_emulated_link_carry_wide_waves() -> None:
    tokens = prompt(3000, 5)
    async with Cluster(stages=2, wave_tokens=2048, link=LinkKind.GRPC) as cluster:
        assert (await cluster.client.prefill(tokens)).first_token == oracle(tokens)


async def test_bad_requests_are_refused_at_once_and_hold_nothing() -> None:
    async with Cluster(stages=2, pool_blocks=(64, 32)) as cluster:
        client = cluster.client
        with pytest.raises(errors.EmptyPrompt):
            await client.prefill([])
        with pytest.raises(errors.TokenOutOfRange) as wrong:
            await client.prefill([1, 2, VOCABULARY])
        assert wrong.value.fields["limit"] == str(VOCABULARY)
        with pytest.raises(errors.PromptTooLong):
            await client.prefill([1] * 65_537)
        with pytest.raises(errors.NeverFits) as never:
            await client.prefill([1] * (32 * B + 1))
        assert never.value.fields["limit"] == "32"
        with pytest.raises(errors.UnknownPipeline):
            await client.prefill([1], pipeline="nowhere")
        with pytest.raises(errors.InvalidRequest):
            await client.prefill([1], deadline=-1.0)
        with pytest.raises(errors.PromptTooLong):
            await client.prefill(np.ones(1 << 20, dtype=np.int32))
        counters = cluster.controller.machine.status().counters
        assert counters["rejected.NEVER_FITS"] == 1


@pytest.mark.engines("emulated", why="admission waits for the engine's thread")
async def test_admission_overlaps_execution_when_the_engine_blocks() -> None:
    entered, leave = threading.Event(), threading.Event()

    def gate(wave: WaveWork) -> None:
        entered.set()
        assert leave.wait(60)

    async with Cluster(stages=2) as cluster:
        engine = cluster.daemons[0].equipment.engine
        assert isinstance(engine, EmulatedEngine)
        engine._gate = gate
        running = asyncio.create_task(cluster.client.prefill(prompt(50, 1)))
        await eventually(entered.is_set)
        async with cluster.client.stream(prompt(50, 2)) as stream:
            names = []
            async for event in stream:
                names.append(type(event).__name__)
                if names[-1] == "Admitted":
                    # a whole prepare round was answered while the executor is inside the engine
                    assert not leave.is_set()
                    leave.set()
        assert names[:2] == ["Queued", "Admitted"]
        assert (await running).first_token == oracle(prompt(50, 1))


@pytest.mark.parametrize("seed", range(6))
async def test_cancel_and_deadline_at_any_moment_leave_nothing_held(seed: int) -> None:
    rng = random.Random(seed)
    model = "emulated:layers=8,vocabulary=1000,window=65536,token_us=20"
    async with Cluster(stages=3, model=model, pool_blocks=(120, 60, 90)) as cluster:

        async def one(index: int) -> str:
            tokens = prompt(rng.randrange(1, 500), index)
            task = asyncio.create_task(
                cluster.client.prefill(tokens, deadline=rng.choice([0.01, 0.05, 5.0]), request_id=f"r{index}")
            )
            for _ in range(rng.randrange(40)):
                await asyncio.sleep(0)
            if rng.random() < 0.4:
                task.cancel()
            elif rng.random() < 0.3:
                await cluster.client.cancel(f"r{index}")
            try:
                assert (await task).first_token == oracle(tokens)
                return "finished"
            except asyncio.CancelledError:
                return "cancelled"
            except (errors.Cancelled, errors.DeadlineExpired, errors.TooLate) as error:
                return error.reason

        outcomes = await asyncio.gather(*(one(index) for index in range(40)))
        assert len(outcomes) == 40


@pytest.mark.engines("emulated", "engine-thread", why="it blocks a stage from inside, which is a process here")
async def test_lost_stage_fails_its_requests_typed_and_a_new_incarnation_serves_again() -> None:
    async with Cluster(stages=2) as cluster:
        entered, leave = threading.Event(), threading.Event()

        def gate(wave: WaveWork) -> None:
            entered.set()
            leave.wait(60)

        engine = cluster.daemons[1].equipment.engine
        assert isinstance(engine, EmulatedEngine)
        engine._gate = gate
        request = asyncio.create_task(cluster.client.prefill(prompt(40, 3)))
        await eventually(entered.is_set)
        closing = asyncio.create_task(cluster.daemons[1].close())
        with pytest.raises(errors.StageLost):
            await request
        leave.set()
        await closing
        await cluster.restart(1)
        await cluster.serving(formation=2)
        tokens = prompt(70, 4)
        assert (await cluster.client.prefill(tokens)).first_token == oracle(tokens)


async def test_last_stage_reports_logprobs_and_logits_when_asked() -> None:
    async with Cluster(stages=2) as cluster:
        result = await cluster.client.prefill(prompt(20), sampling=Sampling(top_logprobs=3, full_logits=True))
        assert len(result.top_logprobs) == 3
        assert result.logits is not None
        assert result.logits.shape == (VOCABULARY,)
        assert int(result.logits.argmax()) == result.first_token == result.top_logprobs[0].token_id
