"""Pauses between rounds, and releases that wait for company: only beside running requests, and never for long."""

from __future__ import annotations

import pytest

from tests.harness.fake_pipeline import BLOCK, FakePipeline, tokens
from wavepp_controller.core.config import ControllerConfig
from wavepp_controller.core.events import PauseOver, SendRound, SendWave
from wavepp_proto import limits
from wavepp_proto.errors import InvalidRequest
from wavepp_proto.hashing import HashScope, hash_blocks
from wavepp_proto.terms import Finished, Round

LAG_S = 0.02


def paced(release_lag_ms: int = 0) -> FakePipeline:
    config = ControllerConfig(wave_tokens=64, floor_blocks=0, round_rest=1.0, release_lag_ms=release_lag_ms)
    return FakePipeline(stages=2, config=config)


def rounds(pipeline: FakePipeline) -> list[Round]:
    return [action.round for action in pipeline.of(SendRound) if action.key.stage == 0]


def prepared(pipeline: FakePipeline) -> list[list[str]]:
    """Names by round that prepares."""
    return [[p.key.request_id for p in round_.prepares] for round_ in rounds(pipeline) if round_.prepares]


def run_round(pipeline: FakePipeline, name: str, seconds: float) -> None:
    """A round of `seconds` whose request keeps running: its waves are held."""
    pipeline.hold = {SendRound, SendWave}
    pipeline.submit(name, 40)
    pipeline.now += seconds
    pipeline.release_held(SendRound)


def test_next_round_waits_as_long_as_the_last_one_took_when_a_request_runs() -> None:
    pipeline = paced()
    run_round(pipeline, "a", 0.008)
    pipeline.submit("b", 40)
    pipeline.submit("c", 40)
    assert prepared(pipeline) == [["a"]]
    assert pipeline.machine.wake_at == pytest.approx(pipeline.now + 0.008)
    pipeline.now += 0.008
    pipeline.post(PauseOver(pipeline.now))
    assert prepared(pipeline) == [["a"], ["b", "c"]]
    assert pipeline.machine.wake_at is None


def test_pause_has_a_longest_when_the_round_took_long() -> None:
    pipeline = paced()
    run_round(pipeline, "a", 0.5)
    pipeline.submit("b", 40)
    assert pipeline.machine.wake_at == pytest.approx(pipeline.now + 0.02)


def test_round_begins_at_once_when_nothing_runs() -> None:
    pipeline = paced()
    run_round(pipeline, "a", 0.008)
    pipeline.hold = set()
    pipeline.release_held()
    assert isinstance(pipeline.outcome("a"), Finished)
    pipeline.submit("b", 40)
    assert prepared(pipeline) == [["a"], ["b"]]


def test_round_begins_at_once_when_it_would_be_full() -> None:
    pipeline = paced()
    run_round(pipeline, "a", 0.008)
    for number in range(limits.MAX_ROUND_ENTRIES):
        pipeline.submit(f"b{number}", 20)
    assert [len(names) for names in prepared(pipeline)] == [1, limits.MAX_ROUND_ENTRIES]


def test_revision_does_not_wait_when_rounds_rest() -> None:
    pipeline = paced()
    run_round(pipeline, "a", 0.008)
    pipeline.daemon(0).hits["b"] = 32
    hashes = hash_blocks(HashScope("f1", f"B{BLOCK}"), tokens(40), BLOCK)
    for stage in (0, 1):
        pipeline.digest(stage, hashes)
    pipeline.now += 0.008
    pipeline.submit("b", 40)
    assert pipeline.state("b") == "preparing"
    pipeline.now += 0.008
    pipeline.release_held(SendRound)
    assert [[r.key.request_id for r in round_.revises] for round_ in rounds(pipeline)][-1] == ["b"]


def test_pause_ends_with_a_tick_when_the_shell_only_ticks() -> None:
    pipeline = paced()
    run_round(pipeline, "a", 0.008)
    pipeline.submit("b", 40)
    pipeline.pass_time(0.05)
    assert prepared(pipeline) == [["a"], ["b"]]


def test_releases_ride_the_next_round_when_it_begins_within_the_lag() -> None:
    pipeline = paced(release_lag_ms=20)
    pipeline.submit("a", 40)
    assert isinstance(pipeline.outcome("a"), Finished)
    assert not pipeline.nothing_held()
    pipeline.submit("b", 40, seed=1)
    assert [(len(r.releases), len(r.prepares)) for r in rounds(pipeline)] == [(0, 1), (1, 1)]


def test_releases_leave_alone_when_no_round_came_within_the_lag() -> None:
    pipeline = paced(release_lag_ms=20)
    pipeline.submit("a", 40)
    assert pipeline.machine.wake_at == pytest.approx(pipeline.now + LAG_S)
    pipeline.now += LAG_S
    pipeline.post(PauseOver(pipeline.now))
    assert pipeline.nothing_held()
    assert pipeline.counter("rounds_release_only") == 1
    assert pipeline.machine.wake_at is None


def test_releases_leave_at_once_when_somebody_waits_for_room() -> None:
    pipeline = paced(release_lag_ms=1000)
    run_round(pipeline, "a", 0.008)
    for daemon in pipeline.daemons.values():
        daemon.short["b"] = 3
    pipeline.now += 0.02
    pipeline.hold = {SendWave}
    pipeline.submit("b", 40)
    assert pipeline.state("b") == "waiting"
    pipeline.release_held(SendWave)
    assert isinstance(pipeline.outcome("a"), Finished)
    assert "a" in [release.key.request_id for round_ in rounds(pipeline) for release in round_.releases]


@pytest.mark.parametrize("settings", [{"round_rest": -0.1}, {"round_rest": 11.0}, {"release_lag_ms": -1}])
def test_pause_is_refused_when_nobody_can_mean_it(settings: dict[str, float]) -> None:
    with pytest.raises(InvalidRequest):
        ControllerConfig(**settings)  # type: ignore[arg-type]
