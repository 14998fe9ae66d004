"""Prepare rounds on a stage: votes, order, replay, and what a malformed round changes (nothing)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.harness.stage_core import StageDriver, join_plan, key
from wavepp_proto.errors import InvalidRequest, StaleMessage
from wavepp_proto.terms import (
    CacheGroup,
    GroupEndpoint,
    Prepare,
    Release,
    Revise,
    RoundOrdinal,
    Row,
    VoteOutcome,
    WaveOrdinal,
)
from wavepp_stage.core import block_cache
from wavepp_stage.core import events as ev


@pytest.fixture
def stage() -> Iterator[StageDriver]:
    driver = StageDriver.joined()
    yield driver
    driver.machine.check()


def room(driver: StageDriver) -> tuple[int, int, int]:
    """(free, evictable, escrowed)."""
    capacity = driver.machine.capacity()
    return capacity.free_blocks, capacity.evictable_blocks, capacity.escrowed_blocks


def test_vote_is_no_capacity_when_the_pool_is_promised(stage: StageDriver) -> None:
    a, b = stage.announce("a", range(60)), stage.announce("b", range(100, 108))
    votes = stage.votes(prepares=[Prepare(a, 0), Prepare(b, 0)])
    assert [vote.outcome for vote in votes] == [VoteOutcome.COMMITTED, VoteOutcome.NO_CAPACITY]
    assert votes[1].shortfall[0].blocks == 1
    stage.release(a)
    assert stage.prepare(b).outcome is VoteOutcome.COMMITTED


def test_round_applies_releases_then_revises_then_prepares(stage: StageDriver) -> None:
    stage.prefill("x", range(9))
    a, b, c = stage.announce("a", range(9)), stage.announce("b", [9] * 40), stage.announce("c", [8] * 16)
    assert stage.prepare(a, 8).endpoint == 8
    stage.prepare(b)
    assert room(stage) == (14, 0, 11)
    votes = stage.votes(releases=[Release(b)], revises=[Revise(a, 4)], prepares=[Prepare(c, 0)])
    assert [(vote.key, vote.outcome, vote.endpoint) for vote in votes] == [
        (a, VoteOutcome.COMMITTED, 4),
        (c, VoteOutcome.COMMITTED, 0),
    ]
    assert room(stage) == (14, 1, 6)


def test_vote_is_lower_and_open_when_less_is_resident_than_hinted(stage: StageDriver) -> None:
    stage.prefill("x", range(9))
    a = stage.announce("a", [*range(8), 50, 51, 52, 53, 54])
    vote = stage.prepare(a, 12)
    assert (vote.outcome, vote.endpoint, vote.own_hit, vote.demand_blocks) == (VoteOutcome.LOWER, 8, 8, 2)
    revised = stage.revise(a, 8)
    assert (revised.outcome, revised.endpoint, revised.own_hit) == (VoteOutcome.COMMITTED, 8, 8)


def test_vote_is_lower_when_a_revise_asks_for_more_than_is_held(stage: StageDriver) -> None:
    stage.prefill("x", range(9))
    a = stage.announce("a", [*range(8), 50])
    stage.prepare(a, 4)
    vote = stage.revise(a, 8)
    assert (vote.outcome, vote.endpoint) == (VoteOutcome.LOWER, 4)


def test_revise_keeps_the_old_hold_when_room_is_short() -> None:
    stage = StageDriver.joined(join_plan(pool_blocks=6))
    stage.prefill("x", range(17))
    a, b = stage.announce("a", range(17)), stage.announce("b", [*range(16), 77])
    stage.prepare(a, 16)
    stage.prepare(b, 16)
    vote = stage.revise(a, 4)
    assert (vote.outcome, vote.endpoint, vote.shortfall[0].blocks) == (VoteOutcome.NO_CAPACITY, 16, 3)
    assert stage.prepare(a, 16).outcome is VoteOutcome.COMMITTED


def test_prepare_is_answered_alike_when_it_comes_again(stage: StageDriver) -> None:
    stage.prefill("x", range(9))
    a = stage.announce("a", range(9))
    first = stage.prepare(a, 8)
    before = room(stage)
    assert stage.prepare(a, 8) == first
    assert room(stage) == before


def test_prepare_starts_over_when_it_proposes_another_candidate(stage: StageDriver) -> None:
    stage.prefill("x", range(9))
    a = stage.announce("a", range(9))
    assert stage.prepare(a, 8).endpoint == 8
    vote = stage.prepare(a, 4)
    assert (vote.outcome, vote.endpoint, vote.own_hit) == (VoteOutcome.COMMITTED, 4, 8)
    assert room(stage) == (14, 1, 2)


def test_prepare_of_a_running_request_changes_nothing(stage: StageDriver) -> None:
    a = stage.announce("a", range(9))
    stage.prepare(a)
    stage.run_wave(Row(a, 0, 4))
    assert stage.prepare(a, 0).outcome is VoteOutcome.COMMITTED
    assert stage.prepare(a, 4).outcome is VoteOutcome.NO_HOLD
    assert stage.revise(a, 0).outcome is VoteOutcome.NO_HOLD


def test_revise_is_refused_when_the_hold_was_materialised_by_a_row_that_failed(stage: StageDriver) -> None:
    a = stage.announce("a", range(9))
    stage.prepare(a)
    prepared, _ = stage.run_wave(Row(a, 4, 5, final=True))
    assert prepared.faults
    assert stage.revise(a, 0).outcome is VoteOutcome.NO_HOLD


def test_revise_is_refused_when_the_hold_is_between_two_slices(
    stage: StageDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_cache, "EVICTION_SLICE", 2)
    stage.prefill("x", range(64))
    a = stage.announce("a", range(100, 116))
    stage.prepare(a)
    stage.send_wave(Row(a, 0, 16, final=True))
    assert stage.post(ev.PrepareWave(WaveOrdinal(2), 0.0)) == [ev.DigestChanged()]  # a slice, no wave yet
    assert stage.machine.inventory().holds[0].phase == "materialising"
    assert stage.revise(a, 0).outcome is VoteOutcome.NO_HOLD
    assert stage.prepare(a, 0).outcome is VoteOutcome.COMMITTED
    stage.release(a, 2)  # waits: the wave is in flight
    assert not stage.prepare_wave(2).work.rows[0].void
    stage.retire_wave(2)
    assert stage.machine.inventory().holds == ()


def test_vote_names_what_is_missing_when_the_stage_does_not_know_the_request(stage: StageDriver) -> None:
    votes = stage.votes(revises=[Revise(key("a"), 0)], prepares=[Prepare(key("b"), 0)])
    assert [vote.outcome for vote in votes] == [VoteOutcome.NO_HOLD, VoteOutcome.NOT_ANNOUNCED]


def test_round_is_answered_from_memory_when_it_comes_again(stage: StageDriver) -> None:
    a = stage.announce("a", range(9))
    asked = stage.next_round(prepares=[Prepare(a, 0)])
    first = stage.one(asked, ev.SendVotes)
    second = stage.one(stage.next_round(releases=[Release(a)]), ev.SendVotes)
    assert stage.one(asked, ev.SendVotes) == first
    assert room(stage) == (16, 0, 0)  # and was not applied again
    assert second.votes.votes == ()


def test_votes_are_replayed_in_order_when_a_new_stream_sends_unanswered_rounds_again(stage: StageDriver) -> None:
    """field bugs 1 and 2: a decision is applied once, whatever became of the answer."""
    stage.prefill("x", range(9))
    a, b = stage.announce("a", range(9)), stage.announce("b", range(20, 29))
    rounds = [
        stage.next_round(prepares=[Prepare(a, 8), Prepare(b, 0)]),
        stage.next_round(revises=[Revise(a, 4)]),
        stage.next_round(releases=[Release(b, ended=True)]),
    ]
    first = [stage.post(event)[0] for event in rounds]
    before = stage.machine.inventory()
    assert [stage.post(event) for event in rounds] == [[votes] for votes in first]
    assert stage.machine.inventory() == before


def test_round_is_stale_when_one_before_it_is_missing(stage: StageDriver) -> None:
    a = stage.announce("a", range(9))
    stage.prepare(a)
    stage.round_ordinal += 1
    before = stage.machine.inventory()
    with pytest.raises(StaleMessage, match="a round is missing") as caught:
        stage.post(stage.next_round(releases=[Release(a)]))
    assert caught.value.fields["field"] == "ordinal"
    assert stage.machine.inventory() == before
    stage.round_ordinal = 1
    assert stage.votes() == ()  # the one that was missing


def test_first_round_of_a_formation_may_carry_any_ordinal(stage: StageDriver) -> None:
    stage.votes()
    stage.rejoin(join_plan(formation=2))
    stage.round_ordinal = 40
    assert stage.votes() == ()


def test_first_round_is_missed_when_the_plan_names_it(stage: StageDriver) -> None:
    stage.rejoin(replace(join_plan(formation=2), first_round=RoundOrdinal(40)))
    assert stage.machine.inventory().last_round == 39
    stage.round_ordinal = 41
    with pytest.raises(StaleMessage, match="a round is missing"):
        stage.votes()
    stage.round_ordinal = 39
    assert [stage.votes(), stage.votes()] == [(), ()]


@pytest.mark.parametrize(
    "entries",
    [
        {"prepares": [Prepare(key("a"), 3)]},
        {"prepares": [Prepare(key("a"), -4)]},
        {"revises": [Revise(key("a"), 3)]},
        {"prepares": [Prepare(key("a"), 0)] * 33},
        {"prepares": [Prepare(key("a"), 0, (GroupEndpoint(CacheGroup.RECURRENT, 0),))]},
    ],
)
def test_round_changes_nothing_when_it_is_malformed(
    stage: StageDriver, entries: dict[str, list[Prepare] | list[Revise]]
) -> None:
    a = stage.announce("a", range(9))
    stage.prepare(a)
    bad = stage.next_round(releases=[Release(a)], **entries)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest):
        stage.post(bad)
    assert room(stage) == (16, 0, 3)
    stage.round_ordinal -= 1
    assert stage.votes() == ()
