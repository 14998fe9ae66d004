"""A stage with recurrent layers: hits of both groups, earlier snapshots, and rows that begin from one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from tests.harness.stage_core import StageDriver, join_plan
from wavepp_proto.terms import CacheGroup, GroupEndpoint, HoldKey, Revise, Row, Vote, VoteOutcome
from wavepp_stage.core import events as ev
from wavepp_stage.core.work import RowWork

ATTENTION, RECURRENT = CacheGroup.ATTENTION, CacheGroup.RECURRENT
PROMPT = range(24)
PLAN = join_plan(groups=(ATTENTION, RECURRENT), state_slots=6)


@pytest.fixture
def stage() -> Iterator[StageDriver]:
    driver = StageDriver.joined(PLAN)
    yield driver
    driver.machine.check()


def compute(stage: StageDriver, name: str, *, snapshots: tuple[int, ...] = (), void: int = 0) -> RowWork:
    """Run PROMPT as one row of one wave, and release it."""
    hold = stage.announce(name, PROMPT)
    stage.prepare(hold, 0, snapshots=len(snapshots))
    stage.send_wave(Row(hold, 0, len(PROMPT), True, snapshots))
    prepared = stage.prepare_wave(stage.wave_ordinal)
    stage.retire_wave(stage.wave_ordinal, void)
    stage.release(hold, stage.wave_ordinal, ended=True)
    return prepared.work.rows[0]


def hits(vote: Vote) -> tuple[int, dict[CacheGroup, int]]:
    return vote.own_hit, {group.group: group.endpoint for group in vote.group_endpoints}


def runs(stage: StageDriver, hold: HoldKey, start: int, tokens: Sequence[int] = PROMPT) -> RowWork:
    prepared, _ = stage.run_wave(Row(hold, start, len(tokens) - start, True))
    return prepared.work.rows[0]


def test_hit_is_the_deepest_snapshot_when_blocks_reach_further(stage: StageDriver) -> None:
    first = compute(stage, "a", snapshots=(8, 16))
    assert first.state is not None
    assert [position for position, _ in first.state.snapshots] == [8, 16]
    hold = stage.announce("b", PROMPT)
    vote = stage.prepare(hold, 16)
    assert vote.outcome is VoteOutcome.COMMITTED
    assert hits(vote) == (16, {ATTENTION: 20, RECURRENT: 16})
    row = runs(stage, hold, 16)
    assert row.state is not None
    assert row.state.restore == dict(first.state.snapshots)[16]
    assert row.blocks.tolist()[:4] == first.blocks.tolist()[:4]


def test_start_is_zero_when_blocks_are_there_and_no_snapshot_is(stage: StageDriver) -> None:
    """field bug 18: an empty state is never taken for the state behind a prefix."""
    compute(stage, "a")
    hold = stage.announce("b", PROMPT)
    vote = stage.prepare(hold, 20)
    assert (vote.outcome, vote.endpoint) == (VoteOutcome.LOWER, 0)
    assert hits(vote) == (0, {ATTENTION: 20, RECURRENT: 0})
    assert stage.revise(hold, 0).outcome is VoteOutcome.COMMITTED
    row = runs(stage, hold, 0)
    assert row.state is not None
    assert row.state.restore is None


def test_vote_falls_to_an_earlier_snapshot_when_the_common_endpoint_has_none(stage: StageDriver) -> None:
    """The worked example of the design in small: 72K is asked, 64K is held and said."""
    compute(stage, "a", snapshots=(8, 20))
    hold = stage.announce("b", PROMPT)
    assert stage.prepare(hold, 20).outcome is VoteOutcome.COMMITTED
    lower = stage.revise(hold, 12)
    assert (lower.outcome, lower.endpoint) == (VoteOutcome.LOWER, 8)
    assert stage.machine.inventory().holds[0].phase == "escrowed"
    assert stage.revise(hold, 8).outcome is VoteOutcome.COMMITTED
    row = runs(stage, hold, 8)
    assert row.state is not None
    assert row.state.restore is not None


def test_no_snapshot_is_published_when_its_row_was_void(stage: StageDriver) -> None:
    """field bug 21: neither a block nor a state of a wave that went wrong is ever reused."""
    compute(stage, "a", snapshots=(8, 16), void=1)
    assert hits(stage.prepare(stage.announce("b", PROMPT), 0)) == (0, {ATTENTION: 0, RECURRENT: 0})
    room = stage.machine.capacity()
    assert (room.recurrent_free, room.recurrent_evictable, room.recurrent_escrowed) == (6, 0, 1)


def test_shortfall_names_slots_when_states_are_short(stage: StageDriver) -> None:
    a, b = stage.announce("a", range(8)), stage.announce("b", range(20, 28))
    assert stage.prepare(a, 0, snapshots=3).outcome is VoteOutcome.COMMITTED
    vote = stage.prepare(b, 0, snapshots=2)
    assert vote.outcome is VoteOutcome.NO_CAPACITY
    assert [(missing.group, missing.blocks) for missing in vote.shortfall] == [(RECURRENT, 1)]
    stage.release(a)
    assert stage.prepare(b, 0, snapshots=2).outcome is VoteOutcome.COMMITTED


def test_digest_readers_are_woken_when_only_slots_come_back(stage: StageDriver) -> None:
    """Who waits for a slot looks again as soon as there is one."""
    a = stage.announce("a", range(8))
    stage.prepare(a, 0, snapshots=3)
    assert stage.post(stage.next_round(revises=[Revise(a, 0, snapshots=1)]))[-1] == ev.DigestChanged()
    assert stage.post(stage.next_round(revises=[Revise(a, 0, snapshots=2)]))[1:] == []


def test_recurrent_stage_hits_what_its_snapshots_reach() -> None:
    """Its blocks are of no bytes: they number the prefix that a snapshot lies on."""
    stage = StageDriver.joined(join_plan(groups=(RECURRENT,), state_slots=6))
    compute(stage, "a", snapshots=(16,))
    vote = stage.prepare(stage.announce("b", PROMPT), 16)
    assert (vote.outcome, vote.own_hit) == (VoteOutcome.COMMITTED, 16)
    assert GroupEndpoint(RECURRENT, 16) in vote.group_endpoints
