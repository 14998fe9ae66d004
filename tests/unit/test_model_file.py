"""Latency models in a file: read once, replaced as a whole, a calibration never written over."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from wavepp_controller.core.machine import ANY_PIPELINE
from wavepp_controller.runtime.model_file import ModelFile
from wavepp_proto.errors import InvalidRequest
from wavepp_proto.profile import Profile, StageCosts, StageProfile

COSTS = {"c_us": 1.0, "b_us": 2.0, "a_us": 0.0, "g_us": 0.0}
LEARNT: dict[str, Any] = {"p": {"0.0": {**COSTS, "error": 0.1, "samples": 9}}}


async def test_models_come_back_when_they_were_saved(tmp_path: Path) -> None:
    path = tmp_path / "models.json"
    assert ModelFile(path, dict).read() == {}
    await ModelFile(path, lambda: LEARNT).save()
    assert ModelFile(path, dict).read() == LEARNT
    assert os.listdir(tmp_path) == ["models.json"]


async def test_nothing_is_written_when_nothing_was_learnt(tmp_path: Path) -> None:
    await ModelFile(tmp_path / "models.json", lambda: {"p": {}}).save()
    assert not os.listdir(tmp_path)


async def test_calibration_seeds_every_pipeline_and_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    text = Profile("made up", (StageProfile(StageCosts(1.0, 2.0), 100),)).to_json()
    path.write_text(text)
    file = ModelFile(path, lambda: LEARNT)
    assert file.read() == {ANY_PIPELINE: {"0.0": COSTS}}
    await file.save()
    assert path.read_text() == text


async def test_folder_that_cannot_be_written_costs_nothing_but_a_warning(tmp_path: Path) -> None:
    await ModelFile(tmp_path / "nowhere" / "models.json", lambda: LEARNT).save()


@pytest.mark.parametrize(
    "text", ["{", "[]", "[" * 100_000, json.dumps({"schema": 1}), json.dumps({"latency_models": {}}), "\udcff"]
)
def test_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "models.json"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(InvalidRequest):
        ModelFile(path, dict).read()


def test_parts_of_killed_writers_are_taken_away_and_others_left_when_models_are_saved(tmp_path: Path) -> None:
    died = subprocess.Popen(["true"])
    died.wait()
    for name in (f".m[1].json.{died.pid}", f".m[1].json.{os.getppid()}", ".m[1].json.mine", ".other.json.1"):
        (tmp_path / name).write_text("{")
    asyncio.run(ModelFile(tmp_path / "m[1].json", lambda: LEARNT).save())
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted(
        ["m[1].json", f".m[1].json.{os.getppid()}", ".m[1].json.mine", ".other.json.1"]
    )


def test_nothing_is_left_beside_it_when_a_file_cannot_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "models.json").mkdir()
    asyncio.run(ModelFile(tmp_path / "models.json", lambda: LEARNT).save())
    assert [one.name for one in tmp_path.iterdir()] == ["models.json"]


def test_pipe_is_refused_when_it_is_given_for_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidRequest, match="is no file"):
        ModelFile(tmp_path / "pipe", dict).read()
