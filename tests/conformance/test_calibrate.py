"""`wavepp calibrate` through a real controller and real daemons; what a stage took comes from no clock."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tests.harness.cluster import Cluster
from wavepp.commands.calibrate import measure
from wavepp_proto.errors import InvalidRequest
from wavepp_proto.profile import Profile, StageCosts, StageProfile
from wavepp_proto.terms import StageTimes
from wavepp_stage.engine.emulated_device import Stream
from wavepp_stage.runtime.running_formation import Stopwatch

COSTS = StageCosts(c_us=3_000.0, b_us=11.0, a_us=0.004, g_us=0.7)
OTHER = StageCosts(c_us=900.0, b_us=17.0, a_us=0.002, g_us=0.0)
PROFILE = Profile(
    "known", (StageProfile(COSTS, 4_096), StageProfile(OTHER, 4_096)), 16, 512, 256, window=65_536, layers=8
)  # fmt: skip


@pytest.fixture
def modelled_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waves take no time, and report what they would have taken."""
    taken = threading.local()

    def take(self: Stream, started: float, seconds: float, ready_at: float = 0.0) -> bool:
        taken.seconds = seconds
        return True

    monkeypatch.setattr(Stream, "take", take)
    report = Stopwatch.take

    def modelled(self: Stopwatch, compute_s: float) -> StageTimes:
        return replace(report(self, compute_s), compute_us=round(taken.seconds * 1e6))

    monkeypatch.setattr(Stopwatch, "take", modelled)


@pytest.mark.usefixtures("modelled_times")
async def test_known_costs_are_found_when_a_pipeline_is_calibrated(tmp_path: Path) -> None:
    file = tmp_path / "known.json"
    file.write_text(PROFILE.to_json())
    async with Cluster(model=f"emulated:profile={file},vocabulary=1000", wave_tokens=512) as cluster:
        found, fits = await measure(cluster.client, None, "found", 20_000, 2, 0)
    assert (found.block_tokens, found.wave_tokens, found.layers, found.window) == (16, 512, 8, 65_536)
    for stage, true in zip(found.stages, (COSTS, OTHER), strict=True):
        assert stage.pool_blocks == 4_096
        assert stage.costs.c_us == pytest.approx(true.c_us, rel=0.05)
        assert stage.costs.b_us == pytest.approx(true.b_us, rel=0.05)
        assert stage.costs.a_us == pytest.approx(true.a_us, rel=0.05)
        assert stage.costs.g_us == pytest.approx(true.g_us, rel=0.05, abs=0.001)
    assert max(one.worst for one in fits) < 0.01
    assert found.provenance["engine"] == "emulated"
    assert Profile.from_json(found.to_json()) == found


async def test_calibration_names_the_pipeline_when_there_is_none_of_that_name() -> None:
    async with Cluster() as cluster:
        with pytest.raises(InvalidRequest, match="name one pipeline that serves; there are: default"):
            await measure(cluster.client, "other", "found", 20_000, 1, 0)


@pytest.mark.slow
async def test_torch_pipeline_gets_a_profile_when_it_is_calibrated(tmp_path: Path) -> None:
    """Real times on a busy machine: only that a profile comes out, with costs that a stage can have."""
    from tests.harness.tiny_models import build

    model = str(build("qwen3", tmp_path))
    async with Cluster(model=model, engine="torch") as cluster:
        found, _ = await measure(cluster.client, None, "found", 1_024, 1, 0)
    found.check()
    assert found.provenance["engine"] == "torch"
    assert all(stage.costs.wave_us([(0, 128)]) > 0.0 for stage in found.stages)
