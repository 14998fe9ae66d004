"""A stage is timed by what it has: from when its input came, against what was learnt of it, and named when it hangs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.fake_pipeline import FakePipeline, record
from wavepp_controller.core.config import ControllerConfig
from wavepp_controller.core.events import EndFormation, MemberUp, SendWave
from wavepp_controller.core.latency_model import LatencyModel
from wavepp_controller.core.ring import Flight, Ring
from wavepp_controller.core.wave_watch import WaveWatch
from wavepp_proto.errors import ENGINE_HUNG, InvalidRequest
from wavepp_proto.terms import Attempt, Failed, Finished, HoldKey, RequestId, Row, StageTimes, WaveOrdinal

WAVE_S = 18.0


def held_waves(pipeline: FakePipeline) -> list[SendWave]:
    return [action for action in pipeline.held if isinstance(action, SendWave)]


def running(stages: int = 2, prompt: int = 40, **config: Any) -> FakePipeline:
    """Request `a` is admitted, and its waves lie with the stages."""
    pipeline = FakePipeline(stages, config=ControllerConfig(wave_tokens=64, floor_blocks=0, **config))
    pipeline.hold = {SendWave}
    pipeline.submit("a", prompt, deadline_ms=3_600_000)
    assert held_waves(pipeline)
    return pipeline


def execute(pipeline: FakePipeline, stage: int, wave: SendWave, seconds: float) -> None:
    pipeline.executing[stage] = (wave.ordinal, pipeline.now)
    pipeline.pass_time(seconds)
    del pipeline.executing[stage]
    pipeline.report_wave(wave, stage)


def test_formation_goes_on_when_filling_the_pipeline_takes_longer_than_any_limit() -> None:
    """Four stages of 18 s each: 72 s pass before the last one reports, and no stage was slow."""
    pipeline = running(4)
    (wave,) = held_waves(pipeline)
    for stage in range(4):
        execute(pipeline, stage, wave, WAVE_S)
    assert isinstance(pipeline.outcome("a"), Finished)
    assert pipeline.of(EndFormation) == []


def test_formation_goes_on_when_waves_queue_behind_slow_ones() -> None:
    """The second stage has four waves at once and takes 18 s for each: the last one waits for 54 s."""
    pipeline = running(2, prompt=4 * 64)
    waves = held_waves(pipeline)
    assert len(waves) == 4
    for wave in waves:
        execute(pipeline, 0, wave, 0.1)
    for wave in waves:
        execute(pipeline, 1, wave, WAVE_S)
    assert isinstance(pipeline.outcome("a"), Finished)
    assert pipeline.of(EndFormation) == []


def test_stage_is_named_and_asked_to_leave_when_its_engine_hangs() -> None:
    pipeline = running(2, first_wave_ms=4000)
    (wave,) = held_waves(pipeline)
    execute(pipeline, 0, wave, 0.1)
    pipeline.executing[1] = (wave.ordinal, pipeline.now)
    pipeline.pass_time(4.0)  # what the operator allows, and no more
    assert pipeline.of(EndFormation) == []
    assert pipeline.machine.ready
    pipeline.pass_time(0.1)
    outcome = pipeline.outcome("a")
    assert isinstance(outcome, Failed)
    told = dict(outcome.error.fields)
    assert outcome.error.reason == "STAGE_LOST"
    assert {name: told[name] for name in ("stage", "rank", "wave", "limit", "cause")} == {
        "stage": "1", "rank": "0", "wave": "1", "limit": "4000", "cause": ENGINE_HUNG,
    }  # fmt: skip
    (ended,) = pipeline.of(EndFormation)
    assert [key.stage for key, _ in ended.targets] == [0, 1]  # it is told, for it must leave

    # until it is somebody new, nobody is asked to join, and nothing is ready
    pipeline.pass_time(5.0)
    (status,) = pipeline.machine.status().pipelines
    assert [key.stage for key in status.missing] == [1]
    assert (status.ready, pipeline.machine.ready, pipeline.counter("stages_hung")) == (False, False, 1)
    pipeline.executing.clear()
    pipeline.post(MemberUp(record(1, incarnation=2), pipeline.now))
    (status,) = pipeline.machine.status().pipelines
    assert (status.state, status.ready, pipeline.machine.ready) == ("serving", True, True)


def test_wave_carries_the_longest_limit_of_any_stage() -> None:
    """A daemon judges its own engine by it when the formation ends for another reason, or the controller is gone."""
    pipeline = FakePipeline(start=False)
    pipeline.made = {0: {"wave_allowance_ms": 200}, 1: {"wave_allowance_ms": 300}}
    pipeline.start()
    pipeline.hold = {SendWave}
    pipeline.submit("a", 40)
    (wave,) = held_waves(pipeline)
    assert wave.limit_ms == 5300


def test_status_tells_what_a_stage_computes_and_for_how_long() -> None:
    pipeline = running()
    pipeline.executing[0] = (1, pipeline.now)
    pipeline.pass_time(2.0)
    first, second = pipeline.machine.status().pipelines[0].daemons
    assert (first.executing_wave, first.executing_ms) == (1, 2000)
    assert (second.executing_wave, second.executing_ms) == (None, 0)


def test_stage_that_does_not_begin_is_named_when_its_input_is_there() -> None:
    pipeline = running(2, wave_timeout_ms=3000)
    (wave,) = held_waves(pipeline)
    execute(pipeline, 0, wave, 2.5)  # in which the second stage waits for its input, as it should
    pipeline.pass_time(3.0)
    assert pipeline.of(EndFormation) == []
    pipeline.pass_time(0.15)
    outcome = pipeline.outcome("a")
    assert isinstance(outcome, Failed)
    told = dict(outcome.error.fields)
    assert (outcome.error.reason, told["stage"], told["wave"], told["field"]) == (
        "FORMATION_ENDED", "1", "1", "wave_timeout_ms",
    )  # fmt: skip


def watch_of(seconds: float, waves: int, **config: Any) -> tuple[WaveWatch, FakePipeline, Flight]:
    """A watch that has learnt `waves` waves of `seconds` each on stage 0, and one more of the same."""
    pipeline = FakePipeline()
    key = pipeline.daemon(0).plan.key
    row = Row(HoldKey(RequestId("a"), Attempt(1)), 0, 64, final=True)
    model = LatencyModel()
    for _ in range(waves):
        model.observe(key, (row,), 0, StageTimes(compute_us=round(seconds * 1e6)))
    watch = WaveWatch(Ring(4, [key]), model, ControllerConfig(**config))
    return watch, pipeline, Flight(WaveOrdinal(1), (row,), {key})


@pytest.mark.parametrize(
    ("seconds", "waves", "done", "config", "limit_s"),
    [
        (0.1, 8, 1, {}, 5.1),  # learnt: the least slack is 5 s
        (3.0, 8, 1, {}, 15.0),  # four times the prediction
        (18.0, 8, 1, {}, 78.0),  # at most a minute
        (0.1, 8, 1, {"hang_ms": 2000}, 2.1),
        (0.1, 7, 1, {}, 120.0 + 60.0),  # too little is known: what the engine allows, by default two minutes
        (0.1, 8, 0, {}, 120.0 + 60.0),  # the first wave of a formation may compile
        (0.1, 8, 0, {"first_wave_ms": 4000}, 4.0),  # the operator's own figure has no slack
        (0.1, 0, 0, {"first_wave_ms": 4000}, 4.0),
        (9.0, 8, 0, {"first_wave_ms": 4000}, 45.0),  # never below what is known
        (0.1, 8, 1, {"silence_ms": 10_000}, 20.1),  # one that is stopped for less than the silence does not hang
    ],
)
def test_limit_follows_what_was_learnt(
    seconds: float, waves: int, done: int, config: dict[str, Any], limit_s: float
) -> None:
    watch, pipeline, flight = watch_of(seconds, waves, **config)
    formation = pipeline.machine.pipelines[record(0).key.pipeline].forming.present
    assert formation is not None
    daemon = formation.daemons[record(0).key]
    daemon.waves_done = done
    assert watch.limit_s(daemon, flight) == pytest.approx(limit_s, rel=1e-3)


def test_engine_s_own_allowance_counts_while_nothing_is_known() -> None:
    pipeline = FakePipeline(start=False)
    pipeline.made = {0: {"wave_allowance_ms": 200}}
    pipeline.start()
    formation = pipeline.machine.pipelines[record(0).key.pipeline].forming.present
    assert formation is not None
    watch, _, flight = watch_of(0.1, 0)
    assert watch.limit_s(formation.daemons[record(0).key], flight) == pytest.approx(5.2)


@pytest.mark.parametrize("name", ["hang_ms", "first_wave_ms"])
def test_hang_shorter_than_silence_is_refused_by_name(name: str) -> None:
    too_short: dict[str, Any] = {name: 1250}
    with pytest.raises(InvalidRequest) as refused:
        ControllerConfig(**too_short)
    assert (refused.value.fields["field"], refused.value.fields["limit"]) == (name, "1250")


def test_controller_is_ready_only_while_some_pipeline_can_serve() -> None:
    pipeline = FakePipeline(start=False)
    found = [pipeline.machine.ready]
    pipeline.start()
    found.append(pipeline.machine.ready)
    pipeline.lose(1)
    found.append(pipeline.machine.ready)
    assert found == [False, True, False]
    assert pipeline.machine.ready_pipelines() == {record(0).key.pipeline: False}
