"""Streams that break while a formation serves: what is sent again, in which order, and when a daemon is lost."""

from __future__ import annotations

import pytest

from tests.harness.fake_pipeline import fault, tokens
from tests.harness.flaky_pipeline import FlakyPipeline
from wavepp_controller.core.config import ControllerConfig
from wavepp_controller.core.events import (
    Action,
    AnnounceAcked,
    AnnounceRequest,
    AskInventory,
    EndFormation,
    FormPipeline,
    ReopenStreams,
    ReportArrived,
    SendRound,
    SendWave,
    StreamLost,
    StreamsReopened,
    Tick,
    VotesArrived,
    WatchAgain,
)
from wavepp_proto.errors import FormationEnded, StaleMessage
from wavepp_proto.hashing import HashScope, hash_blocks
from wavepp_proto.terms import ErrorInfo, Failed, Finished


def after(pipeline: FlakyPipeline, kind: type[Action]) -> list[Action]:
    """What the core asked for from the first action of a type on."""
    first = next(index for index, action in enumerate(pipeline.log) if isinstance(action, kind))
    return pipeline.log[first:]


def finished(pipeline: FlakyPipeline, name: str) -> Finished:
    outcome = pipeline.outcome(name)
    assert isinstance(outcome, Finished), outcome
    return outcome


def served_well(pipeline: FlakyPipeline) -> None:
    """One formation did it all, every stage ran the same waves once, and nothing is left."""
    assert len(pipeline.of(FormPipeline)) == 1
    assert pipeline.of(EndFormation) == []
    assert len({daemon.running for daemon in pipeline.daemons.values()}) == 1
    assert pipeline.nothing_held()
    assert pipeline.machine.live_requests == 0


# --- what is sent again -------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_unreported_waves_are_sent_again_in_order_when_a_running_stages_streams_break(stage: int) -> None:
    pipeline = FlakyPipeline(3)
    pipeline.hold = {SendWave, ReopenStreams}
    pipeline.submit("a", 1000)
    pipeline.cut(stage)
    assert pipeline.state("a") == "running"
    pipeline.release_held(SendWave)  # the others go as far as they can without this stage
    reported = pipeline.machine.reported_wave(pipeline.key(stage))
    pipeline.hold = set()
    pipeline.release_held(ReopenStreams)
    again = [a for a in pipeline.of(SendWave) if [key.stage for key, _ in a.targets] == [stage]]
    assert [wave.ordinal for wave in again] == [reported + number for number in (1, 2, 3, 4, 5, 6)]
    assert finished(pipeline, "a").waves == 16
    served_well(pipeline)
    assert pipeline.counter("streams_lost") == pipeline.counter("streams_reopened") == 1


def test_reports_come_again_from_the_last_one_taken_when_the_streams_that_carried_them_broke() -> None:
    pipeline = FlakyPipeline(2)
    pipeline.hold = {SendWave}
    pipeline.submit("a", 256)
    pipeline.lose_next = {(1, ReportArrived)}
    pipeline.hold = {ReopenStreams}
    pipeline.release_held()
    (asked,) = [action for action in pipeline.held if isinstance(action, ReopenStreams)]
    assert (asked.key.stage, asked.reported_wave) == (1, 0)  # wave 2 told that the report of wave 1 is missing
    assert pipeline.counter("report_gaps") == 3  # none behind the gap was taken
    pipeline.release_held()
    assert finished(pipeline, "a").waves == 4
    assert [pipeline.machine.reported_wave(pipeline.key(stage)) for stage in (0, 1)] == [4, 4]
    served_well(pipeline)


def test_unanswered_round_is_sent_again_when_streams_break_before_it_arrives() -> None:
    pipeline = FlakyPipeline()
    pipeline.hold = {SendRound}
    pipeline.submit("a", 40)
    pipeline.cut(1)
    pipeline.hold = set()
    pipeline.release_held()
    assert [round_.round.fence.ordinal for round_ in pipeline.of(SendRound) if round_.key.stage == 1] == [1, 1, 2]
    assert [len(pipeline.daemon(1).rounds), finished(pipeline, "a").waves] == [2, 1]
    served_well(pipeline)


def test_votes_are_replayed_when_they_were_lost_with_the_streams() -> None:
    pipeline = FlakyPipeline()
    pipeline.lose_next = {(1, VotesArrived)}
    pipeline.submit("a", 40)
    assert pipeline.state("a") == "preparing"
    pipeline.cut(1)
    assert finished(pipeline, "a").waves == 1
    assert len(pipeline.daemon(1).rounds) == 2  # applied once: the votes alone came again
    served_well(pipeline)


def test_release_that_was_lost_is_sent_again_when_the_request_ended_meanwhile() -> None:
    pipeline = FlakyPipeline()
    pipeline.hold = {SendWave, ReopenStreams}
    pipeline.submit("a", 1000)
    pipeline.cut(0)
    pipeline.cancel("a")
    assert pipeline.daemon(0).holds
    assert not pipeline.daemon(1).holds
    pipeline.hold = set()
    pipeline.release_held()
    served_well(pipeline)


def test_announcement_is_sent_again_to_the_one_stage_when_it_has_not_acknowledged() -> None:
    pipeline = FlakyPipeline(3)
    pipeline.lose_next = {(2, AnnounceRequest)}
    pipeline.submit("a", 40)
    pipeline.submit("short", 3, seed=1)  # not one full block: no hashes to announce, and all the same
    assert pipeline.state("a") == "announced"
    pipeline.cut(0)  # it has acknowledged
    pipeline.cut(2)
    again = [action for action in pipeline.of(AnnounceRequest) if len(action.targets) == 1]
    assert [(a.key.request_id, a.targets[0][0].stage) for a in again] == [("a", 2)]
    assert finished(pipeline, "a").attempt == 1
    served_well(pipeline)


def test_announcement_without_hashes_is_sent_again_when_it_was_lost() -> None:
    pipeline = FlakyPipeline()
    pipeline.lose_next = {(1, AnnounceRequest)}
    pipeline.submit("short", 3)
    pipeline.cut(1)
    assert finished(pipeline, "short").attempt == 1
    served_well(pipeline)


def test_digest_goes_on_from_its_seq_when_it_was_in_sync_and_begins_anew_when_it_was_not() -> None:
    pipeline = FlakyPipeline()
    pipeline.digest(0, hash_blocks(HashScope("f1", "B16"), tokens(100), 16))
    pipeline.cut(0)
    pipeline.cut(1)
    assert [(watch.key.stage, watch.from_seq) for watch in pipeline.of(WatchAgain)] == [(0, 1), (1, 0)]
    assert [daemon.digest_in_sync for daemon in pipeline.machine.status().pipelines[0].daemons] == [True, False]


def test_everything_is_sent_before_holds_are_compared_when_streams_are_open_again() -> None:
    pipeline = FlakyPipeline()
    pipeline.hold = {SendWave}
    pipeline.submit("a", 200)
    pipeline.submit("b", 200, seed=1)
    pipeline.hold = {SendWave, SendRound, AskInventory}
    pipeline.cancel("b")
    pipeline.log.clear()
    pipeline.cut(1)
    kinds = [type(action) for action in after(pipeline, ReopenStreams)]
    assert kinds == [ReopenStreams, SendRound, *[SendWave] * 4, WatchAgain, AskInventory]


# --- duplicates and gaps ------------------------------------------------------------------------


def test_nothing_happens_twice_when_every_message_of_a_daemon_comes_twice() -> None:
    pipeline = FlakyPipeline(3)
    pipeline.double = {AnnounceAcked, VotesArrived, ReportArrived, StreamsReopened}
    pipeline.submit("a", 200)
    pipeline.cut(1)
    pipeline.submit("b", 200, seed=1)
    assert [finished(pipeline, name).waves for name in "ab"] == [4, 4]
    assert pipeline.counter("duplicate_reports") == 2 * 4 * 3
    assert pipeline.counter("formations_broken") == 0
    served_well(pipeline)


def test_streams_are_opened_again_when_a_daemon_misses_a_wave() -> None:
    pipeline = FlakyPipeline()
    pipeline.hold = {SendWave}
    pipeline.submit("a", 256)
    pipeline.lose_next = {(0, SendWave)}
    pipeline.hold = set()
    pipeline.release_held()
    assert finished(pipeline, "a").waves == 4
    assert pipeline.counter("streams_reopened") == 1
    served_well(pipeline)


def test_streams_are_opened_again_when_a_daemon_misses_a_round() -> None:
    pipeline = FlakyPipeline()
    pipeline.submit("a", 40)
    pipeline.lose_next = {(1, SendRound)}
    pipeline.submit("b", 40, seed=1)
    pipeline.pass_time(1.3)  # the round is given up; the release behind it shows the gap
    assert finished(pipeline, "b").attempt == 1
    served_well(pipeline)


def test_streams_are_opened_again_when_the_last_round_was_lost_and_no_other_follows() -> None:
    pipeline = FlakyPipeline()
    pipeline.hold = {SendWave}
    pipeline.submit("a", 40)
    pipeline.lose_next = {(1, SendRound)}
    pipeline.hold = set()
    pipeline.release_held()  # it finishes, and its release never reaches stage 1
    assert pipeline.daemon(1).holds
    pipeline.pass_time(2.1)
    assert pipeline.counter("rounds_overdue") == 1
    served_well(pipeline)


@pytest.mark.parametrize(("stage", "kind"), [(0, SendWave), (1, SendWave), (0, ReportArrived), (1, ReportArrived)])
def test_streams_are_opened_again_when_the_last_wave_or_its_report_was_lost_and_no_other_follows(
    stage: int, kind: type
) -> None:
    pipeline = FlakyPipeline()
    pipeline.lose_next = {(stage, kind)}
    pipeline.submit("a", 40)
    pipeline.pass_time(1.9)
    assert pipeline.of(ReopenStreams) == []
    pipeline.pass_time(0.3)
    assert finished(pipeline, "a").waves == 1
    assert [pipeline.machine.reported_wave(pipeline.key(one)) for one in (0, 1)] == [1, 1]
    assert pipeline.counter("waves_overdue") == 1
    served_well(pipeline)


def test_nothing_is_opened_again_when_a_wave_is_only_slow() -> None:
    pipeline = FlakyPipeline()
    pipeline.hold = {SendWave}
    pipeline.submit("a", 40)
    pipeline.pass_time(10.0)
    assert pipeline.of(ReopenStreams) == []


def test_votes_on_a_round_that_was_never_sent_end_the_formation() -> None:
    pipeline = FlakyPipeline()
    pipeline.submit("a", 40)
    votes = next(iter(pipeline.daemon(1).answered.values()))
    never = type(votes)(pipeline.daemon(1).fence(99), (), votes.capacity)
    pipeline.post(VotesArrived(pipeline.key(1), never, pipeline.now))
    (ended,) = pipeline.of(EndFormation)
    assert dict(ended.cause.fields)["field"] == "round"


def test_releases_wait_and_go_together_when_a_daemon_owes_many_answers() -> None:
    pipeline = FlakyPipeline()
    pipeline.hold = {AnnounceRequest, SendRound}
    for number in range(100):
        pipeline.submit(f"r{number}", 40, seed=number)
        pipeline.cancel(f"r{number}")
    assert len([action for action in pipeline.of(SendRound) if action.key.stage == 0]) == 32
    pipeline.hold = set()
    pipeline.release_held()
    pipeline.pass_time(1.2)
    served_well(pipeline)


# --- lost after all -----------------------------------------------------------------------------


def test_daemon_is_lost_when_it_stays_silent_while_it_reconnects() -> None:
    pipeline = FlakyPipeline()
    pipeline.hold = {SendWave}
    pipeline.submit("a", 1000)
    pipeline.pass_time(0.05)
    pipeline.hold = {SendWave, ReopenStreams}
    pipeline.cut(1)
    began = pipeline.now
    while pipeline.machine.live_requests:
        pipeline.pass_time(0.05)
    assert pipeline.now - began == pytest.approx(1.3, abs=0.06)
    assert pipeline.reason("a") == "STAGE_LOST"
    assert pipeline.counter("stages_lost") == 1


def test_daemon_is_lost_before_the_silence_when_its_streams_cannot_be_opened_nine_times() -> None:
    pipeline = FlakyPipeline(config=ControllerConfig(wave_tokens=64, silence_ms=10_000))
    pipeline.hold = {SendWave}
    pipeline.submit("a", 1000)
    pipeline.unreachable = {1}
    began = pipeline.now
    pipeline.cut(1)
    pipeline.pass_time(0.3)
    assert pipeline.machine.status().pipelines[0].state == "serving"
    pipeline.pass_time(1.0)
    assert len(pipeline.of(ReopenStreams)) == 8
    assert pipeline.reason("a") == "STAGE_LOST"
    assert pipeline.now - began < 2.0


def test_failures_are_forgotten_when_the_daemon_works_between_them() -> None:
    pipeline = FlakyPipeline()
    for number in range(20):
        pipeline.cut(1)
        pipeline.submit(f"r{number}", 40, seed=number)
    assert pipeline.counter("streams_reopened") == 20
    assert pipeline.counter("finished") == 20
    served_well(pipeline)


def test_failures_are_forgotten_when_reports_come_between_them() -> None:
    pipeline = FlakyPipeline()
    pipeline.hold = {SendWave}
    pipeline.submit("a", 60 * 64)
    for _ in range(12):
        pipeline.cut(1)
        pipeline.pass_time(0.1)
        pipeline.release_held(SendWave)
    assert pipeline.counter("streams_reopened") == 12
    pipeline.hold = set()
    pipeline.release_held()
    served_well(pipeline)


def test_daemon_is_lost_when_it_refuses_what_is_sent_again_though_its_heart_beats() -> None:
    pipeline = FlakyPipeline()
    for _ in range(9):
        pipeline.cut(1, fault("STALE_MESSAGE"))
        pipeline.pass_time(0.3)
    (ended,) = pipeline.of(EndFormation)
    assert "broke 9 times in a row" in ended.cause.message


def test_failures_are_forgotten_when_streams_have_held_for_as_long_as_silence_takes() -> None:
    pipeline = FlakyPipeline()
    for _ in range(12):
        pipeline.cut(1)
        pipeline.pass_time(1.5)
    served_well(pipeline)


GONE = fault("STAGE_LOST")
SOMEBODY_ELSE = StaleMessage("incarnation 1 does not match 2", field="incarnation", value=1, limit=2).info()
ENDED = FormationEnded("stage 1 closed a stream", stage=1).info()


@pytest.mark.parametrize("says", [GONE, SOMEBODY_ELSE, ENDED])
def test_requests_fail_at_once_when_a_stream_says_that_the_daemon_is_gone(says: ErrorInfo) -> None:
    pipeline = FlakyPipeline()
    pipeline.hold = {SendWave}
    pipeline.submit("a", 1000)
    pipeline.cut(1, says, resumable=False)
    assert pipeline.of(ReopenStreams) == []
    assert pipeline.reason("a") == "STAGE_LOST"


def test_any_broken_stream_fails_a_formation_that_is_still_joining() -> None:
    pipeline = FlakyPipeline()
    pipeline.lose(0)
    pipeline.hold = {FormPipeline}
    pipeline.pass_time(15.5)
    (form,) = [action for action in pipeline.held if isinstance(action, FormPipeline)]
    plan = form.plans[1]
    lost = StreamLost(
        plan.key, plan.fence.incarnation, form.formation, fault("STAGE_LOST"), pipeline.now, resumable=True
    )
    pipeline.post(lost)
    assert pipeline.of(ReopenStreams) == []
    assert pipeline.of(EndFormation)[-1].formation == form.formation


def test_late_word_of_an_ended_formation_changes_nothing_when_streams_are_reported_open() -> None:
    pipeline = FlakyPipeline()
    pipeline.hold = {ReopenStreams}
    pipeline.cut(1)
    pipeline.lose(0)
    pipeline.log.clear()
    pipeline.hold = set()
    key, stale = pipeline.key(1), pipeline.counter("stale_messages")
    pipeline.post(StreamsReopened(key, pipeline.daemon(1).plan.fence.formation, pipeline.now))
    assert pipeline.log == []
    assert pipeline.counter("stale_messages") == stale + 1


# --- attempts -----------------------------------------------------------------------------------


def test_request_runs_again_when_the_stage_it_ran_on_never_came_back_and_an_attempt_is_left() -> None:
    pipeline = FlakyPipeline(config=ControllerConfig(wave_tokens=64, attempts=2))
    pipeline.hold = {SendWave}
    pipeline.submit("a", 200)
    pipeline.hold = {ReopenStreams, SendWave}
    pipeline.cut(1)
    pipeline.pass_time(1.5)
    assert pipeline.state("a") == "queued"
    pipeline.hold, pipeline.held = set(), []
    pipeline.pass_time(15.5)  # nobody took its place, so it must be alive
    outcome = finished(pipeline, "a")
    assert (outcome.attempt, outcome.waves) == (2, 4)
    assert pipeline.nothing_held()


def test_no_attempt_is_used_up_when_streams_only_broke() -> None:
    pipeline = FlakyPipeline(config=ControllerConfig(wave_tokens=64, attempts=2, policy="fixed"))
    pipeline.hold = {SendWave}
    pipeline.submit("a", 200)
    for stage in (0, 1, 0):
        pipeline.cut(stage)
    pipeline.pass_time(0.05)  # the second try on stage 0 comes after a pause
    pipeline.hold = set()
    pipeline.release_held()
    assert finished(pipeline, "a").attempt == 1
    assert pipeline.counter("readmitted") == 0
    served_well(pipeline)


def test_nobody_is_asked_for_new_streams_when_it_was_the_controller_that_slept() -> None:
    pipeline = FlakyPipeline(config=ControllerConfig(wave_tokens=64, round_deadline_ms=2000))
    pipeline.hold = {SendRound}
    pipeline.submit("a", 40)
    pipeline.pass_time(0.1)
    pipeline.now += 30.0
    pipeline.post(Tick(pipeline.now))
    assert pipeline.of(ReopenStreams) == []
    pipeline.hold = set()
    pipeline.release_held()
    pipeline.pass_time(0.2)
    assert finished(pipeline, "a").attempt == 1
    served_well(pipeline)


def test_failed_request_is_told_once_when_it_is_cancelled_while_a_stage_reconnects() -> None:
    pipeline = FlakyPipeline()
    pipeline.hold = {SendWave, ReopenStreams}
    pipeline.submit("a", 1000)
    pipeline.cut(1)
    pipeline.cancel("a")
    pipeline.hold = set()
    pipeline.release_held()
    assert isinstance(pipeline.outcome("a"), Failed)
    served_well(pipeline)
