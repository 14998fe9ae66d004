"""Stages that die, freeze and drain while requests run, as real processes (issue's first failure rules).

The emulated engine makes requests last seconds; its first token is a function of the whole prompt, so
an answer computed on a wrong cache is a wrong answer.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.harness.eventually import eventually
from tests.harness.processes import SLOW, Processes, Run, random_prompt, record_figure
from wavepp.errors import StageLost

pytestmark = pytest.mark.processes


async def _all_lost(runs: list[Run], stage: int) -> float:
    """Every request failed StageLost naming the stage; when the last client heard of it."""
    for run in runs:
        outcome = await run.outcome()
        assert isinstance(outcome, StageLost), outcome
        assert outcome.fields["stage"] == str(stage)
    return max(run.ended_at for run in runs)


async def test_requests_fail_and_the_pipeline_forms_again_when_a_stage_is_killed(tmp_path: Path) -> None:
    async with Processes(tmp_path, SLOW) as cluster:
        others = cluster.pids("stage-1")
        runs = await cluster.running(4)
        killed_at = time.monotonic()
        cluster.signal("stage-1", signal.SIGKILL)
        record_figure("kill_stage_to_last_error_s", await _all_lost(runs, stage=1) - killed_at)

        waiting = cluster.run(random_prompt(9, 100))
        await cluster.ended("stage-1")
        await cluster.start_again("stage-1")
        assert (await cluster.serving(cluster.first + 1)).formation == cluster.first + 1
        assert cluster.pids("stage-1") == others
        await waiting.succeeds()
        await cluster.run(runs[0].prompt).succeeds()


@pytest.mark.parametrize("stage", [0, 2], ids=["first", "last"])
async def test_requests_fail_when_an_end_of_the_pipeline_is_killed(tmp_path: Path, stage: int) -> None:
    async with Processes(tmp_path, SLOW) as cluster:
        runs = await cluster.running(3)
        cluster.signal(f"stage-{stage}", signal.SIGKILL)
        await _all_lost(runs, stage)
        await cluster.ended(f"stage-{stage}")
        await cluster.start_again(f"stage-{stage}")
        await cluster.serving(cluster.first + 1)
        await cluster.run(runs[0].prompt).succeeds()


async def test_a_frozen_stage_is_replaced_and_its_thaw_disturbs_nobody(tmp_path: Path) -> None:
    """SIGSTOP keeps its streams open: only its silence tells. The thawed one serves again once its heir is gone."""
    async with Processes(tmp_path, SLOW, silence_ms=1250) as cluster:
        runs = await cluster.running(3)
        frozen = cluster.pids()["stage-1"]
        stopped_at = time.monotonic()
        cluster.signal("stage-1", signal.SIGSTOP)
        record_figure("freeze_stage_to_last_error_s", await _all_lost(runs, stage=1) - stopped_at)

        cluster.set_aside("stage-1", "frozen")
        await cluster.start_elsewhere(1)
        formation = (await cluster.serving(cluster.first + 1)).formation
        cluster.signal("frozen", signal.SIGCONT)
        await eventually(lambda: "formation ended" in cluster.log("frozen"), about="the thawed stage to fence itself")
        for seed in range(5):
            await cluster.run(random_prompt(seed, 50)).succeeds()
        assert await cluster.formation() == formation

        cluster.signal("stage-1", signal.SIGKILL)
        again = await cluster.serving(formation + 1)
        assert [daemon.pid for daemon in again.daemons if daemon.key.stage == 1] == [frozen]
        await cluster.run(runs[0].prompt).succeeds()


async def test_running_requests_finish_when_a_stage_is_told_to_stop(tmp_path: Path) -> None:
    async with Processes(tmp_path, SLOW) as cluster:
        others = cluster.pids("stage-2")
        runs = await cluster.running(3)
        cluster.signal("stage-2", signal.SIGTERM)
        for run in runs:
            await run.succeeds()
        waiting = cluster.run(random_prompt(9, 100))
        assert await cluster.ended("stage-2") == 0
        await cluster.start_again("stage-2")
        assert (await cluster.serving(cluster.first + 1)).formation == cluster.first + 1
        assert cluster.pids("stage-2") == others
        await waiting.succeeds()
