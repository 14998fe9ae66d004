"""Failures, cancel and deadlines at every moment: one typed outcome each, and nothing held afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.harness.fake_pipeline import FakePipeline, fault, record
from wavepp_controller.core.config import ControllerConfig
from wavepp_controller.core.events import (
    Action,
    AnnounceAcked,
    AnnounceRequest,
    BeatArrived,
    Cancel,
    DigestArrived,
    EndFormation,
    Event,
    FormPipeline,
    HashPrompt,
    LeadershipWon,
    MemberGone,
    MemberUp,
    ReportArrived,
    SendRound,
    SendWave,
    Tick,
    VotesArrived,
    WatchAgain,
)
from wavepp_proto.errors import NonFinite, from_info
from wavepp_proto.terms import (
    Admitted,
    AnnounceAck,
    CacheGroup,
    Capacity,
    Digest,
    DigestKind,
    Epoch,
    ErrorInfo,
    Failed,
    Finished,
    GroupDigest,
    Heartbeat,
    Incarnation,
    RequestId,
    StageTimes,
    Votes,
    WaveReport,
)

MOMENTS: dict[str, type[Action]] = {
    "queued": HashPrompt,
    "announced": AnnounceRequest,
    "preparing": SendRound,
    "running": SendWave,
}


def stopped_at(moment: str, **config: Any) -> FakePipeline:
    """A pipeline with one request `a` that got as far as `moment`, its next answers held back."""
    pipeline = FakePipeline(config=ControllerConfig(wave_tokens=64, **config))
    if moment == "waiting":
        pipeline.daemon(1).short["a"] = 5
    elif moment == "hinted":
        pipeline.hold = {SendRound}
        pipeline.submit("other", 20)
    else:
        pipeline.hold = {MOMENTS[moment]}
    pipeline.submit("a", 1000, deadline_ms=5000)
    assert pipeline.state("a") == moment
    return pipeline


EVERY_MOMENT = pytest.mark.parametrize("moment", [*MOMENTS, "hinted", "waiting"])
STAGE_LOST_AT = pytest.mark.parametrize("moment", ["preparing", "running"])
QUEUES_AGAIN_AT = pytest.mark.parametrize("moment", ["queued", "announced", "hinted", "waiting"])


def let_go_on(pipeline: FakePipeline) -> None:
    """Everything held back is answered after all, late."""
    pipeline.hold = set()
    pipeline.release_held()


# --- cancel and deadline ------------------------------------------------------------------------


@EVERY_MOMENT
def test_nothing_is_held_when_a_request_is_cancelled(moment: str) -> None:
    pipeline = stopped_at(moment)
    pipeline.cancel("a")
    outcome = pipeline.outcome("a")
    assert isinstance(outcome, Failed)
    assert outcome.error.reason == "CANCELLED"
    assert dict(outcome.error.fields)["state"] == moment
    let_go_on(pipeline)
    assert isinstance(pipeline.outcome("a"), Failed)
    assert pipeline.nothing_held()
    assert pipeline.machine.live_requests == 0
    pipeline.daemon(1).short.clear()
    pipeline.submit("next", 40)
    assert isinstance(pipeline.outcome("next"), Finished)


@EVERY_MOMENT
def test_nothing_is_held_when_a_deadline_expires(moment: str) -> None:
    pipeline = stopped_at(moment, round_deadline_ms=60_000)
    pipeline.pass_time(4.9)
    assert pipeline.machine.live_requests == (2 if moment == "hinted" else 1)
    pipeline.pass_time(0.2)
    assert pipeline.reason("a") == "DEADLINE_EXPIRED"
    let_go_on(pipeline)
    assert pipeline.reason("a") == "DEADLINE_EXPIRED"
    assert pipeline.nothing_held()


def test_release_names_the_last_wave_when_a_running_request_is_cancelled() -> None:
    pipeline = stopped_at("running")
    pipeline.cancel("a")
    released = [action.round.releases for action in pipeline.of(SendRound) if action.round.releases]
    assert [[(r.after_wave, r.ended) for r in releases] for releases in released] == [[(4, True)], [(4, True)]]
    let_go_on(pipeline)
    assert len(pipeline.waves()) == 4  # chunks already sent were executed, none was sent after the cancel


def test_release_names_no_wave_when_an_admitted_request_never_ran() -> None:
    pipeline = FakePipeline()
    pipeline.hold = {SendWave}
    pipeline.submit("long", 1000)
    pipeline.submit("a", 40, seed=1)
    assert pipeline.state("a") == "admitted"
    pipeline.cancel("a")
    (release,) = pipeline.daemon(0).rounds[-1].releases
    assert (release.key.request_id, release.after_wave) == ("a", None)
    let_go_on(pipeline)
    assert isinstance(pipeline.outcome("long"), Finished)
    assert pipeline.nothing_held()


@pytest.mark.parametrize("moment", ["announced", "running"])
def test_new_life_is_not_taken_for_the_old_one_when_an_id_is_used_again(moment: str) -> None:
    pipeline = stopped_at(moment)
    pipeline.cancel("a")
    pipeline.events.clear()
    pipeline.hold = {AnnounceRequest, SendWave} if moment == "announced" else set()
    pipeline.submit("a", 40, seed=1)
    let_go_on(pipeline)  # daemons hear of the old life only now, behind its release
    finished = pipeline.outcome("a")
    assert isinstance(finished, Finished)
    assert (finished.attempt, finished.prompt_tokens) == (2, 40)
    assert pipeline.nothing_held()


def test_cancel_is_counted_when_nobody_knows_the_request() -> None:
    pipeline = FakePipeline()
    assert pipeline.post(Cancel(RequestId("ghost"), pipeline.now)) == []
    assert pipeline.counter("cancels_unknown") == 1


def test_all_are_gone_when_one_request_per_ring_slot_is_cancelled() -> None:
    pipeline = FakePipeline(stages=4)
    pipeline.hold = {SendWave}
    names = [f"r{number}" for number in range(8)]
    for seed, name in enumerate(names):
        pipeline.submit(name, 64, seed)
    assert len(pipeline.held) == 8
    for name in names:
        pipeline.cancel(name)
    let_go_on(pipeline)
    assert [pipeline.reason(name) for name in names] == ["CANCELLED"] * 8
    assert pipeline.nothing_held()
    assert pipeline.machine.status().pipelines[0].waves_in_flight == 0


def test_memory_of_deadlines_stays_flat_when_cancels_storm() -> None:
    pipeline = FakePipeline()
    pipeline.hold = {HashPrompt}
    for number in range(3000):
        pipeline.submit(f"r{number}", 4)
        pipeline.cancel(f"r{number}")
    (one,) = pipeline.machine.pipelines.values()
    assert len(one.book._deadlines) <= 1100
    assert pipeline.counter("cancelled") == 3000


# --- refused announcements ----------------------------------------------------------------------


def test_only_the_refused_request_fails_when_a_daemon_refuses_an_announcement() -> None:
    pipeline = FakePipeline(stages=3)
    pipeline.hold = {AnnounceRequest}
    for seed, name in enumerate("abc"):
        pipeline.submit(name, 40, seed)
    keys = [action.key for action in pipeline.of(AnnounceRequest)]
    daemon = pipeline.daemon(1)
    refused = ErrorInfo("QUEUE_FULL", "too many requests are announced", (("field", "announced"),), 250)
    ack = AnnounceAck(daemon.fence(0), keys[1], behind=(keys[0],), refused=refused)
    pipeline.post(AnnounceAcked(daemon.plan.key, ack, pipeline.now))
    outcome = pipeline.outcome("b")
    assert isinstance(outcome, Failed)
    assert outcome.error == refused
    assert pipeline.machine.live_requests == 2
    let_go_on(pipeline)
    assert all(isinstance(pipeline.outcome(name), Finished) for name in "ac")
    assert pipeline.nothing_held()
    assert pipeline.counter("announcements_refused") == 1


@pytest.mark.parametrize("moment", ["preparing", "running"])
def test_refusal_changes_nothing_when_it_is_late(moment: str) -> None:
    pipeline = stopped_at(moment)
    daemon = pipeline.daemon(1)
    (announced,) = pipeline.of(AnnounceRequest)
    ack = AnnounceAck(daemon.fence(0), announced.key, refused=fault("QUEUE_FULL"))
    pipeline.post(AnnounceAcked(daemon.plan.key, ack, pipeline.now))
    assert pipeline.state("a") == moment


# --- void rows ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_request_fails_naming_stage_and_cause_when_its_row_is_voided(stage: int) -> None:
    pipeline = FakePipeline(stages=3)
    pipeline.daemon(stage).faults["a"] = "BAD_CANARY"
    pipeline.hold = {SendWave}
    pipeline.submit("a", 100)
    pipeline.submit("b", 40, seed=1)
    let_go_on(pipeline)
    outcome = pipeline.outcome("a")
    assert isinstance(outcome, Failed)
    assert outcome.error.reason == "ROW_VOIDED"
    assert dict(outcome.error.fields) == {"stage": str(stage), "rank": "0", "wave": "1", "cause": "BAD_CANARY"}
    assert isinstance(pipeline.outcome("b"), Finished)
    assert pipeline.nothing_held()


@pytest.mark.parametrize("stage", [0, 1])
def test_request_may_not_be_tried_again_when_its_row_computed_nan(stage: int) -> None:
    """The same prompt would compute it again: a caller that tries again what is retryable would never end."""
    pipeline = FakePipeline(stages=2)
    pipeline.daemon(stage).faults["a"] = "NON_FINITE"
    pipeline.submit("a", 100)
    outcome = pipeline.outcome("a")
    assert isinstance(outcome, Failed)
    error = from_info(outcome.error)
    assert (type(error), error.reason, error.retryable) == (NonFinite, "NON_FINITE", False)
    assert error.fields == {"stage": str(stage), "rank": "0", "wave": "1"}
    assert pipeline.nothing_held()


def test_cause_is_waited_for_when_the_last_stage_speaks_first() -> None:
    pipeline = FakePipeline()
    pipeline.hold = {SendWave}
    pipeline.submit("a", 20)
    (wave,) = [action for action in pipeline.held if isinstance(action, SendWave)]
    pipeline.daemon(0).faults["a"] = "BAD_CANARY"
    (first, fence0), (last, fence1) = wave.targets
    early = pipeline.daemon(0).report(wave, replace(fence0, ordinal=1), 0, False)
    late = replace(early, fence=replace(fence1, ordinal=1), faults=())
    pipeline.post(ReportArrived(last, late, pipeline.now))
    assert pipeline.state("a") == "running"
    assert pipeline.machine.status().pipelines[0].waves_in_flight == 0
    pipeline.post(ReportArrived(first, early, pipeline.now))
    assert pipeline.reason("a") == "ROW_VOIDED"


# --- loss of a stage ----------------------------------------------------------------------------


def lose(pipeline: FakePipeline) -> None:
    pipeline.lose(1)


def fall_silent(pipeline: FakePipeline) -> None:
    pipeline.deaf = {1}
    pipeline.pass_time(1.5)


@STAGE_LOST_AT
@pytest.mark.parametrize("how", [lose, fall_silent])
def test_request_fails_naming_the_stage_when_it_is_lost(moment: str, how: Callable[[FakePipeline], None]) -> None:
    pipeline = stopped_at(moment)
    began = pipeline.now
    how(pipeline)
    outcome = pipeline.outcome("a")
    assert isinstance(outcome, Failed)
    assert outcome.error.reason == "STAGE_LOST"
    assert dict(outcome.error.fields) == {"pipeline": "p", "stage": "1", "rank": "0", "incarnation": "1"}
    assert pipeline.now - began < 2.0
    (ended,) = pipeline.of(EndFormation)
    assert [key.stage for key, _ in ended.targets] == [0]  # the lost one fences itself, if it lives


@QUEUES_AGAIN_AT
def test_request_queues_again_and_finishes_when_it_held_nothing_as_a_stage_was_lost(moment: str) -> None:
    pipeline = stopped_at(moment)
    lose(pipeline)
    assert pipeline.state("a") == "queued"
    pipeline.held = [action for action in pipeline.held if isinstance(action, HashPrompt)]
    let_go_on(pipeline)
    pipeline.post(MemberUp(record(1, incarnation=2), pipeline.now))
    finished = pipeline.outcome("a")
    assert isinstance(finished, Finished)
    assert finished.attempt == 1
    assert pipeline.nothing_held()


@STAGE_LOST_AT
def test_request_is_readmitted_under_the_next_attempt_when_attempts_are_left(moment: str) -> None:
    pipeline = stopped_at(moment, attempts=2)
    lose(pipeline)
    assert pipeline.state("a") == "queued"
    pipeline.held.clear()
    let_go_on(pipeline)
    pipeline.post(MemberUp(record(1, incarnation=2), pipeline.now))
    finished = pipeline.outcome("a")
    assert isinstance(finished, Finished)
    assert (finished.attempt, finished.cached_tokens, finished.prompt_tokens) == (2, 0, 1000)
    assert [event.attempt for event in pipeline.of_request("a", Admitted)][-1] == 2
    assert pipeline.counter("readmitted") == 1
    assert pipeline.nothing_held()


def test_request_fails_when_its_last_attempt_is_lost_too() -> None:
    pipeline = stopped_at("running", attempts=2)
    lose(pipeline)
    pipeline.post(MemberUp(record(1, incarnation=2), pipeline.now))
    assert pipeline.state("a") == "running"
    lose(pipeline)
    assert pipeline.reason("a") == "STAGE_LOST"


def test_queued_request_gives_up_naming_what_is_missing_when_no_formation_comes() -> None:
    pipeline = stopped_at("hinted")
    lose(pipeline)
    pipeline.post(MemberGone(pipeline.daemon(1).plan.key, Incarnation(1), pipeline.now))
    pipeline.submit("late", 40, deadline_ms=120_000)
    pipeline.pass_time(29.9)
    assert pipeline.machine.live_requests == 1  # `a` had five seconds
    pipeline.pass_time(0.3)
    outcome = pipeline.outcome("late")
    assert isinstance(outcome, Failed)
    assert (outcome.error.reason, dict(outcome.error.fields)["missing_stages"]) == ("PIPELINE_UNAVAILABLE", "1")


def test_missing_stage_is_named_when_a_pipeline_never_forms() -> None:
    pipeline = FakePipeline(start=False)
    pipeline.post(LeadershipWon(Epoch(1), pipeline.now))
    pipeline.post(MemberUp(record(0, 3), pipeline.now))
    pipeline.submit("a", 40)
    pipeline.pass_time(30.1)
    outcome = pipeline.outcome("a")
    assert isinstance(outcome, Failed)
    named = dict(outcome.error.fields)
    assert (outcome.error.reason, named["missing_stages"], named["pipeline"]) == ("PIPELINE_UNAVAILABLE", "1 2", "p")


# --- faults of a formation ----------------------------------------------------------------------


def test_formation_ends_and_forms_again_when_a_wave_fails() -> None:
    pipeline = stopped_at("running")
    daemon = pipeline.daemon(1)
    error = fault("ENGINE_FAULT")
    failed = WaveReport(daemon.fence(1), False, 0, b"", StageTimes(), error=error)
    pipeline.post(ReportArrived(daemon.plan.key, failed, pipeline.now))
    outcome = pipeline.outcome("a")
    assert isinstance(outcome, Failed)
    assert outcome.error.reason == "FORMATION_ENDED"
    named = {"pipeline": "p", "stage": "1", "rank": "0", "wave": "1", "cause": "ENGINE_FAULT"}
    assert dict(outcome.error.fields) == named
    pipeline.held.clear()
    pipeline.hold = set()
    pipeline.pass_time(0.2)
    assert [action.formation for action in pipeline.of(FormPipeline)] == [1, 2]
    pipeline.submit("b", 40)
    assert isinstance(pipeline.outcome("b"), Finished)


def test_formation_ends_when_two_stages_executed_different_rows() -> None:
    pipeline = stopped_at("running")
    pipeline.daemon(1).running = b"something else"
    pipeline.hold |= {EndFormation}
    pipeline.release_held(SendWave)
    outcome = pipeline.outcome("a")
    assert isinstance(outcome, Failed)
    assert outcome.error.reason == "INTERNAL"
    assert dict(outcome.error.fields)["field"] == "running_hash"
    assert pipeline.counter("formations_broken") == 1


def test_formation_ends_when_no_wave_ends_though_hearts_beat() -> None:
    pipeline = stopped_at("running", wave_timeout_ms=3000)
    pipeline.pass_time(2.9)
    assert pipeline.of(EndFormation) == []
    pipeline.pass_time(0.2)
    assert pipeline.reason("a") == "FORMATION_ENDED"


def test_nobody_is_lost_when_it_was_the_controller_that_slept() -> None:
    pipeline = FakePipeline()
    pipeline.pass_time(0.2)
    pipeline.now += 30.0
    pipeline.post(Tick(pipeline.now))
    assert pipeline.of(EndFormation) == []
    pipeline.pass_time(0.05)
    pipeline.deaf = {0}
    pipeline.pass_time(1.35)
    (ended,) = pipeline.of(EndFormation)
    assert dict(ended.cause.fields)["stage"] == "0"


def test_message_is_counted_and_dropped_when_it_is_of_an_earlier_formation() -> None:
    pipeline = FakePipeline()
    old = pipeline.daemon(0)
    fence = old.fence(1)
    pipeline.lose(1)
    pipeline.post(MemberUp(record(1, incarnation=2), pipeline.now))
    place = old.plan.key
    stale: list[Event] = [
        VotesArrived(place, Votes(fence, (), Capacity(1, 0, 0)), pipeline.now),
        ReportArrived(place, WaveReport(fence, True, 0, b"", StageTimes()), pipeline.now),
        BeatArrived(place, Heartbeat(fence, 1), pipeline.now),
    ]
    for event in stale:
        assert pipeline.post(event) == []
    assert pipeline.counter("stale_messages") == 3
    assert pipeline.machine.status().pipelines[0].state == "serving"


def test_daemon_may_leave_when_nothing_is_held_any_more() -> None:
    pipeline = stopped_at("running")
    daemon = pipeline.daemon(1)
    beat = BeatArrived(daemon.plan.key, Heartbeat(daemon.fence(0), 1, draining=True), pipeline.now)
    pipeline.post(beat)
    pipeline.submit("b", 40)
    assert pipeline.state("b") == "hinted"  # nothing new is admitted
    let_go_on(pipeline)
    assert isinstance(pipeline.outcome("a"), Finished)
    pipeline.post(beat)
    (ended,) = pipeline.of(EndFormation)
    assert dict(ended.cause.fields)["stages"] == "1"
    assert pipeline.state("b") == "queued"
    pipeline.post(MemberUp(record(1, incarnation=2), pipeline.now))
    assert isinstance(pipeline.outcome("b"), Finished)


# --- digests ------------------------------------------------------------------------------------


def test_snapshot_is_asked_for_once_when_a_delta_is_missing() -> None:
    pipeline = FakePipeline()
    pipeline.digest(0, b"")
    pipeline.digest(1, b"")
    daemon = pipeline.daemon(0)

    def gap(seq: int) -> None:
        group = GroupDigest(CacheGroup.ATTENTION, b"", b"", 0, 0)
        made = Digest(daemon.plan.fence.incarnation, seq, DigestKind.DELTA, (group,), daemon.capacity())
        pipeline.post(DigestArrived(daemon.plan.key, made, pipeline.now))

    for seq in (5, 6, 7):
        gap(seq)
    (asked,) = pipeline.of(WatchAgain)
    assert asked.key == daemon.plan.key
    assert pipeline.machine.status().pipelines[0].daemons[0].digest_in_sync is False
    pipeline.pass_time(1.1)
    assert len(pipeline.of(WatchAgain)) == 2
    daemon.digest_seq = 10
    pipeline.digest(0, b"")
    assert pipeline.machine.status().pipelines[0].daemons[0].digest_in_sync is True
    pipeline.pass_time(2.0)
    assert len(pipeline.of(WatchAgain)) == 2
