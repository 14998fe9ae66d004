"""A controller that dies or drains, and an etcd that freezes, while requests run in real processes."""

from __future__ import annotations

import asyncio
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from tests.harness.eventually import eventually
from tests.harness.processes import (
    BLOCK_TOKENS,
    LONG_TOKENS,
    OUTCOME_S,
    SLOW,
    Processes,
    answers,
    random_prompt,
    record_figure,
)
from wavepp import AsyncClient
from wavepp.errors import ControllerUnavailable, Draining, FormationEnded, StageLost
from wavepp_proto import limits

pytestmark = pytest.mark.processes


async def _stages_let_go(cluster: Processes) -> None:
    for stage in range(cluster.local.plan.stages):
        await eventually(partial(_has_ended_its_formation, cluster, stage), about=f"stage {stage} to end its formation")


def _has_ended_its_formation(cluster: Processes, stage: int) -> bool:
    return "formation ended" in cluster.log(f"stage-{stage}")


async def test_clients_are_told_and_a_new_controller_finds_nothing_held_when_the_controller_is_killed(
    tmp_path: Path,
) -> None:
    """What was published before stays reusable: only holds end with a controller."""
    async with Processes(tmp_path, SLOW) as cluster:
        others = cluster.pids("controller")
        known = random_prompt(77, 10 * BLOCK_TOKENS + 1)
        await cluster.run(known).succeeds()
        runs = await cluster.running(3)
        killed_at = time.monotonic()
        cluster.signal("controller", signal.SIGKILL)
        for run in runs:
            assert isinstance(await run.outcome(), ControllerUnavailable)
        record_figure("kill_controller_to_last_error_s", max(run.ended_at for run in runs) - killed_at)

        await cluster.ended("controller")
        await _stages_let_go(cluster)
        await cluster.start_again("controller")
        await cluster.serving(1)
        await cluster.nothing_held()
        assert cluster.pids("controller") == others
        assert (await cluster.run(known).succeeds()).cached_tokens == 10 * BLOCK_TOKENS
        await cluster.run(runs[0].prompt).succeeds()


async def test_runs_of_one_stream_end_typed_or_are_sent_again_when_the_controller_is_killed(tmp_path: Path) -> None:
    """One client tries once, the other as clients do by default, until the controller has been replaced."""
    prompts = [random_prompt(seed, LONG_TOKENS) for seed in range(8)]
    async with Processes(tmp_path, SLOW) as cluster, AsyncClient(cluster.address) as patient:
        told = [asyncio.create_task(cluster.client.prefill(tokens)) for tokens in prompts]
        again = [asyncio.create_task(patient.prefill(tokens, deadline=OUTCOME_S)) for tokens in prompts]

        async def all_live() -> bool:
            return len((await cluster.client.status(requests=True)).requests) == 2 * len(prompts)

        await eventually(all_live)
        cluster.signal("controller", signal.SIGKILL)
        outcomes = await asyncio.gather(*told, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {ControllerUnavailable}
        await cluster.ended("controller")
        await _stages_let_go(cluster)
        await cluster.start_again("controller")
        for run, tokens in zip(again, prompts, strict=True):
            assert answers(await run, tokens)


async def test_stages_let_go_and_form_again_when_the_controller_freezes_and_thaws(tmp_path: Path) -> None:
    """A daemon that hears nothing for 1.25 s ends the formation by itself; the thawed controller finds that out."""
    async with Processes(tmp_path, SLOW, silence_ms=1250) as cluster:
        before = cluster.pids()
        runs = await cluster.running(3)
        cluster.signal("controller", signal.SIGSTOP)
        try:
            await _stages_let_go(cluster)
        finally:
            cluster.signal("controller", signal.SIGCONT)
        for run in runs:
            assert isinstance(await run.outcome(), StageLost | FormationEnded)
        await cluster.serving(cluster.first + 1)
        await cluster.run(runs[0].prompt).succeeds()
        assert cluster.pids() == before


async def test_running_requests_finish_and_new_ones_are_refused_when_the_controller_is_told_to_stop(
    tmp_path: Path,
) -> None:
    async with Processes(tmp_path, SLOW) as cluster:
        others = cluster.pids("controller")
        runs = await cluster.running(3, tokens=2 * LONG_TOKENS)
        cluster.signal("controller", signal.SIGTERM)

        async def draining() -> bool:
            return (await cluster.client.status()).draining

        await eventually(draining)
        assert isinstance(await cluster.run(random_prompt(9, 20)).outcome(), Draining)
        for run in runs:
            await run.succeeds()
        assert await cluster.ended("controller") == 0

        await cluster.start_again("controller")
        await cluster.serving(1)
        assert cluster.pids("controller") == others
        await cluster.run(random_prompt(9, 20)).succeeds()


async def test_every_request_succeeds_when_etcd_freezes_for_a_while(tmp_path: Path) -> None:
    """Longer than the leases' life: membership and leadership stand still, and nothing that runs stops."""
    async with Processes(tmp_path, SLOW) as cluster:
        before = cluster.pids()
        runs = await cluster.running(2)
        cluster.signal("etcd", signal.SIGSTOP)
        try:
            frozen_until = time.monotonic() + limits.MEMBER_TTL_S + 3
            seed = 100
            while time.monotonic() < frozen_until:
                await cluster.run(random_prompt(seed, 100)).succeeds()
                seed += 1
        finally:
            cluster.signal("etcd", signal.SIGCONT)
        for run in [*runs, cluster.run(random_prompt(9, 100))]:
            await run.succeeds()
        assert await cluster.formation() == cluster.first
        assert cluster.pids() == before
