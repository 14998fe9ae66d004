"""A lost link is a symptom: the dead neighbour behind it is named if it shows in time."""

from __future__ import annotations

from dataclasses import replace

from tests.harness.fake_pipeline import FakePipeline, fault
from tests.harness.flaky_pipeline import FlakyPipeline
from wavepp_controller.core.events import EndFormation, ReopenStreams, ReportArrived, SendWave
from wavepp_proto.terms import Failed, Finished, StageTimes, WaveReport


def _running() -> FlakyPipeline:
    pipeline = FlakyPipeline(stages=3)
    pipeline.hold = {SendWave}
    pipeline.submit("a", 40)
    assert pipeline.state("a") == "running"
    return pipeline


def _report(pipeline: FakePipeline, stage: int, reason: str, **fields: str) -> None:
    daemon = pipeline.daemon(stage)
    cause = replace(fault(reason), fields=tuple(fields.items()))
    report = WaveReport(daemon.fence(1), False, 0, b"", StageTimes(), error=cause)
    pipeline.post(ReportArrived(daemon.plan.key, report, pipeline.now))


def _fields(pipeline: FakePipeline) -> dict[str, str]:
    outcome = pipeline.outcome("a")
    assert isinstance(outcome, Failed)
    return dict(outcome.error.fields)


def test_the_dead_stage_is_named_when_its_neighbour_reports_the_lost_link_first() -> None:
    pipeline = _running()
    _report(pipeline, 1, "LINK_FAULT")
    pipeline.pass_time(0.2)
    assert pipeline.state("a") == "running"
    pipeline.lose(2)
    assert pipeline.reason("a") == "STAGE_LOST"
    assert _fields(pipeline)["stage"] == "2"


def test_the_dead_stage_is_named_at_once_when_its_streams_break_after_the_lost_link() -> None:
    pipeline = _running()
    _report(pipeline, 1, "LINK_FAULT")
    pipeline.cut(2)  # in itself no reason to give it up
    assert pipeline.of(ReopenStreams) == []
    assert (pipeline.reason("a"), _fields(pipeline)["stage"]) == ("STAGE_LOST", "2")


def test_the_unreachable_stage_is_named_when_its_streams_broke_before_the_lost_link() -> None:
    pipeline = _running()
    pipeline.hold |= {ReopenStreams}
    pipeline.cut(2)
    _report(pipeline, 1, "LINK_FAULT")
    assert pipeline.state("a") == "running"
    pipeline.pass_time(0.3)
    assert (pipeline.reason("a"), _fields(pipeline)["stage"]) == ("STAGE_LOST", "2")


def test_the_formation_ends_for_the_link_when_nobody_died() -> None:
    pipeline = _running()
    _report(pipeline, 1, "LINK_FAULT")
    _report(pipeline, 2, "LINK_FAULT")
    pipeline.pass_time(0.3)
    assert pipeline.reason("a") == "FORMATION_ENDED"
    assert _fields(pipeline)["stage"] == "1"
    assert len(pipeline.of(EndFormation)) == 1
    pipeline.hold, pipeline.held = set(), []
    pipeline.pass_time(1.0)
    pipeline.submit("b", 40)
    assert isinstance(pipeline.outcome("b"), Finished)


def test_the_formation_ends_at_once_when_an_engine_failed() -> None:
    pipeline = _running()
    _report(pipeline, 1, "LINK_FAULT")
    _report(pipeline, 0, "ENGINE_FAULT")
    assert pipeline.reason("a") == "FORMATION_ENDED"
    assert _fields(pipeline)["stage"] == "0"


def test_the_formation_ends_at_once_when_a_payload_was_refused() -> None:
    """Its sender lives: there is no dead neighbour to look for, whatever was reported of the link before."""
    pipeline = _running()
    _report(pipeline, 0, "LINK_FAULT")
    assert pipeline.state("a") == "running"
    _report(pipeline, 1, "LINK_FAULT", refused_stage="0")
    assert (pipeline.reason("a"), _fields(pipeline)["stage"]) == ("FORMATION_ENDED", "1")
