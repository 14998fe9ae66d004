"""What the stage machine makes of a cache that copies and keeps recurrent states: order, once each, and voids."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.scripted_cache import ScriptedCache
from tests.harness.stage_core import StageDriver, join_plan, key
from wavepp_proto.errors import RowVoided
from wavepp_proto.terms import CacheGroup, HoldKey, Incarnation, Prepare, Row, WaveOrdinal
from wavepp_stage.core import events as ev
from wavepp_stage.core.cache_manager import Materialised
from wavepp_stage.core.machine import StageMachine
from wavepp_stage.core.work import StateWork

BOTH = (CacheGroup.ATTENTION, CacheGroup.RECURRENT)
PLAN = join_plan(groups=BOTH, state_slots=8, host_pool_blocks=32)
A, B_ROW = Row(key("a"), 0, 8), Row(key("b"), 0, 8)


class Stage(StageDriver):
    """Every plan builds a scripted cache of its own; "a" and "b" are committed at 0."""

    def __init__(self) -> None:
        self.caches: list[ScriptedCache] = []
        machine = StageMachine(Incarnation(7), lambda plan, feed: self._make())
        super().__init__(machine, PLAN)
        self.post(ev.JoinAsked(PLAN, 0.0))
        for name in "ab":
            self.prepare(self.announce(name, range(40)))

    def _make(self) -> ScriptedCache:
        self.caches.append(ScriptedCache())
        return self.caches[-1]

    @property
    def cache(self) -> ScriptedCache:
        return self.caches[-1]

    def ask(self, ordinal: int) -> list[ev.Action]:
        return self.post(ev.PrepareWave(WaveOrdinal(ordinal), self.now))


@pytest.fixture
def stage() -> Iterator[Stage]:
    driver = Stage()
    yield driver
    driver.machine.check()


def lost(hold: HoldKey) -> RowVoided:
    return RowVoided("a copy failed", request_id=hold.request_id, attempt=hold.attempt)


def started(actions: list[ev.Action]) -> list[int]:
    return [action.lot.number for action in actions if isinstance(action, ev.StartCopies)]


def test_wave_waits_when_any_of_its_rows_is_copied_and_every_row_has_begun(stage: Stage) -> None:
    """field bugs 3 and 17: no wave runs before all of its blocks are there."""
    stage.cache.steps[A.key] += [Materialised.COPYING, Materialised.COPYING]
    stage.cache.steps[B_ROW.key] += [Materialised.COPYING]
    stage.cache.copy(1)
    stage.send_wave(A, B_ROW)
    assert [lot.number for lot in stage.lots] == [1]  # any event hands out what is due
    assert stage.ask(1) == [ev.WaveWaits(WaveOrdinal(1))]
    assert [call[:2] for call in stage.cache.called[-2:]] == [("materialise", A.key), ("materialise", B_ROW.key)]
    stage.end_copies()
    assert stage.ask(1) == [ev.WaveWaits(WaveOrdinal(1))]
    assert stage.ask(1)[0].work.rows[0].key == A.key  # type: ignore[union-attr]
    assert stage.cache.names().count("materialise") == 5  # "b" was done after its second call
    assert stage.cache.names().count("plan_state") == 2


def test_preparing_rests_when_a_slice_is_done_and_more_remains(stage: Stage) -> None:
    stage.cache.steps[A.key] += [Materialised.COPYING]
    stage.cache.steps[B_ROW.key] += [Materialised.MORE, Materialised.MORE]
    stage.send_wave(A, B_ROW)
    assert (stage.ask(1), stage.ask(1)) == ([], [])
    assert isinstance(stage.ask(1)[0], ev.WavePrepared)
    assert [name for name in stage.cache.names() if name == "plan_state"] == ["plan_state"] * 2


def test_lots_are_started_in_order_behind_the_event_that_made_them_due(stage: Stage) -> None:
    stage.cache.copy(1)
    stage.cache.copy(2)
    assert started(stage.post(stage.next_round())) == [1, 2]
    assert started(stage.post(stage.next_round())) == []
    stage.cache.copy(3)
    assert started(stage.post(ev.CopiesEnded(1, True, 0.0))) == [3]
    assert stage.post(ev.CopiesEnded(2, False, 0.0)) == []
    assert stage.cache.called[-2:] == [("copied", 1, True), ("copied", 2, False)]


def test_copy_that_ends_behind_its_formation_still_reaches_the_cache(stage: Stage) -> None:
    stage.cache.copy(1)
    stage.post(ev.FormationEnd(stage.fence(), 0.0))
    stage.end_copies(ok=False)
    assert stage.cache.called[-1] == ("copied", 1, False)


def test_copy_of_a_replaced_cache_is_not_taken_for_one_of_its_successor(stage: Stage) -> None:
    stage.cache.copy(1)
    stage.cache.copy(2)
    stage.rejoin(join_plan(formation=2, pool_blocks=12))
    assert len(stage.lots) == 0  # they were never handed out
    stage.cache.copy(1)
    stage.votes()
    stage.rejoin(join_plan(formation=3, pool_blocks=14))
    stage.cache.copy(1)
    stage.votes()
    assert [lot.number for lot in stage.lots] == [1, 2]
    stage.end_copies()
    assert "copied" not in stage.cache.names()
    stage.end_copies()
    assert stage.cache.called[-1] == ("copied", 1, True)


def test_request_is_void_and_the_wave_flows_when_its_copy_failed(stage: Stage) -> None:
    stage.cache.steps[A.key] += [Materialised.COPYING, lost(A.key)]
    stage.cache.steps[B_ROW.key] += [Materialised.COPYING, Materialised.COPYING]
    stage.send_wave(A, B_ROW)
    assert stage.ask(1) == [ev.WaveWaits(WaveOrdinal(1))]
    assert stage.ask(1) == [ev.WaveWaits(WaveOrdinal(1))]  # "a" has failed, "b" is still copied
    (prepared,) = stage.ask(1)
    assert isinstance(prepared, ev.WavePrepared)
    assert [row.void for row in prepared.work.rows] == [True, False]
    assert [(fault.row, fault.error.message) for fault in prepared.faults] == [(0, "a copy failed")]
    done = stage.retire_wave(1, faults=prepared.faults)
    assert done.void_bitmap == 1
    assert stage.cache.called[-1] == ("publish", B_ROW.key, 8)
    assert "discard" not in stage.cache.names()  # it never owned anything
    stage.release(A.key, 1)
    assert stage.cache.names()[-1] == "release"


def test_release_waits_when_its_request_is_being_copied(stage: Stage) -> None:
    stage.cache.steps[A.key] += [Materialised.COPYING]
    stage.send_wave(A)
    stage.ask(1)
    stage.release(A.key, ended=True)
    assert "release" not in stage.cache.names()
    assert not stage.prepare_wave(1).work.rows[0].void
    stage.retire_wave(1)
    assert stage.cache.names()[-2:] == ["publish", "release"]
    assert stage.machine.inventory().announced == (B_ROW.key,)


def test_snapshots_are_planned_once_for_each_row_when_waves_are_prepared_ahead(stage: Stage) -> None:
    stage.cache.steps[A.key] += [Materialised.MORE, Materialised.COPYING]
    stage.send_wave(Row(A.key, 0, 8, snapshots=(4, 8)))
    stage.send_wave(Row(A.key, 8, 8, snapshots=(12,)))
    stage.send_wave(Row(A.key, 16, 24, final=True))
    stage.ask(1)
    stage.ask(1)
    works = [stage.prepare_wave(ordinal).work.rows[0] for ordinal in (1, 2, 3)]
    assert [work.state for work in works] == [
        StateWork(0, None, ((4, 1), (8, 2))),
        StateWork(0, None, ((12, 1),)),
        StateWork(0),
    ]
    planned = [call[2:] for call in stage.cache.called if call[0] == "plan_state"]
    assert planned == [(0, (4, 8)), (8, (12,)), (16, ())]


def test_snapshots_are_discarded_when_a_row_is_found_void_as_its_wave_retires(stage: Stage) -> None:
    """field bug 21: what was never computed is never published."""
    for start in (0, 8, 16):
        stage.send_wave(Row(A.key, start, 8, snapshots=(start + 8,)))
        stage.prepare_wave(stage.wave_ordinal)
    stage.retire_wave(1)
    stage.retire_wave(2, void=1)  # an engine of an earlier stage found it wrong
    stage.retire_wave(3)
    ends: list[tuple[object, ...]] = [call for call in stage.cache.called if call[0] in ("publish", "discard")]
    discard = ("discard", A.key)
    assert ends == [("publish", A.key, 8), discard, discard]


def test_inventory_counts_states_and_tiers(stage: Stage) -> None:
    found = stage.machine.inventory()
    assert (found.state_slots, found.cached_states, found.quarantined_states) == (8, 3, 4)
    assert (found.host_pool_blocks, found.host_cached_blocks) == (32, 5)
    assert StageMachine(Incarnation(7)).inventory().state_slots == 0


def test_headroom_and_snapshots_reach_the_cache_as_they_were_asked(stage: Stage) -> None:
    hold = stage.announce("c", range(40))
    stage.votes(prepares=[Prepare(hold, 4, (), snapshots=3, ignore_headroom=True)])
    stage.revise(hold, 0, snapshots=5)
    asked = [call for call in stage.cache.called if call[1] == hold and call[0] in ("lease", "revise")]
    assert asked == [("lease", hold, 4, 3, True), ("revise", hold, 0, 5)]
