"""Where a request's time goes: phases that add up, and spans that name what happened."""

from __future__ import annotations

import pytest

from tests.harness.fake_pipeline import FakePipeline
from wavepp_controller.core import phases
from wavepp_controller.core.config import ControllerConfig
from wavepp_controller.core.events import AnnounceRequest, HashPrompt, SendRound, SendWave, Span
from wavepp_proto.runtime import span_names
from wavepp_proto.terms import Finished


def spans(pipeline: FakePipeline, name: str) -> list[Span]:
    return [span for span in pipeline.of(Span) if span.request_id == name]


def told(span: Span) -> dict[str, str | int | float | bool]:
    return dict(span.attributes)


def slow_request() -> FakePipeline:
    """`a` takes 0.1 s to hash, 0.2 to announce, 0.3 for a round, waits 0.1 for room, 0.3 again, 0.5 to run."""
    pipeline = FakePipeline(config=ControllerConfig(wave_tokens=64))
    pipeline.daemon(1).short["a"] = 5
    pipeline.hold = {HashPrompt, AnnounceRequest, SendRound, SendWave}
    pipeline.submit("a", 40)
    for kind, seconds in ((HashPrompt, 0.1), (AnnounceRequest, 0.2), (SendRound, 0.3)):
        pipeline.pass_time(seconds)
        pipeline.release_held(kind)
    pipeline.daemon(1).short.clear()
    pipeline.release_held(SendRound)  # the releases
    while pipeline.state("a") == "waiting":
        pipeline.pass_time(0.05)
    pipeline.pass_time(0.3)
    pipeline.release_held(SendRound)
    pipeline.pass_time(0.5)
    pipeline.hold = set()
    pipeline.release_held()
    return pipeline


def test_phases_add_up_to_the_admission_when_each_takes_its_time() -> None:
    finished = slow_request().outcome("a")
    assert isinstance(finished, Finished)
    times = finished.timings
    assert times.hash_ms == pytest.approx(100)
    assert times.announce_ms == pytest.approx(200)
    assert times.rounds_ms == pytest.approx(600)
    assert times.capacity_wait_ms == pytest.approx(100, abs=51)
    assert times.prefill_ms == pytest.approx(500)
    parts = times.queue_ms + times.hash_ms + times.announce_ms + times.rounds_ms + times.capacity_wait_ms
    assert times.admission_ms == pytest.approx(parts)


def test_spans_come_children_first_when_a_request_is_admitted() -> None:
    found = spans(slow_request(), "a")
    names = [span.name for span in found if span.name != "hint"]
    rounds = ["vote", "vote", "pin_reserve"]
    assert names == ["hash", "announce", *rounds, "capacity_wait", *rounds, "admission", "finish"]
    for span in found:
        expected = {"vote": "pin_reserve", "admission": "", "schedule": "", "finish": ""}.get(span.name, "admission")
        assert span.parent == expected
    admission = next(span for span in found if span.name == "admission")
    assert told(admission)["wavepp.wait_reason"] == "no capacity on stage 1"
    assert all(admission.start <= span.start <= span.end <= admission.end for span in found if span.name != "finish")
    votes = [told(span)["wavepp.outcome"] for span in found if span.name == "vote"]
    assert votes == ["committed", "no_capacity", "committed", "committed"]


def test_admission_names_what_agreement_cost_when_stages_differ() -> None:
    pipeline = FakePipeline()
    for stage, hit in ((0, 96), (1, 32)):
        pipeline.daemon(stage).hits["a"] = hit
    pipeline.submit("a", 100)  # no digest: the hint is 0, and so is the endpoint
    (admission,) = [span for span in spans(pipeline, "a") if span.name == "admission"]
    attributes = told(admission)
    assert attributes["wavepp.limiting_stage"] == 1
    assert attributes["wavepp.tokens_lost_to_agreement"] == 96
    assert (attributes["wavepp.endpoint"], attributes["wavepp.rounds"]) == (0, 1)


def test_finish_names_the_reason_when_a_request_fails_before_it_is_admitted() -> None:
    pipeline = FakePipeline()
    pipeline.hold = {SendRound}
    pipeline.submit("a", 40)
    pipeline.pass_time(0.1)
    pipeline.cancel("a")
    found = spans(pipeline, "a")
    assert [span.name for span in found] == ["hint", "admission", "finish"]
    assert {told(span)["wavepp.outcome"] for span in found[1:]} == {"CANCELLED"}


def test_span_memory_is_bounded_when_a_request_waits_long_for_room() -> None:
    pipeline = FakePipeline()
    pipeline.daemon(1).short["a"] = 5
    pipeline.submit("a", 40, deadline_ms=60_000)
    pipeline.pass_time(60.1)
    assert pipeline.reason("a") == "DEADLINE_EXPIRED"
    assert len(spans(pipeline, "a")) == phases.MAX_SPANS + 2
    assert pipeline.counter("no_capacity") > 500


def test_names_equal_the_vocabulary_of_traces() -> None:
    assert phases.LOST_TO_AGREEMENT == span_names.TOKENS_LOST_TO_AGREEMENT
    shared = [name for name in vars(phases) if name.isupper() and hasattr(span_names, name)]
    assert {"ADMISSION", "QUEUE", "HASH", "HINT", "PIN_RESERVE", "VOTE", "STAGE", "OUTCOME"} <= set(shared)
    assert {name: getattr(phases, name) for name in shared} == {name: getattr(span_names, name) for name in shared}
