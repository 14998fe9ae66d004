"""What a bench's requests add up to, by hand."""

from __future__ import annotations

import pytest

from wavepp import ClusterStatus
from wavepp._status import cluster_status_from_pb
from wavepp.bench.measure import Percentiles, Sample, percentiles, summarise
from wavepp.bench.stages import Waves, stage_splits, waves
from wavepp_proto.v1 import admin_pb2, common_pb2


def sample(number: int = 0, took_s: float = 1.0, cached: int = 0, **more: object) -> Sample:
    one = Sample(number, "", 10.0, 10.0, 10.0 + took_s, 1000, 0, cached)
    return one._replace(**more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], None),
        ([7.0], (7.0, 7.0, 7.0)),
        ([2.0, 1.0], (1.0, 2.0, 2.0)),
        ([float(value) for value in range(100, 0, -1)], (50.0, 95.0, 99.0)),
        ([float(value) for value in range(1, 201)], (100.0, 190.0, 198.0)),
    ],
)
def test_percentiles_are_values_that_were_measured(
    values: list[float], expected: tuple[float, float, float] | None
) -> None:
    assert percentiles(values) == expected


def test_throughput_counts_finished_requests_with_and_without_what_was_cached() -> None:
    samples = [sample(0, cached=400), sample(1, cached=100), sample(2, reason="QUEUE_FULL")]
    summary = summarise(samples, 2.0)
    assert (summary.input_tokens_per_s, summary.computed_tokens_per_s, summary.requests_per_s) == (1000, 750, 1)
    assert (summary.finished, summary.failed) == (2, {"QUEUE_FULL": 1})


def test_latencies_are_those_of_finished_requests_and_count_from_when_they_were_due() -> None:
    late = sample(0, took_s=3.0, sent_s=12.0, admission_ms=5.0)
    summary = summarise([late, sample(1, took_s=0.1, reason="TOO_LATE")], 1.0)
    assert summary.completion_ms == Percentiles(3000, 3000, 3000)
    assert summary.admission_ms == Percentiles(5, 5, 5)
    assert summary.most_late_ms == 2000


def test_a_hit_is_good_from_nine_tenths_of_what_could_be_reused() -> None:
    samples = [
        sample(cached=cached, reusable_tokens=reusable) for cached, reusable in ((900, 1000), (899, 1000), (0, 0))
    ]
    assert [one.hit_well for one in samples] == [True, False, None]
    assert summarise(samples, 1.0).good_hit_rate == 0.5
    assert summarise(samples[2:], 1.0).good_hit_rate is None


def test_kinds_are_told_apart_only_when_there_are_several() -> None:
    warm, cold = sample(kind="warm"), sample(took_s=4.0, kind="cold")
    assert summarise([warm], 1.0).completion_ms_by_kind == {}
    assert summarise([warm, cold], 1.0).completion_ms_by_kind == {
        "cold": Percentiles(4000, 4000, 4000),
        "warm": Percentiles(1000, 1000, 1000),
    }


def test_nothing_is_no_rate_and_no_latency() -> None:
    summary = summarise([], 0.0)
    assert (summary.input_tokens_per_s, summary.completion_ms, summary.good_hit_rate) == (0.0, None, None)


def _status(waves_done: int, times: tuple[int, int, int, int, int], formation: int = 1) -> ClusterStatus:
    names = ("compute_us", "activation_wait_us", "admission_wait_us", "preparing_us", "idle_us")
    daemon = admin_pb2.StageStatus(
        key=common_pb2.DaemonKey(pipeline="p"),
        waves_done=waves_done,
        times=common_pb2.StageTimes(**dict(zip(names, times, strict=True))),
    )
    return cluster_status_from_pb(
        admin_pb2.StatusResponse(
            pipelines=[admin_pb2.PipelineStatus(pipeline="p", formation=formation, daemons=[daemon])],
            counters={"waves": waves_done, "wave_tokens": 100 * waves_done},
        )
    )


def test_stage_time_is_split_by_what_it_went_into_between_two_statuses() -> None:
    before, after = _status(2, (100, 0, 0, 50, 1)), _status(12, (600, 200, 100, 100, 151))
    (split,) = stage_splits(before.pipelines[0], after.pipelines[0]) or ()
    assert (split.stage, split.waves, split.seconds) == (0, 10, 0.001)
    assert split.shares == {
        "compute": 0.5, "activation_wait": 0.2, "admission_wait": 0.1, "preparing": 0.05, "idle": 0.15
    }  # fmt: skip
    assert waves(before, after, 4.0) == Waves(10, 100.0, 250.0)


def test_stage_time_is_unknown_when_the_pipeline_was_formed_anew() -> None:
    before, after = _status(2, (1, 0, 0, 0, 0)), _status(1, (1, 0, 0, 0, 0), formation=2)
    assert stage_splits(before.pipelines[0], after.pipelines[0]) is None


def test_stage_without_a_wave_has_no_shares() -> None:
    status = _status(2, (5, 0, 0, 0, 0))
    (split,) = stage_splits(status.pipelines[0], status.pipelines[0]) or ()
    assert set(split.shares.values()) == {0.0}
    assert waves(status, status, 0.0) == Waves(0, 0.0, 0.0)
