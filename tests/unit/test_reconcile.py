"""From votes to one endpoint over groups: the fixed point is the deepest place that everybody has."""

from __future__ import annotations

import random

import pytest

from wavepp_controller.core.attempt import Held
from wavepp_controller.core.reconcile import Agreed, GiveUp, Lower, decide, held_after
from wavepp_controller.core.request_table import RequestInput
from wavepp_proto.terms import Attempt, DaemonKey, HoldKey, PipelineId, RequestId, StageIndex, Vote, VoteOutcome

K = 1024
REQUEST = HoldKey(RequestId("r"), Attempt(1))


def stage(number: int) -> DaemonKey:
    return DaemonKey(PipelineId("p"), StageIndex(number))


def vote(asked: int, places: set[int]) -> Vote:
    """What a stage answers that can be used at `places` and, as ever, at 0."""
    endpoint = max((place for place in places if place <= asked), default=0)
    outcome = VoteOutcome.COMMITTED if endpoint == asked else VoteOutcome.LOWER
    return Vote(REQUEST, outcome, endpoint, max(places, default=0))


def reconcile(candidate: int, stages: list[set[int]]) -> list[list[int]]:
    """Endpoints held on every stage after each round, until all agree."""
    held: dict[DaemonKey, Held] = {}
    asked, endpoint = {stage(number): candidate for number in range(len(stages))}, candidate
    rounds = []
    while True:
        votes = {key: vote(endpoint, stages[key.stage]) for key in asked}
        held |= {key: held_after(one) for key, one in votes.items()}
        rounds.append([held[stage(number)].endpoint for number in range(len(stages))])
        decision = decide(votes, held)
        if isinstance(decision, Agreed):
            assert set(rounds[-1]) == {decision.endpoint}
            return rounds
        assert isinstance(decision, Lower)
        assert decision.endpoint <= endpoint
        asked, endpoint = dict.fromkeys(decision.daemons, decision.endpoint), decision.endpoint


def test_stages_fall_to_the_common_snapshot_when_lowering_forces_an_earlier_one() -> None:
    """Field bug 16: the worked example of the paper's section 4.4."""
    assert reconcile(80 * K, [{64 * K, 72 * K, 90 * K}, {64 * K, 80 * K}]) == [
        [72 * K, 80 * K],
        [72 * K, 64 * K],
        [64 * K, 64 * K],
    ]


@pytest.mark.parametrize(
    ("candidate", "stages", "rounds"),
    [
        (80, [{80}, {80}], [[80, 80]]),
        (80, [{64}, {64}], [[64, 64], [64, 64]]),
        (80, [set(), {80}], [[0, 80], [0, 0]]),
        (0, [{64}, set()], [[0, 0]]),
        (160, [set(range(16, 161, 16)), set(range(16, 97, 16))], [[160, 96], [96, 96]]),
    ],
)
def test_stages_agree_in_as_few_rounds_as_votes_allow(
    candidate: int, stages: list[set[int]], rounds: list[list[int]]
) -> None:
    assert reconcile(candidate, stages) == rounds


def test_deepest_common_place_is_found_within_the_bound_when_snapshots_lie_anywhere() -> None:
    """Field bug 16: monotone, bounded by the places there are, and nothing common is passed over."""
    rng = random.Random(16)
    for _ in range(1000):
        stages = [set(rng.sample(range(1, 40), rng.randint(0, 12))) for _ in range(rng.randint(1, 5))]
        candidate = rng.randint(0, 42)
        rounds = reconcile(candidate, stages)
        common = set.intersection(*stages)
        assert rounds[-1][0] == max((place for place in common if place <= candidate), default=0)
        lowest = [min(held) for held in rounds]
        assert lowest == sorted(lowest, reverse=True)
        places = {0} | {place for stage in stages for place in stage if place <= candidate}
        assert len(rounds) <= len(places) + 1


def test_endpoint_is_the_minimum_when_stages_hold_10_7_9_and_4_blocks() -> None:
    """Field bug 15: no stage skips more than an earlier one produces; the excess is let go."""
    stages = [set(range(16, blocks * 16 + 1, 16)) for blocks in (10, 7, 9, 4)]
    assert reconcile(160, stages) == [[160, 112, 144, 64], [64] * 4]


def test_request_is_given_up_when_a_stage_has_no_room_or_does_not_know_it() -> None:
    committed = Vote(REQUEST, VoteOutcome.COMMITTED, 64, 64)
    short = Vote(REQUEST, VoteOutcome.NO_CAPACITY, 0, 64)
    lost = Vote(REQUEST, VoteOutcome.NO_HOLD, 0, 0)
    unknown = Vote(REQUEST, VoteOutcome.NOT_ANNOUNCED, 0, 0)
    assert decide({stage(0): committed, stage(1): short}, {}) == GiveUp(RequestInput.RUN_SHORT, (stage(1),))
    assert decide({stage(0): lost, stage(1): committed}, {}) == GiveUp(RequestInput.RUN_SHORT, (stage(0),))
    assert decide({stage(0): short, stage(1): unknown}, {}) == GiveUp(RequestInput.NOT_ANNOUNCED, (stage(1),))
