"""A stage with a host tier: waves wait for their copies, releases and formation ends come in between."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.stage_core import StageDriver, join_plan
from wavepp_proto.terms import HoldKey, Row, VoteOutcome, WaveOrdinal
from wavepp_stage.core import events as ev
from wavepp_stage.core.work import CopyDirection

PLAN = join_plan(pool_blocks=4, host_pool_blocks=8)
OLD, NEW = range(16), range(100, 116)


@pytest.fixture
def stage() -> Iterator[StageDriver]:
    """The pool is full of the blocks of a prompt that is over."""
    driver = StageDriver.joined(PLAN)
    driver.prefill("old", OLD)
    yield driver
    driver.machine.check()


def ask(stage: StageDriver) -> list[ev.Action]:
    return stage.post(ev.PrepareWave(WaveOrdinal(stage.wave_ordinal), stage.now))


def copying(stage: StageDriver) -> HoldKey:
    """A new prompt's wave waits for the old one's blocks to leave."""
    hold = stage.announce("new", NEW)
    assert stage.prepare(hold).outcome is VoteOutcome.COMMITTED
    stage.send_wave(Row(hold, 0, 16, True))
    assert ask(stage)[0] == ev.WaveWaits(WaveOrdinal(2))
    assert [(lot.direction, len(lot)) for lot in stage.lots] == [(CopyDirection.OFFLOAD, 4)]
    return hold


def test_wave_runs_once_the_victims_are_on_the_host(stage: StageDriver) -> None:
    hold = copying(stage)
    assert ask(stage)[0] == ev.WaveWaits(WaveOrdinal(2))
    stage.end_copies()
    assert isinstance(ask(stage)[0], ev.WavePrepared)
    stage.retire_wave(2)
    stage.release(hold, 2, ended=True)
    found = stage.machine.inventory()
    assert (found.cached_blocks, found.host_cached_blocks, found.host_pool_blocks) == (4, 4, 8)
    assert stage.prepare(stage.announce("again", OLD)).own_hit == 12  # on the host is reusable too


def test_release_is_applied_behind_the_copies_and_the_wave(stage: StageDriver) -> None:
    hold = copying(stage)
    stage.release(hold, ended=True)
    assert stage.machine.inventory().holds[0].phase == "materialising"
    assert not stage.prepare_wave(2).work.rows[0].void
    stage.retire_wave(2)
    assert stage.machine.inventory().holds == ()


def test_blocks_wait_in_quarantine_when_the_formation_ends_while_they_are_copied(stage: StageDriver) -> None:
    """field bug 42: a block that a copy still reads is nobody's until it is over."""
    copying(stage)
    stage.rejoin(join_plan(formation=2, pool_blocks=4, host_pool_blocks=8))
    assert stage.machine.inventory().quarantined_blocks == 4
    stage.end_copies()
    stage.post(ev.ExecutorStopped(1, stage.now))
    found = stage.machine.inventory()
    assert (found.quarantined_blocks, found.capacity.free_blocks + found.capacity.evictable_blocks) == (0, 4)
    assert stage.prepare(stage.announce("new", NEW, attempt=2)).outcome is VoteOutcome.COMMITTED


def test_only_who_needed_it_is_void_when_bringing_a_prefix_back_fails(stage: StageDriver) -> None:
    hold = copying(stage)
    stage.end_copies()
    ask(stage)
    stage.retire_wave(2)
    stage.release(hold, 2, ended=True)
    again = stage.announce("again", OLD)
    assert stage.prepare(again, 12).outcome is VoteOutcome.COMMITTED
    stage.send_wave(Row(again, 12, 4, True))
    prepared = None
    while prepared is None:
        prepared = next((action for action in ask(stage) if isinstance(action, ev.WavePrepared)), None)
        if stage.lots:
            stage.end_copies(ok=stage.lots[0].direction is CopyDirection.OFFLOAD)
    assert [fault.error.reason for fault in prepared.faults] == ["ROW_VOIDED"]
    done = stage.retire_wave(3, faults=prepared.faults)
    assert done.void_bitmap == 1
    stage.release(again, 3, ended=True)
    assert stage.prepare(stage.announce("more", OLD)).own_hit == 0  # what could not be read is gone


def test_stage_fences_itself_while_it_copies(stage: StageDriver) -> None:
    stage.hear()
    copying(stage)
    stage.now = 2.0
    assert ask(stage)[:2] == [ev.FormationEnded(1), ev.SelfFenced(2.0)]
    stage.end_copies()
    stage.post(ev.ExecutorStopped(1, stage.now))
    found = stage.machine.inventory()
    assert (found.holds, found.quarantined_blocks) == ((), 0)
