"""Stages of two ranks as real processes: whatever happens to one rank happens to its stage.

Each rank has its own pool, canaries and chain of links; an answer is only right if every rank of every stage started
at the same token. At the end of each test no daemon holds anything and all of them ran the same rows.
"""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.harness.eventually import eventually
from tests.harness.processes import BLOCK_TOKENS, QUICK, SLOW, Processes, Run, random_prompt, record_figure
from wavepp.errors import StageLost

pytestmark = pytest.mark.processes

RANKS: dict[str, Any] = {"stages": 2, "ranks": 2}
SILENCE_MS = 1250
KNOWN = random_prompt(77, 20 * BLOCK_TOKENS + 1)


async def _all_lost(runs: list[Run], stage: int, rank: int) -> float:
    """Every request failed StageLost naming the rank; when the last client heard of it."""
    for run in runs:
        outcome = await run.outcome()
        assert isinstance(outcome, StageLost), outcome
        assert (outcome.fields["stage"], outcome.fields["rank"]) == (str(stage), str(rank))
    return max(run.ended_at for run in runs)


def _turns(count: int) -> list[list[int]]:
    """Prompts of up to 345 tokens that share prefixes of different lengths."""
    shared = random_prompt(5, 12 * BLOCK_TOKENS)
    return [[*shared[: 40 * (seed % 5)], *random_prompt(seed, 20 + 11 * seed)] for seed in range(count)]


async def test_answers_are_exact_when_prompts_share_prefixes(tmp_path: Path) -> None:
    async with Processes(tmp_path, QUICK, **RANKS, pool_blocks=(96,)) as cluster:
        turns = _turns(16)
        for _ in range(2):
            await asyncio.gather(*(cluster.run(prompt).succeeds() for prompt in turns))
        # the last block that is full is reused, and what is behind it computed again
        assert (await cluster.run(turns[-1]).succeeds()).cached_tokens == (len(turns[-1]) - 1) // 16 * 16
        assert await cluster.formation() == cluster.first


async def test_answers_are_exact_when_every_rank_has_other_tiers_and_states(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "pool_blocks": (40, 64, 48, 56),
        "host_pool_blocks": (16, 0, 8, 32),
        "state_slots": (12, 6, 20, 9),
    }
    async with Processes(tmp_path, f"{QUICK},attention_every=3", **RANKS, **sizes, headroom_blocks=0) as cluster:
        turns = _turns(16)
        for _ in range(3):
            await asyncio.gather(*(cluster.run(prompt).succeeds() for prompt in turns))
        assert await cluster.formation() == cluster.first


@pytest.mark.engines("emulated", "engine-thread", why="TensorRT-LLM gives every rank the smallest pool")
async def test_reuse_is_the_poorest_ranks_when_one_has_a_smaller_pool(tmp_path: Path) -> None:
    async with Processes(tmp_path, QUICK, **RANKS, pool_blocks=(256, 48, 256, 256), headroom_blocks=0) as cluster:
        await cluster.run(KNOWN).succeeds()
        assert (await cluster.run(KNOWN).succeeds()).cached_tokens == 20 * BLOCK_TOKENS
        await cluster.run(random_prompt(1, 40 * BLOCK_TOKENS)).succeeds()
        again = await cluster.run(KNOWN).succeeds()
        assert again.cached_tokens < 20 * BLOCK_TOKENS
        assert (again.limiting_stage, again.best_stage_hit) == (0, 20 * BLOCK_TOKENS)
        assert await cluster.formation() == cluster.first


@pytest.mark.parametrize(("stage", "rank"), [(0, 1), (1, 0)])
async def test_stage_is_fenced_and_forms_again_when_one_of_its_ranks_is_killed(
    tmp_path: Path, stage: int, rank: int
) -> None:
    name = f"stage-{stage}.{rank}"
    async with Processes(tmp_path, SLOW, **RANKS) as cluster:
        await cluster.run(KNOWN[:40]).succeeds()
        others = cluster.pids(name)
        runs = await cluster.running(3)
        killed_at = time.monotonic()
        cluster.signal(name, signal.SIGKILL)
        record_figure(f"kill_rank_{stage}.{rank}_to_last_error_s", await _all_lost(runs, stage, rank) - killed_at)

        waiting = cluster.run(random_prompt(9, 100))
        await cluster.ended(name)
        broken = await eventually(cluster.pipeline, about="a status")
        assert [(key.stage, key.rank) for key in broken.missing] in ([], [(stage, rank)])
        await cluster.start_again(name)
        await cluster.serving(cluster.first + 1)
        assert cluster.pids(name) == others
        await waiting.succeeds()
        # what the others had cached is worth nothing: the new one has none of it
        assert (await cluster.run(KNOWN[:40]).succeeds()).cached_tokens == 0
        await cluster.run(runs[0].prompt).succeeds()


async def test_rank_comes_back_as_somebody_new_when_it_was_frozen(tmp_path: Path) -> None:
    async with Processes(tmp_path, SLOW, **RANKS, silence_ms=SILENCE_MS) as cluster:
        before = cluster.pids()
        await cluster.run(KNOWN[:40]).succeeds()
        runs = await cluster.running(3)
        stopped_at = time.monotonic()
        cluster.signal("stage-1.1", signal.SIGSTOP)
        try:
            record_figure("freeze_rank_to_last_error_s", await _all_lost(runs, 1, 1) - stopped_at)
        finally:
            cluster.signal("stage-1.1", signal.SIGCONT)
        await eventually(lambda: "reincarnated" in cluster.log("stage-1.1"), about="the rank to fence itself")
        await cluster.serving(cluster.first + 1)
        again = await cluster.run(KNOWN[:40]).succeeds()
        # Ranks that waited for the frozen one within a wave gave the wave up, not what they had loaded.
        assert again.cached_tokens == 2 * BLOCK_TOKENS
        await cluster.run(runs[0].prompt).succeeds()
        assert cluster.pids() == before
