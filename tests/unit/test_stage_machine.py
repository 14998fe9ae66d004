"""Authority and formations on a stage: fences, inventory, joins, quarantine, and who is woken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.harness.stage_core import StageDriver, join_plan, key
from wavepp_proto.errors import FormationEnded, JoinRefused, StaleMessage
from wavepp_proto.terms import (
    Epoch,
    Fence,
    Formation,
    Incarnation,
    Prepare,
    Release,
    Round,
    Row,
    WaveCommand,
    WaveOrdinal,
)
from wavepp_stage.core import events as ev
from wavepp_stage.core.block_cache import BlockCache
from wavepp_stage.core.machine import StageMachine


@pytest.fixture
def stage() -> Iterator[StageDriver]:
    driver = StageDriver.joined()
    yield driver
    driver.machine.check()


def room(driver: StageDriver) -> tuple[int, int, int]:
    """(free, evictable, escrowed)."""
    capacity = driver.machine.capacity()
    return capacity.free_blocks, capacity.evictable_blocks, capacity.escrowed_blocks


def stale(fence: Fence) -> list[ev.Event]:
    """Every fenced event of a formation, under `fence`."""
    frame = StageDriver(StageMachine(Incarnation(7)), join_plan()).frame("a", range(4))
    return [
        ev.Announced(replace(frame, fence=fence), 0.0),
        ev.RoundArrived(Round(replace(fence, ordinal=1), 1), 0.0),
        ev.WaveArrived(WaveCommand(replace(fence, ordinal=1), (Row(key("a"), 0, 4),)), 0.0),
        ev.ControllerHeard(fence, 0.0),
        ev.FormationEnd(fence, 0.0),
    ]


@pytest.mark.parametrize(
    "fence",
    [
        Fence(Epoch(0), Formation(1), Incarnation(7)),
        Fence(Epoch(2), Formation(1), Incarnation(7)),
        Fence(Epoch(1), Formation(0), Incarnation(7)),
        Fence(Epoch(1), Formation(2), Incarnation(7)),
        Fence(Epoch(1), Formation(1), Incarnation(6)),
    ],
)
def test_every_event_is_stale_when_any_part_of_its_fence_differs(stage: StageDriver, fence: Fence) -> None:
    before = stage.machine.inventory()
    for event in stale(fence):
        with pytest.raises(StaleMessage):
            stage.post(event)
    assert stage.machine.inventory() == before


def test_nothing_is_served_before_the_first_join() -> None:
    machine = StageMachine(Incarnation(7))
    for event in stale(Fence(Epoch(0), Formation(0), Incarnation(7)))[:-1]:
        with pytest.raises(FormationEnded):
            machine.handle(event)
    assert machine.digests_since(0) == []
    assert machine.capacity().free_blocks == 0
    machine.check()


def test_inventory_lists_every_hold_and_order_when_the_leader_asks(stage: StageDriver) -> None:
    a, b, c = stage.announce("a", range(9)), stage.announce("b", range(9)), stage.announce("c", range(9))
    stage.votes(prepares=[Prepare(a, 0), Prepare(b, 0)])
    _, done = stage.run_wave(Row(a, 0, 9, final=True))
    (taken,) = stage.post(ev.InventoryAsked(stage.fence(), 0.0))
    assert isinstance(taken, ev.InventoryTaken)
    found = taken.inventory
    assert [(hold.key, hold.phase) for hold in found.holds] == [(a, "owned"), (b, "committed")]
    assert found.announced == (a, b, c)
    assert (found.last_round, found.last_wave, found.running_hash) == (1, 1, done.running_hash)
    assert (found.pool_blocks, found.capacity) == (16, stage.machine.capacity())


def test_inventory_fences_before_it_lists_when_a_new_leader_asks(stage: StageDriver) -> None:
    """Nothing is listed that is not there: what the older leader had held went with its formation."""
    a = stage.announce("a", range(9))
    stage.votes(prepares=[Prepare(a, 0), Prepare(stage.announce("b", range(9)), 0)])
    stage.run_wave(Row(a, 0, 9, final=True))
    asked = ev.InventoryAsked(Fence(Epoch(5), Formation(0), Incarnation(7)), 0.0)
    ended, taken = stage.post(asked)[:2]
    assert ended == ev.FormationEnded(1)
    assert isinstance(taken, ev.InventoryTaken)
    assert (taken.inventory.holds, taken.inventory.announced) == ((), ())
    assert (taken.inventory.last_wave, taken.inventory.quarantined_blocks) == (0, 1)
    with pytest.raises(StaleMessage, match="epoch"):
        stage.votes()
    assert stage.one(asked, ev.InventoryTaken) == taken  # the same leader asks again: nothing ends
    assert stage.rejoin(join_plan(epoch=5, formation=1))[0] == ev.FormationStarted(
        join_plan(epoch=5, formation=1), rebuild=False, ended=0
    )


def test_lower_epoch_is_stale_when_it_asks_for_the_inventory_or_to_join(stage: StageDriver) -> None:
    stage.rejoin(join_plan(epoch=3, formation=1))
    for event in (
        ev.InventoryAsked(Fence(Epoch(2), Formation(0), Incarnation(7)), 0.0),
        ev.JoinAsked(join_plan(epoch=2, formation=9), 0.0),
        ev.JoinAsked(join_plan(epoch=3, formation=1), 0.0),
        ev.JoinAsked(join_plan(epoch=4, formation=1, incarnation=6), 0.0),
    ):
        with pytest.raises(StaleMessage):
            stage.post(event)


def test_cached_blocks_survive_when_a_new_formation_keeps_the_pool(stage: StageDriver) -> None:
    tokens = list(range(9))
    stage.prefill("a", tokens)
    position = stage.machine.digests_since(0)[-1].seq
    actions = stage.rejoin(join_plan(formation=2))
    assert actions[0] == ev.FormationStarted(join_plan(formation=2), rebuild=False, ended=1)
    assert stage.prepare(stage.announce("b", tokens)).own_hit == 8
    assert [digest.groups[0].count for digest in stage.machine.digests_since(position)] in ([], [2])


@pytest.mark.parametrize(
    "change", [{"layers": (4, 8)}, {"pool_blocks": 12}, {"block_tokens": 8}, {"stages": 3, "stage": 1}]
)
def test_cached_blocks_are_gone_when_a_new_formation_changes_the_stage(
    stage: StageDriver, change: dict[str, int]
) -> None:
    tokens = list(range(20))
    stage.prefill("a", tokens)
    assert stage.machine.digests_since(0)[-1].groups[0].count == 5
    plan = join_plan(formation=2, **change)  # type: ignore[arg-type]
    assert stage.rejoin(plan)[:1] == [ev.FormationStarted(plan, rebuild=True, ended=1)]
    assert stage.machine.digests_since(0)[-1].groups[0].count == 0
    assert stage.prepare(stage.announce("b", tokens)).own_hit == 0
    assert room(stage)[0] == plan.pool_blocks


def test_present_formation_goes_on_when_a_plan_is_refused(stage: StageDriver) -> None:
    with pytest.raises(JoinRefused):
        stage.post(ev.JoinAsked(join_plan(formation=2, pool_blocks=0), 0.0))
    stage.votes()


def test_blocks_come_back_when_the_executor_of_an_ended_formation_stops(stage: StageDriver) -> None:
    a, b = stage.announce("a", range(9)), stage.announce("b", range(20, 29))
    stage.votes(prepares=[Prepare(a, 0), Prepare(b, 0)])
    stage.run_wave(Row(a, 0, 4))
    assert stage.post(ev.FormationEnd(stage.fence(), 0.0))[0] == ev.FormationEnded(1)
    assert stage.post(ev.FormationEnd(stage.fence(), 0.0)) == []
    assert room(stage) == (13, 0, 0)  # one node and two private blocks wait; "b" had touched nothing
    with pytest.raises(FormationEnded):
        stage.votes()
    assert stage.post(ev.ExecutorStopped(1, 0.0)) == [ev.DigestChanged()]
    assert room(stage) == (15, 1, 0)


def test_old_waves_are_refused_when_their_executor_outlives_the_formation(stage: StageDriver) -> None:
    a = stage.announce("a", range(4))
    stage.prepare(a)
    stage.send_wave(Row(a, 0, 4, final=True))
    stage.prepare_wave(1)
    stage.rejoin(join_plan(formation=2))
    b = stage.announce("b", range(4))
    stage.prepare(b)
    stage.send_wave(Row(b, 0, 4, final=True))
    stage.prepare_wave(1)
    with pytest.raises(StaleMessage, match="formation has ended"):
        stage.post(ev.WaveRetired(WaveOrdinal(1), 0, (), (), 0.0, formation=1))
    assert room(stage) == (14, 0, 0)


def test_digest_readers_are_woken_when_residency_changes_or_room_grows(stage: StageDriver) -> None:
    stage.machine.digests_since(0)
    a = stage.announce("a", range(9))
    assert ev.DigestChanged() not in stage.post(stage.next_round(prepares=[Prepare(a, 0)]))  # less room: no hurry
    assert stage.post(stage.next_round(releases=[Release(a)]))[-1] == ev.DigestChanged()
    stage.prepare(a)
    stage.send_wave(Row(a, 0, 9, final=True))
    stage.prepare_wave(1)
    assert stage.post(ev.WaveRetired(WaveOrdinal(1), 0, (), (), 0.0))[-1] == ev.DigestChanged()


def test_requests_count_as_unadmitted_until_they_run(stage: StageDriver) -> None:
    a = stage.announce("a", range(9))
    stage.announce("b", range(9))
    stage.prepare(a)
    assert stage.machine.unadmitted_requests == 2
    stage.run_wave(Row(a, 0, 9, final=True))
    assert stage.machine.unadmitted_requests == 1


def test_broken_invariant_comes_back_as_an_action_when_nobody_sent_it() -> None:
    stage = StageDriver.joined()
    a = stage.announce("a", range(9))
    stage.prepare(a)
    stage.send_wave(Row(a, 0, 9, final=True))
    cache = stage.machine._cache
    assert isinstance(cache, BlockCache)
    cache._store.pool.take(14)  # behind everybody's back: the promise of 3 blocks cannot be kept
    (action,) = stage.machine.handle(ev.PrepareWave(WaveOrdinal(1), 0.0))
    assert isinstance(action, ev.CoreError)
    assert action.error.reason == "INTERNAL"
