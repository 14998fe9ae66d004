"""Long prompts, as many requests as a wave has rows, and sixteen stages: the whole system, exact, nothing left held."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import wavepp
from tests.harness.cluster import Cluster
from tests.harness.eventually import eventually
from wavepp_proto import workload
from wavepp_proto.hashing import reuse_cap
from wavepp_proto.limits import MAX_LANES
from wavepp_proto.profile import Profile
from wavepp_simulator.planning import Overheads, config_of
from wavepp_simulator.planning_load import Load
from wavepp_stage.core.work import WaveWork
from wavepp_stage.engine.emulated import EmulatedEngine, expected_first_token

VOCABULARY = 1000
WINDOW = 1 << 21
PLAIN = f"emulated:layers=8,vocabulary={VOCABULARY},window={WINDOW}"
HYBRID = f"emulated:layers=8,vocabulary={VOCABULARY},window={WINDOW},attention_every=4"
MILLION = 1_000_010
B = 64
Tokens = np.ndarray[tuple[int], np.dtype[np.int32]]


def prompt(tokens: int, seed: int) -> Tokens:
    return np.random.default_rng(seed).integers(0, VOCABULARY, tokens, dtype=np.int32)


def oracle(tokens: Tokens) -> int:
    return expected_first_token(tokens, VOCABULARY)


def million(model: str) -> Cluster:
    return Cluster(
        stages=2, model=model, block_tokens=B, pool_blocks=(MILLION // B + 1200,), wave_tokens=16_384, state_slots=256
    )


@pytest.mark.parametrize("model", [PLAIN, HYBRID])
async def test_million_tokens_are_exact_cold_and_cached_to_the_last_block(model: str) -> None:
    tokens = prompt(MILLION, 1)
    async with million(model) as cluster:
        first = await cluster.client.prefill(tokens)
        assert (first.first_token, first.cached_tokens) == (oracle(tokens), 0)
        again = await cluster.client.prefill(tokens)
        assert (again.first_token, again.cached_tokens) == (oracle(tokens), reuse_cap(MILLION, B))
        changed = tokens.copy()
        changed[MILLION // 2] += 1 if changed[MILLION // 2] < VOCABULARY - 1 else -1
        other = await cluster.client.prefill(changed)
        assert other.first_token == oracle(changed)
        whole = MILLION // 2 // B * B
        assert whole - 8192 < other.cached_tokens <= whole
        if model == PLAIN:
            assert other.cached_tokens == whole


async def test_short_prompts_are_answered_while_a_million_tokens_are_on_their_way() -> None:
    long = prompt(MILLION, 2)
    shorts = [prompt(300, seed) for seed in range(10, 26)]
    async with million(PLAIN) as cluster:
        running = asyncio.create_task(cluster.client.prefill(long))
        results = await asyncio.gather(*(cluster.client.prefill(short) for short in shorts))
        assert [result.first_token for result in results] == [oracle(short) for short in shorts]
        assert (await running).first_token == oracle(long)


async def test_as_many_requests_as_lanes_share_one_wave_when_the_ring_frees() -> None:
    """A stage that stands still fills the ring; the rest of 128 admitted requests then fits one wave."""
    leave, rows, stages = threading.Event(), list[int](), 2

    def gate(wave: WaveWork) -> None:
        rows.append(len(wave.rows))
        assert leave.wait(60)

    prompts = [prompt(100, seed) for seed in range(MAX_LANES)]
    async with Cluster(stages=stages, pool_blocks=(4096,), wave_tokens=16_384, policy="fixed") as cluster:
        engine = cluster.daemons[0].equipment.engine
        assert isinstance(engine, EmulatedEngine)
        engine._gate = gate
        running = [asyncio.create_task(cluster.client.prefill(tokens)) for tokens in prompts]
        (pipeline,) = cluster.controller.machine.pipelines.values()

        def admitted() -> int:
            return 0 if pipeline.service is None else len(pipeline.service.execution.running)

        await eventually(lambda: admitted() == MAX_LANES, about="all requests to be admitted")
        leave.set()
        results = await asyncio.gather(*running)
        assert [result.first_token for result in results] == [oracle(tokens) for tokens in prompts]
    assert sum(rows) == MAX_LANES
    assert len(rows) <= 2 * stages + 1, "what the ring had no place for went in one wave"


async def test_sixteen_stages_agree_when_long_and_short_prompts_share_them() -> None:
    shared = prompt(5_000, 3)
    prompts = [prompt(200_000, 4), *(np.concatenate([shared, prompt(1 + 37 * at, 100 + at)]) for at in range(40))]
    async with Cluster(
        stages=16, model=f"emulated:layers=32,vocabulary={VOCABULARY},window={WINDOW}", block_tokens=B,
        pool_blocks=(8192, *(4096 + 256 * at for at in range(15))), wave_tokens=8192,
    ) as cluster:  # fmt: skip
        for _ in range(2):
            results = await asyncio.gather(*(cluster.client.prefill(tokens) for tokens in prompts))
            assert [result.first_token for result in results] == [oracle(tokens) for tokens in prompts]
        assert all(
            result.cached_tokens == reuse_cap(len(tokens), B) for result, tokens in zip(results, prompts, strict=True)
        )


@pytest.mark.parametrize("policy", ["fixed", "mpu", "adaptive"])
def test_sixteen_planned_stages_serve_a_full_wave_of_requests_in_virtual_time(policy: str) -> None:
    glm = Profile.from_json((Path(wavepp.__file__).parent / "profiles" / "glm_5_2_pp4.json").read_text())
    deep = replace(glm, stages=glm.stages * 4)
    asked = workload.family("short_cold", "glm", MAX_LANES, tokens=2048)
    load = Load(deep, config_of(deep, policy, "overlapped"), Overheads.measured(16), 1)
    played = load.play(asked, 32)
    assert [one.failure for one in played.measured if one.failure] == []
    assert len(played.measured) >= 32
    load.deployment.machine.check()
    shortest = min(len(waves) for waves in played.ran.values())
    assert len({tuple((ran.ordinal, ran.rows) for ran in waves[:shortest]) for waves in played.ran.values()}) == 1
