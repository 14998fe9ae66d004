"""What the observers of controller and stage make of single events."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from tests.harness.fake_exporter import FakeExporter, tracer_into
from tests.harness.fake_pipeline import FakePipeline
from wavepp_controller.core.events import Emit, EndFormation, Span
from wavepp_controller.runtime import observability as controller_side
from wavepp_controller.runtime.observability import Observer
from wavepp_controller.runtime.request_spans import RequestSpans
from wavepp_proto import errors
from wavepp_proto.runtime import span_names
from wavepp_proto.runtime.tracing import Tracer, TraceSettings
from wavepp_proto.terms import (
    DaemonKey,
    Failed,
    Formation,
    Incarnation,
    PipelineId,
    Queued,
    RequestId,
    StageIndex,
    StageTimes,
    WaveOrdinal,
)
from wavepp_stage.core.machine import StageMachine
from wavepp_stage.runtime import observability as stage_side
from wavepp_stage.runtime.copier import CopyCounts
from wavepp_stage.runtime.core_shell import CoreShell
from wavepp_stage.runtime.running_formation import Report

Line = tuple[str, str, dict[str, object]]
P0 = PipelineId("p0")


class HeardLog:
    """Stands in for a module's log and keeps what it was told."""

    def __init__(self) -> None:
        self.lines: list[Line] = []

    def info(self, event: str, /, **fields: object) -> None:
        self.lines.append(("info", event, fields))

    def warning(self, event: str, /, **fields: object) -> None:
        self.lines.append(("warning", event, fields))


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> HeardLog:
    heard = HeardLog()
    monkeypatch.setattr(controller_side, "log", heard)
    return heard


def silent_tracer() -> Tracer:
    return Tracer(TraceSettings("wavepp-test"))


def observer() -> Observer:
    return Observer(FakePipeline().machine, silent_tracer())


def failure(error: errors.WaveppError, request: str = "a") -> Emit:
    return Emit(Failed(RequestId(request), error.info()))


# --- logs of a controller -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (errors.Cancelled("gone"), "info"),
        (errors.DeadlineExpired("late"), "info"),
        (errors.QueueFull("full"), "info"),
        (errors.StageLost("died", stage=1), "warning"),
        (errors.RowVoided("bad row", stage=2, wave=7, cause="ROW_VOIDED"), "warning"),
        (errors.InternalError("a bug"), "warning"),
    ],
    ids=lambda given: given.reason if isinstance(given, errors.WaveppError) else "",
)
def test_level_says_whose_doing_it_is_when_a_request_fails(
    heard: HeardLog, error: errors.WaveppError, level: str
) -> None:
    watching = observer()
    watching.formation_begun(P0, Formation(4))
    watching.emitted(Emit(Queued(RequestId("a"), P0, 0)))
    watching.emitted(failure(error))
    told = {**error.fields, "request_id": "a", "pipeline": "p0", "formation": 4, "reason": error.reason}
    assert heard.lines == [(level, "request failed", told)]


def test_value_and_message_are_not_told_when_a_prompt_is_refused(heard: HeardLog) -> None:
    error = errors.TokenOutOfRange("token 4711 at index 3", field="token_ids", index=3, value=4711, limit=1000)
    observer().emitted(failure(error))
    told = {"request_id": "a", "reason": "TOKEN_OUT_OF_RANGE", "field": "token_ids", "limit": "1000"}
    assert heard.lines == [("info", "request refused", told)]


@pytest.mark.parametrize(
    ("cause", "level"),
    [
        (errors.FormationEnded("an operator asked", pipeline="p0"), "info"),
        (errors.FormationEnded("stage 1 failed wave 3", stage=1, wave=3, cause="ENGINE_FAULT"), "warning"),
        (errors.FormationEnded("no wave ended", field="wave_timeout_ms", limit=100), "warning"),
        (errors.StageLost("silent for 1.30 s", stage=1), "warning"),
    ],
    ids=["asked", "failed wave", "time-out", "stage lost"],
)
def test_level_says_whether_it_was_wanted_when_a_formation_ends(
    heard: HeardLog, cause: errors.WaveppError, level: str
) -> None:
    observer().formation_ended(EndFormation(P0, Formation(2), (), cause.info()))
    ((found, event, told),) = heard.lines
    assert (found, event) == (level, "formation ended")
    assert (told["pipeline"], told["formation"], told["reason"]) == ("p0", 2, cause.reason)
    assert told["error"] == cause.message


# --- spans of a controller ----------------------------------------------------------------------


@pytest.mark.parametrize("stages", [2, 4, 5])  # with 4 and 5 the limit falls inside a round
def test_no_span_is_an_orphan_when_a_request_waits_past_the_limit_of_spans(stages: int) -> None:
    pipeline, exporter = FakePipeline(stages), FakeExporter()
    pipeline.daemon(0).short["a"] = 5
    pipeline.submit("a", 40, deadline_ms=60_000)
    pipeline.pass_time(60.1)
    tracer = tracer_into(exporter)
    spans = RequestSpans(tracer)
    sent = tracer.root()
    spans.began(RequestId("a"), sent, 40)
    for span in pipeline.of(Span):
        spans.record(span)
    spans.ended(Failed(RequestId("a"), errors.DeadlineExpired("late").info()))
    tracer.close()
    ids = {span.context.span_id for span in exporter.spans if span.context is not None}
    assert len(ids) == len(exporter.spans) > 200
    parents = {
        span.parent.span_id for span in exporter.spans if span.parent is not None and span.name != "prefill.request"
    }
    assert parents <= ids
    assert sum(span.name == span_names.PIN_RESERVE for span in exporter.spans) > 30


# --- a stage ------------------------------------------------------------------------------------


def stage_observer() -> stage_side.Observer:
    core = CoreShell(StageMachine(Incarnation(1)), lambda: None)
    return stage_side.Observer(core, CopyCounts(), silent_tracer(), DaemonKey(P0, StageIndex(0)), lambda: False)


def test_heartbeat_takes_the_worst_delay_since_the_last_one() -> None:
    watching = stage_observer()
    for delay_s in (0.0001, 0.0042, 0.0003):
        watching.loop_delayed(delay_s)
    assert [watching.take_loop_delay_us() for _ in range(2)] == [4200, 0]


def test_failed_wave_is_counted_with_its_time_when_a_report_has_no_work() -> None:
    watching = stage_observer()
    fault = errors.EngineFault("boom").info()
    watching.fenced()
    watching.judged(True)
    for idle_us in (250_000, 500_000):
        times = StageTimes(idle_us=idle_us)
        watching.reported(Report(1, WaveOrdinal(3), None, None, times, 0, 0, fault))
    figures, _ = watching._read()
    assert figures is not None
    values = {(m.name, tuple(s.labels.values())): s.value for m in figures.families("x") for s in m.samples}
    assert values["x_waves", ("failed",)] == 2
    assert values["x_time_seconds", ("idle",)] == 0.75
    assert values["x_computed_tokens", ()] == 0
    assert values["x_self_fences", ()] == 1
    assert values["x_refused", ()] == 1
    assert values["x_copied_blocks", ("onboard",)] == 0


def test_abandoned_links_are_asked_for_only_when_torch_links_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, stage_side.GLOO_LINK, None)
    assert stage_side._abandoned_links() == 0
    monkeypatch.setitem(sys.modules, stage_side.GLOO_LINK, SimpleNamespace(abandoned_threads=lambda: 3))
    assert stage_side._abandoned_links() == 3
