"""Rounds: sharing, order, reconcile, running short, deadlines, and releases that lose nothing."""

from __future__ import annotations

import pytest

from tests.harness.fake_pipeline import BLOCK, FakePipeline, tokens
from wavepp_controller.core.config import ControllerConfig
from wavepp_controller.core.events import (
    AnnounceRequest,
    BeatArrived,
    EndFormation,
    SendRound,
    SendWave,
    Tick,
    VotesArrived,
)
from wavepp_proto import limits
from wavepp_proto.hashing import HashScope, hash_blocks
from wavepp_proto.terms import (
    Admitted,
    Attempt,
    Capacity,
    Failed,
    Finished,
    Heartbeat,
    HoldKey,
    RequestId,
    Round,
    Vote,
    VoteOutcome,
    Votes,
)

CONFIG = ControllerConfig(wave_tokens=64)


def key(name: str, attempt: int = 1) -> HoldKey:
    return HoldKey(RequestId(name), Attempt(attempt))


def rounds(pipeline: FakePipeline, stage: int) -> list[Round]:
    return [action.round for action in pipeline.of(SendRound) if action.key.stage == stage]


def prepared(pipeline: FakePipeline, stage: int = 0) -> list[list[str]]:
    """Request ids of each round that prepares something."""
    return [[p.key.request_id for p in r.prepares] for r in rounds(pipeline, stage) if r.prepares]


def released(pipeline: FakePipeline) -> list[list[str]]:
    """Request ids of each round that releases something."""
    return [[release.key.request_id for release in r.releases] for r in rounds(pipeline, 0) if r.releases]


def cached(pipeline: FakePipeline, count: int, seed: int = 0) -> None:
    """Every stage says that it holds a prompt."""
    hashes = hash_blocks(HashScope("f1", f"B{BLOCK}"), tokens(count, seed), BLOCK)
    for stage in range(pipeline.stages):
        pipeline.digest(stage, hashes)


# --- one round in flight, shared ----------------------------------------------------------------


def test_requests_share_the_next_round_when_one_is_in_flight() -> None:
    pipeline = FakePipeline()
    pipeline.hold = {SendRound}
    for name in "abcd":
        pipeline.submit(name, 20)
    assert prepared(pipeline) == [["a"]]
    pipeline.hold = set()
    pipeline.release_held()
    assert prepared(pipeline) == [["a"], ["b", "c", "d"]]
    assert [r.fence.ordinal for r in rounds(pipeline, 0)] == list(range(1, len(rounds(pipeline, 0)) + 1))


def test_round_holds_at_most_32_entries_when_more_are_ready() -> None:
    pipeline = FakePipeline()
    pipeline.hold = {SendRound}
    for number in range(40):
        pipeline.submit(f"r{number}", 20)
    pipeline.hold = set()
    pipeline.release_held()
    assert [len(names) for names in prepared(pipeline)] == [1, 32, 7]


class ReadingPipeline(FakePipeline):
    needs_tokens = True


def test_round_holds_few_tokens_when_the_engines_caches_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ENGINE_ROUND_TOKENS", 50)
    pipeline = ReadingPipeline()
    pipeline.hold = {SendRound}
    for name, length in (("a", 20), ("b", 20), ("c", 30), ("d", 20), ("long", 70), ("e", 20)):
        pipeline.submit(name, length)
    pipeline.hold = set()
    pipeline.release_held()
    assert prepared(pipeline) == [["a"], ["b", "c"], ["d"], ["long"], ["e"]]


def test_rounds_release_few_tokens_each_when_the_engines_caches_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ENGINE_ROUND_TOKENS", 50)
    pipeline = ReadingPipeline()
    pipeline.hold = {SendWave}
    for name, length in (("a", 20), ("b", 20), ("c", 30), ("long", 70)):
        pipeline.submit(name, length)
    pipeline.hold = {SendRound, SendWave}
    pipeline.submit("in front", 20)
    for name in ("a", "b", "c", "long"):
        pipeline.cancel(name)
    pipeline.hold = set()
    pipeline.release_held()
    assert released(pipeline)[:3] == [["a", "b"], ["c"], ["long"]]


def test_holders_stay_within_the_lanes_when_more_are_ready() -> None:
    pipeline = FakePipeline(config=ControllerConfig(wave_tokens=64, lanes=2))
    pipeline.hold = {SendWave}
    for name in "abc":
        pipeline.submit(name, 20)
    assert (pipeline.state("a"), pipeline.state("b"), pipeline.state("c")) == ("running", "running", "hinted")
    pipeline.hold = set()
    pipeline.release_held()
    assert isinstance(pipeline.outcome("c"), Finished)


def test_release_travels_with_the_next_round_when_one_begins_at_once() -> None:
    pipeline = FakePipeline(config=ControllerConfig(wave_tokens=64, lanes=1))
    pipeline.hold = {SendWave}
    for name in "ab":
        pipeline.submit(name, 20)
    pipeline.hold = set()
    pipeline.release_held()
    second = next(r for r in rounds(pipeline, 0) if r.prepares and r.prepares[0].key == key("b"))
    assert [release.key for release in second.releases] == [key("a")]


def test_votes_of_a_release_only_round_are_matched_when_they_come_back() -> None:
    pipeline = FakePipeline()
    pipeline.submit("a", 20)
    assert [(len(r.prepares), len(r.releases)) for r in rounds(pipeline, 0)] == [(1, 0), (0, 1)]
    assert pipeline.counter("late_votes") == 0
    assert pipeline.counter("rounds_release_only") == 1


# --- reconcile ----------------------------------------------------------------------------------


def test_only_daemons_above_the_minimum_or_uncommitted_are_revised_when_votes_differ() -> None:
    pipeline = FakePipeline(stages=3)
    cached(pipeline, 100)
    pipeline.daemon(0).hits["a"] = 96
    pipeline.daemon(1).hits["a"] = 64
    pipeline.daemon(2).hits["a"] = 96
    pipeline.daemon(0).lower["a"] = [32]  # its snapshots make it fall further
    pipeline.submit("a", 100)
    revised = [(a.key.stage, [e.endpoint for e in a.round.revises]) for a in pipeline.of(SendRound) if a.round.revises]
    assert revised == [(0, [64]), (1, [64]), (2, [64]), (0, [32]), (1, [32]), (2, [32])]
    (admitted,) = pipeline.of_request("a", Admitted)
    assert (admitted.endpoint, admitted.rounds, admitted.limiting_stage, admitted.best_stage_hit) == (32, 3, 1, 96)
    finished = pipeline.outcome("a")
    assert isinstance(finished, Finished)
    assert finished.cached_tokens == 32


def test_revise_goes_before_new_prepares_when_both_are_due() -> None:
    pipeline = FakePipeline()
    cached(pipeline, 100)
    pipeline.daemon(0).hits["a"] = 96
    pipeline.hold = {SendRound}
    pipeline.submit("a", 100)
    pipeline.submit("b", 20, seed=5)
    pipeline.hold = set()
    pipeline.release_held()
    mixed = next(r for r in rounds(pipeline, 0) if r.revises)
    assert [r.key for r in mixed.revises] == [key("a")]
    assert [p.key for p in mixed.prepares] == [key("b")]


def test_no_stage_limits_when_all_could_reuse_the_same() -> None:
    pipeline = FakePipeline()
    pipeline.daemon(0).hits["a"] = pipeline.daemon(1).hits["a"] = 96
    pipeline.submit("a", 100)  # the digests say nothing, so the hint is 0
    (admitted,) = pipeline.of_request("a", Admitted)
    assert (admitted.candidate, admitted.endpoint, admitted.limiting_stage, admitted.best_stage_hit) == (0, 0, None, 96)


@pytest.mark.parametrize(("count", "endpoint"), [(BLOCK, 0), (2 * BLOCK, BLOCK), (2 * BLOCK + 1, 2 * BLOCK)])
def test_reuse_stops_below_the_prompt_when_all_of_it_is_cached(count: int, endpoint: int) -> None:
    """Field bug 24: B, B and 1 tokens are computed, never none."""
    pipeline = FakePipeline()
    cached(pipeline, count)
    for stage in (0, 1):
        pipeline.daemon(stage).hits["a"] = count // BLOCK * BLOCK
    pipeline.submit("a", count)
    (admitted,) = pipeline.of_request("a", Admitted)
    assert (admitted.candidate, admitted.endpoint, admitted.limiting_stage) == (endpoint, endpoint, None)
    assert [(row.start, row.length, row.final) for rows in pipeline.waves() for row in rows] == [
        (endpoint, count - endpoint, True)
    ]


def test_repeats_compute_the_last_tokens_only_when_no_digest_has_come_yet() -> None:
    """Field bug 22: the same 7,820 tokens three times, B = 16."""
    pipeline = FakePipeline(config=ControllerConfig(wave_tokens=4096))
    for name in ("first", "second", "third"):
        for stage in (0, 1):
            pipeline.daemon(stage).hits[name] = 7808 if name != "first" else 0
        pipeline.submit(name, 7820)
    computed = [(row.key.request_id, row.start, row.length) for rows in pipeline.waves() for row in rows]
    assert computed == [("first", 0, 4096), ("first", 4096, 3724), ("second", 7808, 12), ("third", 7808, 12)]


def test_every_stage_starts_at_the_same_token_when_one_frees_later_than_the_others() -> None:
    """Field bug 6: the reused length travels in the decision; when a stage frees does not matter to it."""
    pipeline = FakePipeline()
    pipeline.hold = {SendRound}
    pipeline.submit("a", 100)
    pipeline.release_held()  # prepared and computed; what it held is yet to be released
    for stage, hit in ((0, 96), (1, 48)):
        pipeline.daemon(stage).hits["b"] = hit
    pipeline.submit("b", 100)
    late = [action for action in pipeline.held if isinstance(action, SendRound) and action.key.stage == 1]
    pipeline.held = [action for action in pipeline.held if action not in late]
    pipeline.hold = set()
    pipeline.release_held()
    assert (pipeline.daemon(0).holds, pipeline.daemon(1).holds) == ({key("b"): 96}, {key("a"): 0})
    pipeline.held = [*late]
    pipeline.release_held()
    (wave,) = [action for action in pipeline.of(SendWave) if action.rows[0].key == key("b")]
    assert [(row.start, row.length) for row in wave.rows] == [(48, 52)]
    assert {target.stage for target, _ in wave.targets} == {0, 1}


def test_endpoint_is_what_leases_find_when_a_digest_has_been_frozen() -> None:
    """Field bug 49: correctness is kept, the age is visible, and what agreement cost is counted."""
    pipeline = FakePipeline()
    cached(pipeline, 100)
    pipeline.pass_time(5.0)
    pipeline.daemon(0).hits["a"], pipeline.daemon(1).hits["a"] = 96, 32  # stage 1 has evicted and could not say so
    pipeline.submit("a", 100)
    (admitted,) = pipeline.of_request("a", Admitted)
    assert (admitted.candidate, admitted.endpoint, admitted.limiting_stage, admitted.best_stage_hit) == (96, 32, 1, 96)
    (status,) = pipeline.machine.status().pipelines
    assert [daemon.digest_age_ms for daemon in status.daemons] == pytest.approx([5000, 5000], abs=1)


def test_request_fails_when_a_daemon_never_commits_at_what_it_was_asked() -> None:
    pipeline = FakePipeline()
    pipeline.hold = {SendRound}
    pipeline.submit("a", 40)
    for _ in range(3):
        for action in [held for held in pipeline.held if isinstance(held, SendRound)]:
            pipeline.held.remove(action)
            keys = [e.key for e in action.round.prepares] + [e.key for e in action.round.revises]
            votes = tuple(Vote(asked, VoteOutcome.LOWER, 0, 0) for asked in keys)
            capacity = Capacity(1, 0, 0)
            pipeline.post(VotesArrived(action.key, Votes(action.round.fence, votes, capacity), pipeline.now))
    assert pipeline.reason("a") == "INTERNAL"


# --- room ---------------------------------------------------------------------------------------


def test_everything_is_released_when_one_stage_has_no_room() -> None:
    pipeline = FakePipeline(stages=3)
    pipeline.daemon(1).short["a"] = 5
    pipeline.submit("a", 40)
    assert pipeline.state("a") == "waiting"
    for stage in range(3):
        (release,) = rounds(pipeline, stage)[-1].releases
        assert (release.key, release.after_wave, release.ended) == (key("a"), None, False)
        assert pipeline.daemon(stage).holds == {}
        assert pipeline.daemon(stage).announced == {key("a")}
    (status,) = pipeline.machine.status().requests
    assert status.waiting_for == "capacity on stage 1"


def test_request_is_tried_again_when_the_timer_runs_out() -> None:
    pipeline = FakePipeline()
    pipeline.daemon(1).short["a"] = 5
    pipeline.submit("a", 40)
    pipeline.pass_time(0.05)
    assert prepared(pipeline) == [["a"]]
    pipeline.daemon(1).short.clear()
    pipeline.pass_time(0.05)
    assert prepared(pipeline) == [["a"], ["a"]]
    finished = pipeline.outcome("a")
    assert isinstance(finished, Finished)
    assert finished.timings.capacity_wait_ms == pytest.approx(100, abs=60)


def test_request_is_tried_at_once_when_a_later_capacity_covers_the_shortfall() -> None:
    pipeline = FakePipeline()
    daemon = pipeline.daemon(1)
    daemon.short["a"] = 5
    daemon.free = 10
    pipeline.submit("a", 40)
    seq = daemon.seq

    def hear(capacity: Capacity) -> None:
        pipeline.post(BeatArrived(daemon.plan.key, Heartbeat(daemon.fence(0), 1, capacity=capacity), pipeline.now))

    hear(Capacity(seq - 1, 100, 0))  # older than the answer
    hear(Capacity(seq + 1, 14, 0))  # one block short
    hear(Capacity(seq + 2, 20, 0, escrowed_blocks=6))
    assert prepared(pipeline) == [["a"]]
    daemon.short.clear()
    hear(Capacity(seq + 3, 12, 3))
    assert prepared(pipeline) == [["a"], ["a"]]
    assert isinstance(pipeline.outcome("a"), Finished)


def test_second_long_prompt_starts_after_the_first_and_computes_nothing_twice_when_room_is_for_one() -> None:
    """Field bug 35: the whole suffix is promised at admission, so nothing is preempted and begun again."""
    pipeline = FakePipeline(config=ControllerConfig(wave_tokens=4096))
    pipeline.hold = {SendWave}
    for seed, name in enumerate(("a", "b")):
        pipeline.submit(name, 12_000, seed)
        pipeline.daemon(1).short["b"] = 500
    assert [pipeline.state(name) for name in ("a", "b")] == ["running", "waiting"]
    pipeline.hold = set()
    pipeline.release_held()
    pipeline.daemon(1).short.clear()
    pipeline.pass_time(0.15)
    assert [(row.key.request_id, row.length) for rows in pipeline.waves() for row in rows] == [
        *(("a", length) for length in (4096, 4096, 3808)),
        *(("b", length) for length in (4096, 4096, 3808)),
    ]


def test_nothing_behind_is_prepared_when_the_first_waits_for_room() -> None:
    pipeline = FakePipeline()
    pipeline.daemon(0).short["big"] = 50
    pipeline.submit("big", 40)
    pipeline.submit("small", 20)
    pipeline.pass_time(0.5)
    assert pipeline.state("small") == "hinted"
    assert {name for names in prepared(pipeline) for name in names} == {"big"}
    pipeline.daemon(0).short.clear()
    pipeline.pass_time(0.15)
    assert isinstance(pipeline.outcome("big"), Finished)
    assert isinstance(pipeline.outcome("small"), Finished)


def test_first_is_tried_alone_when_it_comes_back_from_waiting() -> None:
    pipeline = FakePipeline()
    pipeline.daemon(0).short["big"] = 50
    pipeline.submit("big", 40)
    for name in "ab":
        pipeline.submit(name, 20)
    pipeline.pass_time(0.25)
    assert prepared(pipeline)[1:] == [["big"], ["big"]]


def test_order_is_kept_when_several_run_short_in_one_round() -> None:
    pipeline = FakePipeline()
    pipeline.hold = {SendRound}
    for name in "zabc":
        pipeline.submit(name, 20)
    for name in "ab":
        pipeline.daemon(1).short[name] = 5
    pipeline.hold = set()
    pipeline.release_held()
    assert [pipeline.state(name) for name in "ab"] == ["waiting", "waiting"]
    assert isinstance(pipeline.outcome("c"), Finished)  # was prepared with them and found room
    pipeline.daemon(1).short.clear()
    pipeline.pass_time(0.15)
    assert prepared(pipeline) == [["z"], ["a", "b", "c"], ["a"], ["b"]]


def test_everything_is_released_when_a_revise_runs_short() -> None:
    pipeline = FakePipeline()
    cached(pipeline, 100)
    pipeline.daemon(0).hits["a"] = 96
    pipeline.daemon(0).revise_short.add("a")
    pipeline.submit("a", 100)
    assert pipeline.state("a") == "waiting"
    assert all(not daemon.holds for daemon in pipeline.daemons.values())
    pipeline.daemon(0).revise_short.clear()
    pipeline.pass_time(0.15)
    assert isinstance(pipeline.outcome("a"), Finished)


def test_capacity_wait_ends_with_the_deadline_when_room_never_comes() -> None:
    pipeline = FakePipeline()
    pipeline.daemon(0).short["a"] = 50
    pipeline.submit("a", 40, deadline_ms=1000)
    pipeline.pass_time(1.2)
    assert pipeline.reason("a") == "DEADLINE_EXPIRED"
    assert pipeline.nothing_held()


# --- announcements ------------------------------------------------------------------------------


def test_request_is_announced_as_its_next_attempt_when_a_daemon_does_not_know_it() -> None:
    pipeline = FakePipeline()
    pipeline.hold = {SendRound}
    pipeline.submit("a", 40)
    pipeline.daemon(1).announced.clear()
    pipeline.hold = set()
    pipeline.release_held()
    assert [action.key for action in pipeline.of(AnnounceRequest)] == [key("a", 1), key("a", 2)]
    finished = pipeline.outcome("a")
    assert isinstance(finished, Finished)
    assert finished.attempt == 2
    assert pipeline.nothing_held()


def test_request_is_not_ready_when_one_daemon_has_not_acknowledged() -> None:
    pipeline = FakePipeline()
    pipeline.hold = {AnnounceRequest}
    pipeline.submit("a", 40)
    assert pipeline.state("a") == "announced"
    (status,) = pipeline.machine.status().requests
    assert status.waiting_for == "acknowledgement of p/0.0 p/1.0"
    pipeline.release_held()
    assert isinstance(pipeline.outcome("a"), Finished)


def test_request_is_announced_again_when_a_daemon_never_acknowledges() -> None:
    pipeline = FakePipeline()
    pipeline.hold = {AnnounceRequest}
    pipeline.submit("a", 40)
    pipeline.held.clear()
    pipeline.hold = set()
    pipeline.pass_time(29.9)
    assert pipeline.state("a") == "announced"
    pipeline.pass_time(0.2)
    finished = pipeline.outcome("a")
    assert isinstance(finished, Finished)
    assert finished.attempt == 2
    assert pipeline.counter("announcements_lost") == 1


def test_no_tick_is_asked_for_early_when_the_first_waits_behind_full_lanes() -> None:
    pipeline = FakePipeline(config=ControllerConfig(wave_tokens=64, lanes=1))
    pipeline.daemon(1).short["a"] = 5
    pipeline.submit("a", 40)
    pipeline.daemon(1).short.clear()
    pipeline.hold = {SendWave}
    pipeline.pass_time(0.2)
    pipeline.submit("b", 40)
    assert (pipeline.state("a"), pipeline.state("b")) == ("running", "hinted")
    deadline = pipeline.machine.next_deadline()
    assert deadline is not None
    assert deadline >= pipeline.now + 1.0


# --- deadlines and endings ----------------------------------------------------------------------


def test_round_is_resolved_by_release_on_all_when_its_deadline_passes() -> None:
    pipeline = FakePipeline(config=ControllerConfig(wave_tokens=64, silence_ms=60_000))
    pipeline.submit("warm", 20)
    pipeline.hold = {SendRound}
    pipeline.submit("a", 40)
    sent = len(rounds(pipeline, 1))
    pipeline.pass_time(1.05)
    assert pipeline.state("a") == "waiting"
    assert pipeline.counter("rounds_expired") == 1
    for stage in (0, 1):
        (release,) = rounds(pipeline, stage)[-1].releases
        assert (release.key, release.ended) == (key("a"), False)
    assert len(rounds(pipeline, 1)) == sent + 1
    # The silent daemons come back and answer everything they were sent, in order.
    pipeline.hold = set()
    pipeline.release_held()
    assert pipeline.counter("late_votes") == 2
    pipeline.pass_time(0.15)
    assert isinstance(pipeline.outcome("a"), Finished)
    assert pipeline.nothing_held()


def test_release_follows_its_round_when_a_request_is_cancelled_in_it() -> None:
    pipeline = FakePipeline()
    pipeline.hold = {SendRound}
    pipeline.submit("a", 40)
    pipeline.cancel("a")
    assert pipeline.reason("a") == "CANCELLED"
    assert [len(rounds(pipeline, stage)) for stage in (0, 1)] == [1, 1]
    pipeline.hold = set()
    pipeline.release_held()
    for stage in (0, 1):
        first, second = rounds(pipeline, stage)
        assert ([p.key for p in first.prepares], first.fence.ordinal) == ([key("a")], 1)
        assert ([r.key for r in second.releases], second.fence.ordinal) == ([key("a")], 2)
        assert second.releases[0].ended
    assert isinstance(pipeline.outcome("a"), Failed)
    assert pipeline.nothing_held()
    pipeline.submit("b", 20)
    assert isinstance(pipeline.outcome("b"), Finished)


def test_releases_go_with_the_next_round_when_one_is_open_and_another_waits() -> None:
    pipeline = FakePipeline()
    pipeline.hold = {SendRound}
    pipeline.submit("a", 40)
    pipeline.submit("b", 20)
    pipeline.cancel("a")
    pipeline.hold = set()
    pipeline.release_held()
    for stage in (0, 1):
        _, second, *_ = rounds(pipeline, stage)
        assert ([r.key for r in second.releases], [p.key for p in second.prepares]) == ([key("a")], [key("b")])
    assert pipeline.nothing_held()


def test_formation_ends_when_a_daemon_votes_on_what_it_was_not_asked() -> None:
    pipeline = FakePipeline()
    pipeline.hold = {SendRound, EndFormation}
    pipeline.submit("a", 40)
    (asked, _) = [held for held in pipeline.held if isinstance(held, SendRound)]
    wrong = (Vote(key("x"), VoteOutcome.COMMITTED, 0, 0),)
    pipeline.post(VotesArrived(asked.key, Votes(asked.round.fence, wrong, Capacity(1, 0, 0)), pipeline.now))
    assert pipeline.reason("a") == "INTERNAL"
    assert pipeline.counter("formations_broken") == 1


def test_tick_is_asked_for_in_time_when_a_round_is_open() -> None:
    pipeline = FakePipeline()
    pipeline.hold = {SendRound}
    pipeline.submit("a", 40)
    assert pipeline.machine.next_deadline() == pytest.approx(pipeline.now + 1.0)
    pipeline.post(Tick(pipeline.now + 1.0))
    assert pipeline.state("a") == "waiting"
    assert pipeline.machine.next_deadline() == pytest.approx(pipeline.now + 1.1)
