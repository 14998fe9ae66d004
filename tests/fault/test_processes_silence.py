"""Stages and controllers that hear nothing of each other for too long, and then do, as real processes.

Whoever was silent is somebody new when it comes back: a daemon takes a new incarnation at once, so the
pipeline serves again as soon as it can be reached, and nothing old is acted on.
"""

from __future__ import annotations

import signal
import time
from functools import partial
from pathlib import Path

import pytest

from tests.harness.eventually import eventually
from tests.harness.ports import free_port
from tests.harness.processes import BLOCK_TOKENS, SLOW, Processes, Run, random_prompt, record_figure
from wavepp.errors import ControllerUnavailable, FormationEnded, StageLost

pytestmark = pytest.mark.processes

SILENCE_MS = 1250
KNOWN = random_prompt(77, 10 * BLOCK_TOKENS + 1)


async def _all_fail(runs: list[Run]) -> None:
    for run in runs:
        outcome = await run.outcome()
        assert isinstance(outcome, StageLost | FormationEnded), outcome


async def _broken(cluster: Processes) -> None:
    """Until the controller has ended the formation."""

    async def not_serving() -> bool:
        return await cluster.formation() == 0

    await eventually(not_serving, about="the formation to end")


def _dialled_since(cluster: Processes, accepted: int) -> bool:
    return cluster.proxy.accepted > accepted


def _reincarnated(cluster: Processes, name: str) -> bool:
    return "reincarnated" in cluster.log(name)


async def test_requests_go_on_when_the_connection_to_a_stage_is_cut(tmp_path: Path) -> None:
    async with Processes(tmp_path, SLOW, proxied=True) as cluster:
        runs = await cluster.running(4)
        for _ in range(3):
            accepted = cluster.proxy.accepted
            cluster.proxy.cut()
            await eventually(partial(_dialled_since, cluster, accepted))
        for run in runs:
            await run.succeeds()
        assert await cluster.formation() == cluster.first


async def test_pipeline_serves_again_when_a_stage_was_cut_off_for_longer_than_the_silence(tmp_path: Path) -> None:
    """Both sides end the formation by themselves; the stage registers anew and is taken at once."""
    async with Processes(tmp_path, SLOW, silence_ms=SILENCE_MS, proxied=True) as cluster:
        before = cluster.pids()
        await cluster.run(KNOWN).succeeds()
        runs = await cluster.running(3)
        cluster.proxy.go_down()
        await _all_fail(runs)
        await eventually(lambda: _reincarnated(cluster, "stage-0"), about="the stage to fence itself")
        healed_at = time.monotonic()
        cluster.proxy.heal()
        await cluster.serving(cluster.first + 1)
        record_figure("heal_cut_stage_to_serving_s", time.monotonic() - healed_at)
        assert (await cluster.run(KNOWN).succeeds()).cached_tokens == 10 * BLOCK_TOKENS
        await cluster.run(runs[0].prompt).succeeds()
        assert cluster.pids() == before


@pytest.mark.parametrize("stage", [0, 1])
async def test_a_stage_comes_back_as_somebody_new_when_it_was_frozen(tmp_path: Path, stage: int) -> None:
    """What waited in its sockets is for an incarnation that is no more: it acts on none of it."""
    async with Processes(tmp_path, SLOW, silence_ms=SILENCE_MS) as cluster:
        before = cluster.pids()
        await cluster.run(KNOWN).succeeds()
        runs = await cluster.running(3)
        cluster.signal(f"stage-{stage}", signal.SIGSTOP)
        try:
            await _all_fail(runs)
            await _broken(cluster)
        finally:
            cluster.signal(f"stage-{stage}", signal.SIGCONT)
        thawed_at = time.monotonic()
        await eventually(lambda: _reincarnated(cluster, f"stage-{stage}"), about="the stage to fence itself")
        await cluster.serving(cluster.first + 1)
        record_figure(f"thaw_stage_{stage}_to_serving_s", time.monotonic() - thawed_at)
        assert (await cluster.run(KNOWN).succeeds()).cached_tokens == 10 * BLOCK_TOKENS
        await cluster.run(runs[0].prompt).succeeds()
        assert cluster.pids() == before


async def test_another_controller_serves_undisturbed_when_a_frozen_one_thaws(tmp_path: Path) -> None:
    """The frozen one's lease runs out; whatever it says afterwards is of an older authority."""
    async with Processes(tmp_path, SLOW, silence_ms=SILENCE_MS) as cluster:
        await cluster.run(KNOWN).succeeds()
        runs = await cluster.running(3)
        cluster.signal("controller", signal.SIGSTOP)
        cluster.set_aside("controller", "frozen")
        try:
            for name in ("stage-0", "stage-1", "stage-2"):
                await eventually(partial(_reincarnated, cluster, name), about=f"{name} to fence itself")
            address = f"127.0.0.1:{free_port()}"
            await cluster.local.start_controller(address)
            cluster.follow(address)
            await cluster.serving(1)
            assert (await cluster.run(KNOWN).succeeds()).cached_tokens == 10 * BLOCK_TOKENS
        finally:
            cluster.signal("frozen", signal.SIGCONT)
        for run in runs:
            assert isinstance(await run.outcome(), StageLost | FormationEnded | ControllerUnavailable)
        await eventually(lambda: "leadership lost" in cluster.log("frozen"), about="the thawed controller to resign")
        formation = await cluster.formation()
        for seed in range(5):
            await cluster.run(random_prompt(seed, 50)).succeeds()
        assert await cluster.formation() == formation == 1
