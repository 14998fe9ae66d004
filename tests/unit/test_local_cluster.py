"""A local cluster: what its plan says of planning reaches the controller."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from wavepp.local_cluster import LocalCluster, LocalPlan


async def started_with(plan: LocalPlan, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments of the controller."""
    told: list[str] = []

    async def spawn(name: str, argv: list[str], **_: Any) -> None:
        told.extend(argv)

    local = LocalCluster(plan, folder)
    monkeypatch.setattr(local, "_spawn", spawn)
    await local.start_controller()
    return told


async def test_controller_is_told_how_to_plan_when_the_plan_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = LocalPlan("emulated", "emulated", policy="mpu", mode="lockstep", fills=1, model_file=tmp_path / "m.json")
    told = await started_with(plan, tmp_path, monkeypatch)
    pairs = dict(pairwise(told))
    assert (pairs["--policy"], pairs["--mode"], pairs["--fills"]) == ("mpu", "lockstep", "1")
    assert pairs["--model-file"] == str(tmp_path / "m.json")


async def test_controller_plans_by_its_own_defaults_when_the_plan_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = await started_with(LocalPlan("emulated", "emulated"), tmp_path, monkeypatch)
    assert not {"--policy", "--mode", "--fills", "--min-wave-tokens", "--model-file"} & set(told)


async def test_only_the_last_lifes_words_are_told_when_a_process_ends_at_once(tmp_path: Path) -> None:
    """Logs are added to: what an earlier cluster said there is not why this one does not start."""
    (tmp_path / "controller.log").write_text("error: what went wrong yesterday\n")
    local = LocalCluster(LocalPlan("emulated", "emulated"), tmp_path)
    child = await local._spawn("controller", ["wavepp_controller", "--policy", "guess"])
    await child.process.wait()
    assert "guess" in child.tail()
    assert "yesterday" not in child.tail()
