"""Verdicts at the door: typed, at once, counted, and nothing held or queued afterwards."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.harness.fake_pipeline import BLOCK, VOCABULARY, WINDOW, FakePipeline, record, request
from wavepp_controller.core.config import ControllerConfig
from wavepp_controller.core.events import (
    Action,
    DrainAsked,
    Emit,
    LeadershipLost,
    LeadershipWon,
    MemberUp,
    RefuseSubmit,
    SendWave,
    Submit,
)
from wavepp_controller.core.machine import ControllerMachine
from wavepp_proto import limits
from wavepp_proto.errors import InvalidRequest
from wavepp_proto.terms import Epoch, ErrorInfo, Failed, Finished, PipelineId, Queued, RequestId, Sampling


def refused(pipeline: FakePipeline, /, name: str = "a", count: int = 20, **fields: Any) -> ErrorInfo:
    """The error of a request that must be refused with nothing left behind."""
    before = pipeline.counter("rejected")
    pipeline.log.clear()
    pipeline.submit(name, count, **fields)
    (action,) = pipeline.log
    assert isinstance(action, Emit)
    assert isinstance(action.event, Failed)
    assert pipeline.machine.live_requests == 0
    assert pipeline.counter("rejected") == before + 1
    assert pipeline.counter(f"rejected.{action.event.error.reason}") >= 1
    return action.event.error


def fields_of(error: ErrorInfo) -> dict[str, str]:
    return dict(error.fields)


def test_empty_prompt_is_refused() -> None:
    error = refused(FakePipeline(), count=0)
    assert error.reason == "EMPTY_PROMPT"


@pytest.mark.parametrize(("value", "index"), [(VOCABULARY, 3), (-1, 0), (2**31 - 1, 19)])
def test_first_bad_token_is_named_when_it_is_outside_the_vocabulary(value: int, index: int) -> None:
    ids = np.zeros(20, dtype="<i4")
    ids[index] = value
    if index == 3:
        ids[10] = -5
    error = refused(FakePipeline(), token_ids=ids.tobytes())
    assert error.reason == "TOKEN_OUT_OF_RANGE"
    named = {"field": "token_ids", "index": str(index), "value": str(value), "limit": str(VOCABULARY)}
    assert fields_of(error) == named


@pytest.mark.parametrize("count", [WINDOW - 1, WINDOW])
def test_prompt_is_accepted_when_it_is_within_the_window(count: int) -> None:
    pipeline = FakePipeline(config=ControllerConfig(wave_tokens=16_384))
    pipeline.submit("a", count)
    assert isinstance(pipeline.outcome("a"), Finished)


def test_prompt_is_refused_when_it_is_one_token_longer_than_the_window() -> None:
    error = refused(FakePipeline(), count=WINDOW + 1)
    assert error.reason == "PROMPT_TOO_LONG"
    assert fields_of(error) == {"field": "token_ids", "value": str(WINDOW + 1), "limit": str(WINDOW)}


def small_pool() -> FakePipeline:
    """Pools of 200 and 49 blocks, one of each out of bounds but for an oversized request."""
    pipeline = FakePipeline(config=ControllerConfig(wave_tokens=64, floor_blocks=1), start=False)
    pipeline.post(LeadershipWon(Epoch(1), pipeline.now))
    pipeline.post(MemberUp(record(0, pool_blocks=200), pipeline.now))
    pipeline.post(MemberUp(record(1, pool_blocks=49), pipeline.now))
    return pipeline


def test_prompt_never_fits_when_it_needs_more_than_the_smallest_pool() -> None:
    """Field bug 33: refused at once, and what fits behind it is served."""
    pipeline = small_pool()
    error = refused(pipeline, count=49 * BLOCK + 1)
    assert error.reason == "NEVER_FITS"
    named = {"field": "token_ids", "value": "50", "limit": "49", "stage": "1", "block_tokens": "16"}
    assert fields_of(error) == named
    pipeline.submit("b", 49 * BLOCK)
    assert isinstance(pipeline.outcome("b"), Finished)
    pipeline.submit("c", 1)
    assert isinstance(pipeline.outcome("c"), Finished)


@pytest.mark.parametrize(("blocks", "served"), [(512, True), (8, False)])
def test_next_formation_judges_what_fits_when_the_last_one_is_over(blocks: int, served: bool) -> None:
    pipeline = FakePipeline(start=False)
    pipeline.members = [record(0), record(1, pool_blocks=8)]
    pipeline.start()
    pipeline.lose(1)
    pipeline.submit("a", 9 * BLOCK)
    pipeline.submit("adapted", 1, adapter="none of these engines applies it")
    assert [event for event in pipeline.events if isinstance(event, Failed)] == []
    pipeline.post(MemberUp(record(1, incarnation=2, pool_blocks=blocks), pipeline.now))
    pipeline.pass_time(1.0)
    outcome = pipeline.outcome("a")
    if served:
        assert isinstance(outcome, Finished)
    else:
        assert isinstance(outcome, Failed)
        assert (outcome.error.reason, fields_of(outcome.error)["limit"]) == ("NEVER_FITS", "8")
    assert pipeline.reason("adapted") == "INVALID_REQUEST"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"deadline_ms": 0}, "deadline_ms"),
        ({"deadline_ms": -5}, "deadline_ms"),
        ({"deadline_ms": limits.MAX_DEADLINE_MS + 1}, "deadline_ms"),
        ({"priority": 10}, "priority"),
        ({"priority": -10}, "priority"),
        ({"request_id": RequestId("")}, "request_id"),
        ({"request_id": RequestId("a\nb")}, "request_id"),
        ({"request_id": RequestId("x" * (limits.MAX_REQUEST_ID_CHARS + 1))}, "request_id"),
        ({"cache_salt": "x" * (limits.MAX_NAME_CHARS + 1)}, "cache_salt"),
        ({"adapter": "x" * (limits.MAX_NAME_CHARS + 1)}, "adapter"),
        ({"pipeline": PipelineId("x" * (limits.MAX_NAME_CHARS + 1))}, "pipeline"),
        ({"sampling": Sampling(top_logprobs=limits.MAX_TOP_LOGPROBS + 1)}, "top_logprobs"),
        ({"sampling": Sampling(top_logprobs=-1)}, "top_logprobs"),
        ({"sampling": Sampling(temperature=-0.1)}, "temperature"),
        ({"sampling": Sampling(temperature=math.nan)}, "temperature"),
        ({"sampling": Sampling(temperature=math.inf)}, "temperature"),
        ({"token_ids": b"\0" * 7}, "token_ids"),
    ],
)
def test_field_is_named_when_it_breaks_its_rule(fields: dict[str, Any], field: str) -> None:
    error = refused(FakePipeline(), **fields)
    assert error.reason == "INVALID_REQUEST"
    assert fields_of(error)["field"] == field


def test_full_logits_are_refused_when_a_row_would_not_fit_one_message() -> None:
    pipeline = FakePipeline(start=False)
    pipeline.post(LeadershipWon(Epoch(1), pipeline.now))
    huge = replace(record(0).model, vocabulary=limits.MAX_VOCABULARY + 1)
    for stage in (0, 1):
        pipeline.post(MemberUp(record(stage, model=huge), pipeline.now))
    error = refused(pipeline, sampling=Sampling(full_logits=True))
    assert fields_of(error)["field"] == "full_logits"


def test_unknown_pipeline_is_refused() -> None:
    error = refused(FakePipeline(), pipeline=PipelineId("q"))
    assert error.reason == "UNKNOWN_PIPELINE"


def test_request_is_refused_when_no_stage_ever_registered() -> None:
    pipeline = FakePipeline(start=False)
    pipeline.post(LeadershipWon(Epoch(1), pipeline.now))
    assert refused(pipeline).reason == "PIPELINE_UNAVAILABLE"


def test_request_is_refused_when_this_controller_does_not_lead() -> None:
    pipeline = FakePipeline(start=False)
    assert refused(pipeline).reason == "CONTROLLER_UNAVAILABLE"


def test_request_is_refused_when_draining_and_running_ones_finish() -> None:
    pipeline = FakePipeline()
    pipeline.hold = {SendWave}
    pipeline.submit("a", 40)
    pipeline.post(DrainAsked(pipeline.now))
    pipeline.submit("b", 40)
    assert pipeline.reason("b") == "DRAINING"
    pipeline.release_held()
    assert isinstance(pipeline.outcome("a"), Finished)


def test_live_request_goes_on_when_its_id_is_submitted_again() -> None:
    pipeline = FakePipeline()
    pipeline.hold = {SendWave}
    pipeline.submit("a", 40)
    again: list[Action] = pipeline.post(Submit(request("a", 40), pipeline.now))
    (refusal,) = again
    assert isinstance(refusal, RefuseSubmit)
    assert refusal.error.reason == "DUPLICATE_REQUEST"
    pipeline.release_held()
    assert isinstance(pipeline.outcome("a"), Finished)
    pipeline.hold = set()
    pipeline.events.clear()
    pipeline.submit("a", 40)  # the id is free again
    assert isinstance(pipeline.outcome("a"), Finished)


def test_queue_is_full_with_a_hint_when_as_many_wait_as_may() -> None:
    config = ControllerConfig(wave_tokens=64, max_queued_requests=2)
    pipeline = FakePipeline(config=config, start=False)
    pipeline.post(LeadershipWon(Epoch(1), pipeline.now))
    pipeline.post(MemberUp(record(0), pipeline.now))  # stage 1 is missing: everything waits
    for name in "ab":
        pipeline.submit(name, 20)
    pipeline.submit("c", 20)
    outcome = pipeline.outcome("c")
    assert isinstance(outcome, Failed)
    assert outcome.error.reason == "QUEUE_FULL"
    assert outcome.error.retry_after_ms == 1000
    assert [event.position for event in pipeline.events if isinstance(event, Queued)] == [0, 1]
    assert pipeline.machine.live_requests == 2


def test_queue_is_full_when_the_waiting_tokens_are_too_many() -> None:
    config = ControllerConfig(wave_tokens=64, max_queued_tokens=100)
    pipeline = FakePipeline(config=config, start=False)
    pipeline.post(LeadershipWon(Epoch(1), pipeline.now))
    pipeline.post(MemberUp(record(0), pipeline.now))
    pipeline.submit("a", 60)
    pipeline.submit("b", 41)
    outcome = pipeline.outcome("b")
    assert isinstance(outcome, Failed)
    assert fields_of(outcome.error) == {"field": "queued_tokens", "value": "101", "limit": "100"}


def test_every_live_request_fails_when_leadership_is_lost() -> None:
    pipeline = FakePipeline()
    pipeline.hold = {SendWave}
    pipeline.submit("a", 40)
    actions = pipeline.post(LeadershipLost(pipeline.now))
    assert pipeline.reason("a") == "CONTROLLER_UNAVAILABLE"
    assert {type(action).__name__ for action in actions} == {"Emit", "Span"}
    assert pipeline.machine.status().epoch is None


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"lanes": 0}, "lanes"),
        ({"lanes": 129}, "lanes"),
        ({"policy": "magic"}, "policy"),
        ({"silence_ms": 250}, "silence_ms"),
        ({"wave_tokens": 0}, "wave_tokens"),
        ({"floor_blocks": -1}, "floor_blocks"),
        ({"snapshot_tokens": -1}, "snapshot_tokens"),
        ({"most_bypasses": -1}, "most_bypasses"),
        ({"wave_tokens": limits.MAX_WAVE_TOKENS + 1}, "wave_tokens"),
        ({"silence_ms": limits.MAX_DEADLINE_MS + 1}, "silence_ms"),
        ({"inventory_ms": 0}, "inventory_ms"),
        ({"inventory_ms": 10**20}, "inventory_ms"),
        ({"floor_blocks": limits.MAX_POOL_BLOCKS}, "floor_blocks"),
        ({"snapshot_tokens": limits.MAX_PROMPT_TOKENS + 1}, "snapshot_tokens"),
        ({"share_tokens": 10**20}, "share_tokens"),
        ({"max_queued_requests": 0}, "max_queued_requests"),
        ({"attempts": 0}, "attempts"),
    ],
)
def test_config_names_the_field_when_it_is_out_of_range(fields: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ControllerMachine(ControllerConfig(**fields))  # type: ignore[arg-type]
    assert caught.value.fields["field"] == field
    assert caught.value.fields.keys() == {"field", "value", "limit"}
