"""A stage whose controller fell silent acts on nothing old, and comes back as somebody new."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.harness.stage_core import StageDriver, join_plan, key
from wavepp_proto.errors import FormationEnded, StaleMessage
from wavepp_proto.terms import DigestKind, Incarnation, Prepare, Release, Row, VoteOutcome, WaveCommand, WaveOrdinal
from wavepp_stage.core import events as ev

SILENCE_S = 1.25
HEARD = 10.0
Old = Callable[[StageDriver], ev.Event]
LATE: dict[str, Old] = {
    "heartbeat": lambda stage: ev.ControllerHeard(stage.fence(), stage.now),
    "announcement": lambda stage: ev.Announced(stage.frame("b", range(9)), stage.now),
    "round": lambda stage: stage.next_round(prepares=[Prepare(key("a"), 0)]),
    "wave": lambda stage: ev.WaveArrived(WaveCommand(stage.fence(2), (Row(key("a"), 4, 4),)), stage.now),
    "release": lambda stage: ev.ReleaseArrived(stage.fence(), Release(key("a"), None, True), stage.now),
    "prepare": lambda stage: ev.PrepareWave(WaveOrdinal(1), stage.now, stage.plan.fence.formation),
}


@pytest.fixture
def stage() -> Iterator[StageDriver]:
    """Heard of its controller at 10 s; "a" is committed and its first wave is queued."""
    driver = StageDriver.joined()
    driver.now = HEARD
    driver.hear()
    driver.prepare(driver.announce("a", range(9)))
    driver.send_wave(Row(key("a"), 0, 4))
    yield driver
    driver.machine.check()


def nothing_is_held(stage: StageDriver) -> bool:
    found = stage.machine.inventory()
    return (found.holds, found.announced, found.capacity.free_blocks) == ((), (), 16)


@pytest.mark.parametrize("late", LATE.values(), ids=LATE)
def test_stage_fences_itself_when_the_controller_was_silent_for_longer_than_the_bound(
    stage: StageDriver, late: Old
) -> None:
    """reference: a thawed process acts on nothing old."""
    stage.now = HEARD + SILENCE_S + 0.5
    assert stage.post(late(stage))[:2] == [ev.FormationEnded(1), ev.SelfFenced(SILENCE_S + 0.5)]
    assert nothing_is_held(stage)
    assert stage.machine.fence_deadline() is None
    with pytest.raises((FormationEnded, StaleMessage)):
        stage.post(late(stage) if late is not LATE["release"] else LATE["round"](stage))
    assert nothing_is_held(stage)


@pytest.mark.parametrize("event", LATE.values(), ids=LATE)
def test_stage_serves_on_when_the_controller_was_silent_for_exactly_the_bound(stage: StageDriver, event: Old) -> None:
    stage.now = HEARD + SILENCE_S
    actions = stage.post(event(stage))
    assert not any(isinstance(action, ev.SelfFenced | ev.FormationEnded) for action in actions)
    assert stage.machine.fence_deadline() == HEARD + SILENCE_S + (SILENCE_S if event is LATE["heartbeat"] else 0)


def test_nothing_lapses_before_the_controller_was_heard_once() -> None:
    stage = StageDriver.joined()
    stage.now = 1e6
    assert stage.machine.fence_deadline() is None
    assert stage.machine.fence_if_silent(stage.now) == []
    assert stage.prepare(stage.announce("a", range(9))).endpoint == 0


def test_silence_is_counted_anew_when_a_formation_begins(stage: StageDriver) -> None:
    stage.now = HEARD + 60.0
    stage.rejoin(join_plan(formation=2))
    assert stage.machine.fence_deadline() is None
    stage.prepare(stage.announce("a", range(9), attempt=2))
    stage.hear()
    assert stage.machine.fence_deadline() == HEARD + 60.0 + SILENCE_S


def test_deadline_stays_when_a_heartbeat_was_handled_behind_a_later_one(stage: StageDriver) -> None:
    stage.now = HEARD - 1.0
    assert stage.hear() == []
    assert stage.machine.fence_deadline() == HEARD + SILENCE_S


def test_heartbeat_is_stale_when_it_is_another_formations(stage: StageDriver) -> None:
    stage.rejoin(join_plan(formation=2))
    stage.plan = join_plan(formation=1)
    with pytest.raises(StaleMessage, match="formation"):
        stage.hear()
    assert stage.machine.fence_deadline() is None


def test_timer_fences_when_the_deadline_is_reached_and_nothing_came(stage: StageDriver) -> None:
    deadline = stage.machine.fence_deadline()
    assert deadline == HEARD + SILENCE_S
    assert stage.machine.fence_if_silent(deadline - 0.001) == []
    actions = stage.machine.fence_if_silent(deadline)
    assert actions == [ev.FormationEnded(1), ev.SelfFenced(SILENCE_S), ev.DigestChanged()]
    assert stage.machine.fence_if_silent(deadline + 1) == []
    assert nothing_is_held(stage)


def test_wave_that_ran_through_the_silence_is_refused_when_it_retires(stage: StageDriver) -> None:
    """field bug 42: what the executor still writes is in quarantine until it has stopped."""
    stage.prepare_wave(1)
    stage.now = HEARD + 2.0
    stage.post(stage.next_round())
    with pytest.raises(FormationEnded):
        stage.post(ev.WaveRetired(WaveOrdinal(1), 0, (), (), stage.now, formation=1))
    found = stage.machine.inventory()
    assert (found.quarantined_blocks, found.capacity.free_blocks) == (3, 13)
    stage.post(ev.ExecutorStopped(1, stage.now))
    assert stage.machine.inventory().capacity.free_blocks == 16


def reborn(stage: StageDriver, incarnation: int, *, epoch: int = 1, formation: int = 2) -> list[ev.Action]:
    """The daemon is another incarnation, and the controller forms again."""
    actions = stage.post(ev.Reincarnate(Incarnation(incarnation), stage.now))
    stage.rejoin(join_plan(epoch=epoch, formation=formation, incarnation=incarnation))
    return actions


def test_published_blocks_stay_reusable_when_the_daemon_is_reborn(stage: StageDriver) -> None:
    """field bug 60: identity is (stage, incarnation); the old one is answered by name."""
    stage.prepare_wave(1)
    stage.retire_wave(1)
    stage.now = HEARD + 2.0
    stage.hear()
    stage.post(ev.ExecutorStopped(1, stage.now))
    position = stage.machine.digests_since(0)[-1].seq
    reborn(stage, 8)
    (digest,) = stage.machine.digests_since(position)
    assert (digest.incarnation, digest.kind, digest.groups[0].count) == (8, DigestKind.SNAPSHOT, 1)
    assert digest.seq > position
    assert stage.prepare(stage.announce("b", range(9), attempt=2)).own_hit == 4
    stage.plan = join_plan(formation=2, incarnation=7)
    with pytest.raises(StaleMessage, match="incarnation"):
        stage.votes()


def test_formation_ends_first_when_the_daemon_is_reborn_while_it_serves(stage: StageDriver) -> None:
    stage.prepare_wave(1)
    assert reborn(stage, 8)[0] == ev.FormationEnded(1)
    found = stage.machine.inventory()
    assert (found.holds, found.announced, found.quarantined_blocks) == ((), (), 3)
    stage.post(ev.ExecutorStopped(1, stage.now))
    assert stage.machine.inventory().capacity.free_blocks == 16


def test_lower_epochs_stay_fenced_when_the_daemon_is_reborn(stage: StageDriver) -> None:
    stage.rejoin(join_plan(epoch=5))
    stage.post(ev.Reincarnate(Incarnation(8), stage.now))
    for plan in (join_plan(epoch=4, formation=9, incarnation=8), join_plan(epoch=5, formation=1, incarnation=8)):
        with pytest.raises(StaleMessage):
            stage.post(ev.JoinAsked(plan, stage.now))
    stage.rejoin(join_plan(epoch=5, formation=2, incarnation=8))


@pytest.mark.parametrize("incarnation", [6, 7])
def test_incarnation_is_refused_when_it_is_not_newer(stage: StageDriver, incarnation: int) -> None:
    with pytest.raises(StaleMessage, match="newer"):
        stage.post(ev.Reincarnate(Incarnation(incarnation), stage.now))
    stage.votes()  # serves on


def test_tombstones_are_gone_when_the_daemon_is_reborn_between_formations(stage: StageDriver) -> None:
    stage.post(ev.FormationEnd(stage.fence(), stage.now))
    stage.release(key("b"), ended=True)
    reborn(stage, 8)
    assert stage.prepare(stage.announce("b", range(9))).outcome is VoteOutcome.COMMITTED
