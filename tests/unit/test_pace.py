"""The rate of work, and the verdict on deadlines that the predicted start misses."""

from __future__ import annotations

import pytest

from tests.harness.fake_pipeline import FakePipeline
from wavepp_controller.core.events import SendWave
from wavepp_controller.core.pace import Pace
from wavepp_proto.terms import Failed, Finished


def test_no_rate_is_known_when_there_was_too_little_work() -> None:
    pace = Pace()
    assert pace.seconds_for(1) is None
    for _ in range(3):
        pace.worked(500, 0.1)
    pace.worked(500, 0.1)
    assert pace.seconds_for(1000) is None
    pace.worked(500, 0.1)
    assert pace.seconds_for(10_000) == pytest.approx(2.0)


def test_no_rate_is_known_when_one_small_wave_was_held_up() -> None:
    pace = Pace()
    for seconds in (0.001, 0.6, 0.001):
        pace.worked(30, seconds)
    assert pace.seconds_for(2000) is None


def test_rate_of_waves_longer_than_what_counts_is_known() -> None:
    pace = Pace()
    for _ in range(6):
        pace.worked(1000, 4.0)
    assert pace.seconds_for(1000) == pytest.approx(4.0)


def test_only_the_last_seconds_of_work_count() -> None:
    pace = Pace()
    for _ in range(100):
        pace.worked(100, 1.0)
    for _ in range(5):
        pace.worked(1000, 1.0)
    assert pace.seconds_for(1000) == pytest.approx(1.0)


def test_no_rate_is_known_when_every_row_was_void() -> None:
    pace = Pace()
    pace.worked(0, 1.0)
    assert pace.seconds_for(10) is None


def busy(pipeline: FakePipeline) -> None:
    """640 tokens a second, measured over one second; then four waves in flight of a prompt with 1024 left."""
    pipeline.hold = {SendWave}
    pipeline.submit("measured", 640, seed=1)
    while pipeline.held:
        pipeline.pass_time(0.1)
        wave, *rest = pipeline.held
        pipeline.held = [wave]
        pipeline.release_held()
        pipeline.held = rest + pipeline.held
    pipeline.submit("long", 1024, seed=2)


def test_request_is_refused_when_it_would_start_after_its_deadline() -> None:
    pipeline = FakePipeline()
    busy(pipeline)
    pipeline.submit("late", 20, seed=3, deadline_ms=1500)
    outcome = pipeline.outcome("late")
    assert isinstance(outcome, Failed)
    assert outcome.error.reason == "TOO_LATE"
    assert dict(outcome.error.fields) == {"field": "deadline_ms", "value": "1600", "limit": "1500"}
    pipeline.submit("in time", 20, seed=3, deadline_ms=1700)
    pipeline.submit("behind it", 64, seed=4, deadline_ms=1620)  # 20 tokens more
    assert pipeline.reason("behind it") == "TOO_LATE"
    pipeline.hold = set()
    pipeline.release_held()
    assert isinstance(pipeline.outcome("in time"), Finished)
    assert pipeline.nothing_held()


def test_urgent_request_is_not_refused_for_work_that_it_overtakes() -> None:
    pipeline = FakePipeline()
    busy(pipeline)
    pipeline.submit("urgent", 20, seed=3, deadline_ms=1500, priority=1)
    assert pipeline.state("urgent") == "admitted"
    pipeline.hold = set()
    pipeline.release_held()
    assert isinstance(pipeline.outcome("urgent"), Finished)


def test_nobody_is_refused_when_no_rate_is_known() -> None:
    pipeline = FakePipeline()
    pipeline.hold = {SendWave}
    pipeline.submit("long", 10_000, seed=1)
    pipeline.submit("a", 20, seed=2, deadline_ms=100)
    assert pipeline.state("a") == "admitted"
    pipeline.hold = set()
    pipeline.release_held()
    assert isinstance(pipeline.outcome("a"), Finished)


def test_nobody_is_refused_for_what_lone_waves_took() -> None:
    """One wave at a time goes through all stages: that is how long a wave takes, not how much work gets done."""
    pipeline = FakePipeline()
    pipeline.hold = {SendWave}
    for number in range(8):
        pipeline.submit(f"alone {number}", 64, seed=number)
        pipeline.pass_time(0.5)
        pipeline.release_held()
    pipeline.submit("long", 1024, seed=20)
    pipeline.submit("short of time", 20, seed=21, deadline_ms=1500)
    assert pipeline.state("short of time") == "admitted"
    pipeline.hold = set()
    pipeline.release_held()
    assert isinstance(pipeline.outcome("short of time"), Finished)
    assert pipeline.nothing_held()
