"""Calibration: which prompts are sent, how they were cut, and costs found from what stages took."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from wavepp._status import PipelineStatus, StageStatus
from wavepp.calibration import Probe, Sample, StageFit, chunks_of, fit, probes, profile_of
from wavepp_proto.errors import InvalidRequest
from wavepp_proto.profile import Profile, StageCosts, StageProfile
from wavepp_proto.terms import Capacity, DaemonKey, PipelineId, Rank, StageIndex, StageTimes

M = 16_384
FAST = StageCosts(c_us=20_000.0, b_us=12.0, a_us=6e-5, g_us=0.14)
SLOW = StageCosts(c_us=5_000.0, b_us=20.0, a_us=1e-4, g_us=0.0)


def stage(number: int, groups: tuple[str, ...] = ("attention",)) -> StageStatus:
    return StageStatus(
        key=DaemonKey(PipelineId("p"), StageIndex(number), Rank(0)), incarnation=1, address="", engine="emulated",
        first_layer=number * 4, last_layer=number * 4 + 4, pool_blocks=8_192 - number, capacity=Capacity(1, 0, 0),
        indexed_blocks=0, digest_in_sync=True, digest_age_ms=0, heartbeat_age_ms=0, waves_done=0, pid=1, version="0",
        times=StageTimes(), groups=groups, host_pool_blocks=7, state_slots=3, reconnecting=False, reconnects=0,
        inventory_age_ms=None, orphans=0,
    )  # fmt: skip


def pipeline(*stages: StageStatus) -> PipelineStatus:
    return PipelineStatus(
        pipeline="p", state="serving", formation=1, stages=len(stages), missing_stages=(), model="m", model_path="",
        block_tokens=64, window=1_048_576, wave_tokens=M, waves_in_flight=0, queued_requests=0, running_requests=0,
        parked_requests=0, daemons=stages, link="grpc", policy="fixed", last_fault=None,
    )  # fmt: skip


def sample_of(*chunks: tuple[int, int], noise: tuple[float, float] = (1.0, 1.0)) -> Sample:
    took = [sum(costs.wave_us([chunk]) for chunk in chunks) for costs in (FAST, SLOW)]
    return Sample(chunks, (took[0] * noise[0], took[1] * noise[1]))


def all_samples(plan: tuple[Probe, ...]) -> list[Sample]:
    return [sample_of((probe.prefix, probe.suffix)) for probe in plan]


def test_probes_are_cold_then_behind_longer_prefixes_when_the_pool_has_room() -> None:
    plan = probes(pipeline(stage(0), stage(1)), longest=147_456)
    assert plan[:6] == tuple(Probe(0, tokens) for tokens in (1_024, 2_048, 4_096, 8_192, 12_288, 16_384))
    assert sorted({probe.prefix for probe in plan}) == [0, M, 4 * M, 8 * M]
    assert max(probe.prefix + probe.suffix for probe in plan) == 147_456
    assert all(probe.prefix % 64 == probe.suffix % 64 == 0 for probe in plan)


def test_probes_fill_at_most_half_the_smallest_pool_when_it_is_small() -> None:
    small = pipeline(replace(stage(0), pool_blocks=600), stage(1))
    assert max(probe.prefix + probe.suffix for probe in probes(small, 1_000_000)) <= 300 * 64


def test_probes_are_refused_when_the_pipeline_has_no_room_for_them() -> None:
    with pytest.raises(InvalidRequest, match="at most 1000 tokens are too short"):
        probes(pipeline(stage(0)), longest=1_000)


def test_chunks_are_the_reported_positions_when_none_is_missing() -> None:
    assert chunks_of(64, [128, 256], 300, 3) == ((64, 64), (128, 128), (256, 44))
    assert chunks_of(0, [], 300, 1) == ((0, 300),)
    assert chunks_of(64, [128], 300, 3) is None
    assert chunks_of(64, [256, 128], 300, 3) is None


def test_costs_are_recovered_when_samples_are_exact() -> None:
    found = fit(all_samples(probes(pipeline(stage(0), stage(1)), 147_456)), 2)
    for one, true in zip(found, (FAST, SLOW), strict=True):
        assert one.costs.c_us == pytest.approx(true.c_us, rel=1e-6)
        assert one.costs.b_us == pytest.approx(true.b_us, rel=1e-6)
        assert one.costs.a_us == pytest.approx(true.a_us, rel=1e-6)
        assert one.costs.g_us == pytest.approx(true.g_us, rel=1e-6, abs=1e-9)
        assert one.worst < 1e-6


def test_costs_are_recovered_within_five_percent_when_times_scatter_and_some_are_far_off() -> None:
    """Three repeats of each, one percent of noise, and one repeat in twenty takes three times as long."""
    chance = np.random.default_rng(11)
    plan = probes(pipeline(stage(0), stage(1)), 147_456)
    samples = []
    for probe in plan * 3:
        noise = chance.normal(1.0, 0.01, 2) * np.where(chance.random(2) < 0.05, 3.0, 1.0)
        samples.append(sample_of((probe.prefix, probe.suffix), noise=(float(noise[0]), float(noise[1]))))
    fast, slow = fit(samples, 2)
    for got, true in ((fast.costs, FAST), (slow.costs, SLOW)):
        assert got.c_us == pytest.approx(true.c_us, rel=0.05)
        assert got.b_us == pytest.approx(true.b_us, rel=0.05)
        assert got.a_us == pytest.approx(true.a_us, rel=0.05)
    assert fast.costs.g_us == pytest.approx(FAST.g_us, rel=0.05)
    assert slow.costs.g_us < 0.01


def test_costs_are_recovered_when_the_planner_cuts_prompts_into_several_waves() -> None:
    samples = [
        sample_of((0, 4_096), (4_096, 4_096), (8_192, 8_192)),
        sample_of((0, 2_048), (2_048, 14_336)),
        sample_of((65_536, 1_024), (66_560, 3_072)),
        sample_of((131_072, 8_192), (139_264, 8_192)),
        sample_of((0, 16_384)),
        sample_of((32_768, 64)),
    ]
    (one, _) = fit(samples, 2)
    assert one.costs.c_us == pytest.approx(FAST.c_us, rel=1e-6)
    assert one.costs.g_us == pytest.approx(FAST.g_us, rel=1e-6)


def test_no_coefficient_is_negative_when_that_would_fit_better() -> None:
    """A line that falls through zero: c would be negative."""
    samples = [
        Sample(((0, tokens),), (max(1.0, tokens * 10.0 - 3_000.0),))
        for tokens in (400, 800, 1_600, 3_200, 6_400, 9_600)
    ]
    (one,) = fit(samples, 1)
    assert min(one.costs.c_us, one.costs.b_us, one.costs.a_us, one.costs.g_us) == 0.0
    assert one.costs.b_us > 0.0


def test_fit_is_refused_when_samples_are_of_too_few_kinds() -> None:
    with pytest.raises(InvalidRequest, match="5 kinds of probes"):
        fit([sample_of((0, tokens)) for tokens in (64, 128, 256, 512, 1_024)] * 3, 2)


def test_profile_has_the_pipelines_sizes_when_it_is_made() -> None:
    fits = (StageFit(FAST, 0.0, 0.0), StageFit(SLOW, 0.0, 0.0))
    made = profile_of(pipeline(stage(1), stage(0)), fits, "mine", {"engine": "torch"})
    assert made.stages == (StageProfile(FAST, 8_192, 7, 3), StageProfile(SLOW, 8_191, 7, 3))
    assert (made.layers, made.attention_every, made.wave_tokens, made.min_wave_tokens) == (8, 1, M, M // 2)
    assert Profile.from_json(made.to_json()) == made
    both = profile_of(pipeline(stage(0), stage(1, ("attention", "recurrent"))), fits, "mine", {})
    assert both.attention_every == 2
