"""Daemons on a profile's devices behind a real controller, and `wavepp profile` as a user calls it."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.harness.cluster import Cluster
from wavepp import profiles
from wavepp.commands.profile import app
from wavepp_proto.errors import EngineFault
from wavepp_proto.profile import Profile, StageCosts, StageProfile
from wavepp_stage.engine.emulated import expected_first_token
from wavepp_stage.engine.emulated_device import Stream
from wavepp_stage.engine.emulated_model import parse_preset

pytestmark = pytest.mark.engines("emulated", "engine-thread", why="profiles are of the emulated engine")

COSTS = StageCosts(c_us=300.0, b_us=2.0, a_us=0.001, g_us=0.1)
PROFILE = Profile(
    "hybrid", (StageProfile(COSTS, 256, 128, 24, 1.0), StageProfile(COSTS, 200, 64, 20, 1.0)), 16, 128, 64,
    lanes=8, window=65_536, layers=8, attention_every=4, link_us=400.0, link_us_per_token=5.0,
)  # fmt: skip
CELLS = [
    {"family": "cold", "input_tokens": 128_000, "cached_tokens": 0, "c": c, "tokens_per_s": speed}
    for c, speed in ((1, 20_000), (8, 47_000))
] + [{"family": "reuse", "input_tokens": 128_000, "cached_tokens": 115_200, "c": 8, "tokens_per_s": 390_000}]


async def test_answers_are_exact_when_waves_travel_modelled_wires_between_profiled_stages(tmp_path: Path) -> None:
    """Long and short waves in turns: a short one may not overtake a long one on the wire."""
    file = tmp_path / "hybrid.json"
    file.write_text(PROFILE.to_json())
    model = f"emulated:profile={file},speedup=4,vocabulary=1000"
    async with Cluster(model=model, pool_blocks=(7,), block_tokens=64, wave_tokens=128, lanes=8) as cluster:
        chance = random.Random(5)
        prompts = [[chance.randrange(1000) for _ in range(length)] for length in (700, 3, 128, 1, 300, 17) * 3]
        results = await asyncio.gather(*(cluster.client.prefill(prompt) for prompt in prompts))
        expected = [expected_first_token(np.asarray(prompt, np.int32), 1000) for prompt in prompts]
        assert [result.first_token for result in results] == expected
        (pipeline,) = (await cluster.client.status()).pipelines
        shown = [(one.pool_blocks, one.host_pool_blocks, one.state_slots) for one in pipeline.daemons]
        assert shown == [(256, 128, 24), (200, 64, 20)]
        assert (pipeline.block_tokens, pipeline.window) == (16, 65_536)
        assert [one.groups for one in pipeline.daemons] == [("attention", "recurrent")] * 2


def test_profile_is_written_and_shown_when_cells_are_fitted(tmp_path: Path) -> None:
    cells, out = tmp_path / "cells.json", tmp_path / "mine.json"
    cells.write_text(json.dumps(CELLS))
    options = ["--stages", "2", "--stage-shares", "3,4", "--weights-gb", "400", "--pool-blocks", "77"]
    done = CliRunner().invoke(app, ["fit", str(cells), "--out", str(out), *options])
    assert done.exit_code == 0, done.output
    assert done.stderr.startswith("warning: 4 coefficients cannot be told apart by so few kinds of prompts (2)")
    made = Profile.from_json(out.read_text())
    light, heavy = made.stages
    assert (made.name, light.pool_blocks, heavy.costs.c_us) == ("mine", 77, 25_000.0)
    assert light.costs.b_us == pytest.approx(heavy.costs.b_us * 0.75)
    fractions = [one["fraction"] for one in made.provenance["residuals"]]
    assert fractions == pytest.approx([20 / 47, 1.0, 1.0], abs=1e-3)
    assert made.bound([(128_000, 0, 1.0)]) >= 47_000
    shown = CliRunner().invoke(app, ["show", str(out)])
    assert shown.exit_code == 0
    assert "390000" in shown.output


def test_profile_keeps_its_bases_sizes_when_it_is_fitted_from_one(tmp_path: Path) -> None:
    cells, out = tmp_path / "cells.json", tmp_path / "kimi.json"
    cells.write_text(json.dumps(CELLS))
    done = CliRunner().invoke(app, ["fit", str(cells), "--out", str(out), "--base", "kimi_k3_pp8", "--name", "k"])
    assert done.exit_code == 0, done.output
    made = Profile.from_json(out.read_text())
    assert (made.name, len(made.stages), made.attention_every, made.stages[0].state_slots) == ("k", 8, 4, 512)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["show", "nothing"], "no profile 'nothing'"),
        (["path", "nothing"], "no profile 'nothing'"),
        (["path", "a" * 5000], "no profile 'aaa"),
        (["fit", "nothing.json", "--out", "x.json"], "cannot read nothing.json"),
    ],
)
def test_command_says_what_is_wrong_in_one_line_when_a_file_is_missing(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 1
    assert said in done.output
    assert len(done.output.strip().splitlines()) == 1


@pytest.mark.parametrize("told", [{"residuals": 5}, {"residuals": [1]}, {"sources": 5}])
def test_a_wrong_provenance_is_named_when_a_profile_is_shown(tmp_path: Path, told: dict[str, object]) -> None:
    file = tmp_path / "p.json"
    file.write_text(json.dumps(json.loads(PROFILE.to_json()) | {"provenance": told}))
    done = CliRunner().invoke(app, ["show", str(file)])
    assert done.exit_code == 1
    assert "field=provenance" in done.output


@pytest.mark.parametrize("out", ["nowhere/p.json", "."])
def test_a_profile_that_cannot_be_written_is_told_in_one_line(tmp_path: Path, out: str) -> None:
    cells = tmp_path / "cells.json"
    cells.write_text(json.dumps(CELLS))
    done = CliRunner().invoke(app, ["fit", str(cells), "--out", str(tmp_path / out)])
    assert done.exit_code == 1
    assert "field=out" in done.output
    assert len(done.output.strip().splitlines()) == 1


def test_shares_are_refused_when_there_are_not_as_many_as_stages(tmp_path: Path) -> None:
    cells = tmp_path / "cells.json"
    cells.write_text(json.dumps(CELLS))
    done = CliRunner().invoke(app, ["fit", str(cells), "--out", str(tmp_path / "x"), "--stage-shares", "1,2"])
    assert done.exit_code == 1
    assert "--stage-shares needs 4 numbers" in done.output


def test_names_and_paths_of_shipped_profiles_are_told_when_asked_for() -> None:
    named = CliRunner().invoke(app, ["list"]).output.split()
    assert named == ["glm_5_2_pp4", "kimi_k3_pp8", "minimax_m2_7_pp4"]
    told = CliRunner().invoke(app, ["path", "glm_5_2_pp4"]).output.strip()
    assert Profile.from_json(Path(told).read_text()).name == "glm_5_2_pp4"


async def test_engine_is_told_when_waves_came_when_the_controller_sends_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On each stage: whatever runs has come before, and in order."""
    spans: dict[int, list[tuple[float, float]]] = {}
    take = Stream.take

    def noted(self: Stream, started: float, seconds: float, ready_at: float = 0.0) -> bool:
        spans.setdefault(id(self), []).append((ready_at, started))
        return take(self, started, seconds, ready_at)

    monkeypatch.setattr(Stream, "take", noted)
    file = tmp_path / "hybrid.json"
    file.write_text(PROFILE.to_json())
    async with Cluster(model=f"emulated:profile={file},vocabulary=1000", wave_tokens=128) as cluster:
        await cluster.client.prefill([1] * 1500)
    assert len(spans) == 2
    for waves in spans.values():
        assert len(waves) == 12
        assert all(ready_at > 0.0 for ready_at, _ in waves)
        assert all(ready_at <= started for ready_at, started in waves)
        assert waves == sorted(waves)


def test_a_stage_is_given_the_file_when_a_preset_names_a_profile() -> None:
    file = profiles.path_of("glm_5_2_pp4")
    assert profiles.in_preset("emulated:speedup=4,profile=glm_5_2_pp4") == f"emulated:speedup=4,profile={file}"
    assert profiles.in_preset(f"emulated:profile={file}") == f"emulated:profile={file}"
    for model in ("emulated", "emulated:layers=2", "emulated:", "emulated:profile=", "folder:profile=x"):
        assert profiles.in_preset(model) == model


def test_a_stage_says_that_it_wants_a_file_when_it_is_given_a_name() -> None:
    with pytest.raises(EngineFault, match="a stage wants a file: `wavepp profile path glm_5_2_pp4` names"):
        parse_preset("emulated:profile=glm_5_2_pp4")
