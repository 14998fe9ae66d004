"""The stage core as its shells see it: events in, actions out, exact blocks and counts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.stage_core import StageDriver
from wavepp_proto.terms import Prepare, Row, VoteOutcome


@pytest.fixture
def stage() -> Iterator[StageDriver]:
    driver = StageDriver.joined()
    yield driver
    driver.machine.check()


def test_prompt_is_reused_up_to_the_last_boundary_when_sent_again(stage: StageDriver) -> None:
    tokens = list(range(10))
    first = stage.prefill("a", tokens)
    assert first.work.rows[0].blocks.tolist() == [0, 1, 2]
    again = stage.prefill("b", tokens)
    row = again.work.rows[0]
    assert (row.start, row.length) == (8, 2)
    assert row.blocks.tolist() == [0, 1, 2]  # blocks 0 and 1 reused, 2 was freed and taken again
    assert row.token_ids is not None
    assert row.token_ids.tolist() == [8, 9]
    capacity = stage.machine.capacity()
    assert (capacity.free_blocks, capacity.evictable_blocks, capacity.escrowed_blocks) == (14, 2, 0)


def test_vote_is_no_capacity_when_the_pool_is_promised(stage: StageDriver) -> None:
    a = stage.announce("a", range(60))
    b = stage.announce("b", range(100, 108))
    votes = stage.votes(prepares=[Prepare(a, 0), Prepare(b, 0)])
    assert [vote.outcome for vote in votes] == [VoteOutcome.COMMITTED, VoteOutcome.NO_CAPACITY]
    assert votes[1].shortfall[0].blocks == 1
    stage.release(a)
    assert stage.prepare(b).outcome is VoteOutcome.COMMITTED


def test_chunk_is_void_when_it_does_not_continue_the_sequence(stage: StageDriver) -> None:
    a = stage.announce("a", range(10))
    stage.prepare(a)
    prepared, done = stage.run_wave(Row(a, 4, 6, final=True))
    assert prepared.work.rows[0].void
    assert prepared.faults[0].error.reason == "ROW_VOIDED"
    assert done.void_bitmap == 1
