"""What a daemon holds against what it should hold: orphans are released, lost holds start over, and never too soon."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.harness.fake_pipeline import record
from tests.harness.flaky_pipeline import FlakyPipeline
from wavepp_controller.core.config import ControllerConfig
from wavepp_controller.core.events import (
    AnnounceRequest,
    AskInventory,
    EndFormation,
    InventoryArrived,
    MemberUp,
    ReopenStreams,
    SendRound,
    SendWave,
    VotesArrived,
)
from wavepp_proto.terms import Attempt, Failed, Finished, HoldKey, Inventory, Release, RequestId, WaveOrdinal

GHOST = HoldKey(RequestId("ghost"), Attempt(1))
PERIOD_S = 5.0


def asking(pipeline: FlakyPipeline) -> AskInventory:
    """Let time pass until stage 0 is asked; the answer is the test's business."""
    pipeline.hold |= {AskInventory}
    pipeline.pass_time(PERIOD_S + 0.05)
    asked = [action for action in pipeline.held if isinstance(action, AskInventory)]
    pipeline.held = [action for action in pipeline.held if not isinstance(action, AskInventory)]
    return next(action for action in asked if action.key.stage == 0)


def answer(pipeline: FlakyPipeline, asked: AskInventory, **changes: Any) -> None:
    inventory: Inventory = replace(pipeline.daemon(asked.key.stage).inventory(asked.fence), **changes)
    pipeline.post(InventoryArrived(asked.key, inventory, pipeline.now))


def released(pipeline: FlakyPipeline, key: HoldKey) -> list[Release]:
    sent = [action.round.releases for action in pipeline.of(SendRound) if action.key.stage == 0]
    return [release for releases in sent for release in releases if release.key == key]


def counts(pipeline: FlakyPipeline) -> tuple[int, int, int]:
    return tuple(  # type: ignore[return-value]  # always these three
        pipeline.counter(name) for name in ("orphan_holds", "orphan_announcements", "lost_holds")
    )


# --- when it is asked ---------------------------------------------------------------------------


def test_every_daemon_is_asked_once_a_period_when_nothing_happens() -> None:
    pipeline = FlakyPipeline(3)
    pipeline.pass_time(4 * PERIOD_S + 0.3)  # looked at on ticks, 50 ms apart
    asked = [action.key.stage for action in pipeline.of(AskInventory)]
    assert asked == [0, 1, 2] * 4
    assert counts(pipeline) == (0, 0, 0)
    daemons = pipeline.machine.status().pipelines[0].daemons
    assert [daemon.inventory_age_ms for daemon in daemons] == [pytest.approx(100, abs=60)] * 3


def test_daemon_is_asked_again_when_it_never_answers() -> None:
    pipeline = FlakyPipeline()
    first, second = asking(pipeline), asking(pipeline)
    assert second.fence.ordinal > first.fence.ordinal
    answer(pipeline, first)
    assert pipeline.counter("inventories_stale") == 1


# --- orphans ------------------------------------------------------------------------------------


def test_hold_that_nobody_owns_is_released_and_counted_when_an_inventory_shows_it() -> None:
    pipeline = FlakyPipeline()
    pipeline.daemon(0).holds[GHOST] = 0
    other = HoldKey(RequestId("other"), Attempt(3))
    pipeline.daemon(1).announced.add(other)
    pipeline.pass_time(PERIOD_S + 0.1)
    assert counts(pipeline) == (1, 0, 0)  # the round that releases one is on its way to stage 1: it is looked at again
    pipeline.pass_time(PERIOD_S)
    assert counts(pipeline) == (1, 1, 0)
    assert [released(pipeline, key) for key in (GHOST, other)] == [[Release(key, ended=True)] for key in (GHOST, other)]
    assert pipeline.nothing_held()
    daemons = pipeline.machine.status().pipelines[0].daemons
    assert [daemon.orphans for daemon in daemons] == [1, 1]
    pipeline.pass_time(2 * PERIOD_S)
    assert counts(pipeline) == (1, 1, 0)


def test_earlier_attempt_is_an_orphan_when_its_request_lives_in_a_later_one() -> None:
    pipeline = FlakyPipeline()
    pipeline.hold = {SendWave}
    pipeline.daemon(0).short["a"] = 1
    pipeline.submit("a", 1000)
    daemon = pipeline.daemon(0)
    daemon.announced = {replace(key, attempt=Attempt(0)) for key in daemon.announced} | daemon.announced
    pipeline.pass_time(PERIOD_S + 0.3)
    assert counts(pipeline)[1] == 1
    assert pipeline.state("a") == "waiting"


def test_hold_of_a_request_that_waits_is_released_and_its_announcement_stays() -> None:
    pipeline = FlakyPipeline(config=ControllerConfig(wave_tokens=64, capacity_retry_ms=60_000))
    pipeline.daemon(1).short["a"] = 1
    pipeline.submit("a", 1000)
    key = HoldKey(RequestId("a"), Attempt(1))
    pipeline.daemon(0).holds[key] = 0
    pipeline.pass_time(PERIOD_S + 0.1)
    assert counts(pipeline) == (1, 0, 0)
    assert released(pipeline, key)[-1] == Release(key, None, ended=False)
    assert not pipeline.daemon(0).holds
    assert key in pipeline.daemon(0).announced


def test_nothing_is_an_orphan_when_its_release_is_still_on_the_way() -> None:
    pipeline = FlakyPipeline()
    pipeline.hold = {SendWave}
    pipeline.submit("a", 1000)
    asked = asking(pipeline)
    before = pipeline.daemon(0).inventory(asked.fence)
    pipeline.hold = {SendWave, SendRound, AskInventory}
    pipeline.cancel("a")
    pipeline.post(InventoryArrived(asked.key, before, pipeline.now))
    assert counts(pipeline) == (0, 0, 0)
    pipeline.hold = set()
    pipeline.release_held()
    pipeline.pass_time(PERIOD_S)
    assert counts(pipeline) == (0, 0, 0)
    assert pipeline.nothing_held()


def test_nothing_is_an_orphan_when_its_release_waits_for_the_next_round() -> None:
    pipeline = FlakyPipeline()
    pipeline.hold = {SendWave}
    pipeline.submit("a", 100)
    asked = asking(pipeline)
    pipeline.hold = {SendWave, SendRound, AskInventory}
    pipeline.submit("b", 100, seed=1)
    (first, _) = [action for action in pipeline.held if isinstance(action, SendRound)]
    pipeline.held.remove(first)
    pipeline.wire(0).round = first.round.fence.ordinal
    pipeline.post(VotesArrived(first.key, pipeline.daemon(0).vote(first.round), pipeline.now))
    pipeline.cancel("a")  # stage 1 has not voted yet
    answer(pipeline, asked, last_wave=WaveOrdinal(2))
    assert counts(pipeline) == (0, 0, 0)
    pipeline.hold = set()
    pipeline.release_held()
    assert pipeline.nothing_held()


def test_nothing_is_an_orphan_when_its_release_waits_on_the_daemon_for_a_wave() -> None:
    pipeline = FlakyPipeline()
    pipeline.hold = {SendWave}
    pipeline.submit("a", 100)
    pipeline.cancel("a")
    key = HoldKey(RequestId("a"), Attempt(1))
    pipeline.daemon(0).holds[key] = 0  # the round is applied, and the waves that contain it have not run
    answer(pipeline, asking(pipeline))
    assert counts(pipeline) == (0, 0, 0)
    pipeline.hold = {AskInventory}
    pipeline.release_held(SendWave)
    answer(pipeline, asking(pipeline))  # now they have, and it is still there
    assert counts(pipeline) == (1, 0, 0)


def test_orphan_is_found_when_rounds_never_pause() -> None:
    pipeline = FlakyPipeline()
    asked = asking(pipeline)
    inventory = pipeline.daemon(0).inventory(asked.fence)
    pipeline.daemon(0).holds[GHOST] = 0
    for number in range(3):
        pipeline.submit(f"r{number}", 40, seed=number)  # it shows fewer rounds than were sent, every time
        shown = replace(pipeline.daemon(0).inventory(asked.fence), last_round=inventory.last_round)
        pipeline.post(InventoryArrived(asked.key, shown, pipeline.now))
        inventory = pipeline.daemon(0).inventory(asked.fence)
        asked = asking(pipeline)
    assert counts(pipeline) == (1, 0, 0)
    assert not pipeline.daemon(0).holds


# --- lost holds ---------------------------------------------------------------------------------


def test_admitted_request_starts_over_when_a_daemon_lost_its_hold() -> None:
    pipeline = FlakyPipeline()
    pipeline.hold = {SendWave}
    pipeline.submit("long", 1000)
    pipeline.submit("a", 40, seed=1)
    assert pipeline.state("a") == "admitted"
    asked = asking(pipeline)
    pipeline.daemon(0).holds.pop(HoldKey(RequestId("a"), Attempt(1)))
    answer(pipeline, asked)
    assert counts(pipeline) == (0, 0, 1)
    assert [action.key.attempt for action in pipeline.of(AnnounceRequest) if action.key.request_id == "a"] == [1, 2]
    pipeline.hold = set()
    pipeline.release_held()
    outcome = pipeline.outcome("a")
    assert isinstance(outcome, Finished)
    assert outcome.attempt == 2
    assert isinstance(pipeline.outcome("long"), Finished)
    assert pipeline.nothing_held()


def test_lost_hold_uses_up_no_formation_when_the_stage_is_lost_after_it() -> None:
    pipeline = FlakyPipeline(config=ControllerConfig(wave_tokens=64, attempts=2))
    pipeline.hold = {SendWave}
    pipeline.submit("long", 1000)
    pipeline.submit("a", 40, seed=1)
    asked = asking(pipeline)
    pipeline.daemon(0).holds.pop(HoldKey(RequestId("a"), Attempt(1)))
    answer(pipeline, asked)
    assert pipeline.state("a") == "admitted"
    pipeline.hold, pipeline.held = set(), []
    pipeline.post(MemberUp(record(1, incarnation=2), pipeline.now))
    outcomes = [pipeline.outcome(name) for name in ("long", "a")]
    assert [isinstance(outcome, Finished) and outcome.attempt for outcome in outcomes] == [2, 3]
    assert pipeline.nothing_held()


def test_running_request_fails_naming_the_stage_when_a_daemon_lost_its_hold() -> None:
    pipeline = FlakyPipeline()
    pipeline.hold = {SendWave}
    pipeline.submit("a", 1000)
    asked = asking(pipeline)
    pipeline.daemon(0).holds.clear()
    answer(pipeline, asked)
    outcome = pipeline.outcome("a")
    assert isinstance(outcome, Failed)
    assert outcome.error.reason == "ROW_VOIDED"
    assert dict(outcome.error.fields) == {"stage": "0", "rank": "0", "wave": "4", "cause": "HOLD_LOST"}
    pipeline.hold = set()
    pipeline.release_held()
    assert pipeline.nothing_held()


def test_no_hold_is_lost_when_it_was_committed_after_the_question() -> None:
    pipeline = FlakyPipeline()
    asked = asking(pipeline)
    before = pipeline.daemon(0).inventory(asked.fence)
    pipeline.hold |= {SendWave}
    pipeline.submit("a", 1000)
    pipeline.post(InventoryArrived(asked.key, before, pipeline.now))
    assert counts(pipeline) == (0, 0, 0)
    assert pipeline.state("a") == "running"


def test_no_hold_is_lost_when_the_daemon_has_executed_the_last_chunk() -> None:
    pipeline = FlakyPipeline()
    pipeline.hold = {SendWave}
    pipeline.submit("a", 100)
    asked = asking(pipeline)
    answer(pipeline, asked, holds=(), last_wave=WaveOrdinal(2))
    assert counts(pipeline) == (0, 0, 0)
    assert pipeline.state("a") == "running"


# --- waves --------------------------------------------------------------------------------------


def test_formation_ends_when_an_inventory_shows_that_other_rows_were_executed() -> None:
    pipeline = FlakyPipeline()
    pipeline.submit("a", 100)
    answer(pipeline, asking(pipeline), running_hash=b"x" * 32)
    (ended,) = pipeline.of(EndFormation)
    named = dict(ended.cause.fields)
    assert (ended.cause.reason, named["field"], named["stage"], named["wave"]) == ("INTERNAL", "running_hash", "0", "2")


def test_formation_ends_when_an_inventory_shows_a_wave_that_was_never_sent() -> None:
    pipeline = FlakyPipeline()
    answer(pipeline, asking(pipeline), last_wave=WaveOrdinal(3))
    (ended,) = pipeline.of(EndFormation)
    assert ended.cause.reason == "INTERNAL"


# --- inventories that say nothing ---------------------------------------------------------------


def test_inventory_from_before_a_resend_is_not_judged() -> None:
    pipeline = FlakyPipeline()
    pipeline.hold = {SendWave}
    pipeline.submit("a", 1000)
    asked = asking(pipeline)
    pipeline.cut(0)
    answer(pipeline, asked, holds=())
    assert counts(pipeline) == (0, 0, 0)
    assert pipeline.counter("inventories_stale") == 1
    assert pipeline.state("a") == "running"


def test_inventory_is_not_judged_when_the_streams_are_broken() -> None:
    pipeline = FlakyPipeline()
    pipeline.hold = {SendWave}
    pipeline.submit("a", 1000)
    asked = asking(pipeline)
    pipeline.hold |= {ReopenStreams}
    pipeline.cut(0)
    answer(pipeline, asked, holds=())
    assert pipeline.counter("inventories_stale") == 1
    assert pipeline.state("a") == "running"


def test_inventory_of_another_formation_is_dropped_at_the_gate() -> None:
    pipeline = FlakyPipeline()
    asked = asking(pipeline)
    pipeline.lose(1)
    pipeline.pass_time(15.5)
    stale = pipeline.counter("stale_messages")
    answer(pipeline, asked, holds=())
    assert pipeline.counter("stale_messages") == stale + 1
    assert pipeline.counter("inventories_stale") == 0


def test_inventory_of_a_daemon_that_left_the_formation_by_itself_is_not_judged() -> None:
    pipeline = FlakyPipeline()
    pipeline.submit("a", 100)
    answer(pipeline, asking(pipeline), last_wave=WaveOrdinal(0), running_hash=b"")
    assert pipeline.counter("inventories_stale") == 1
    assert pipeline.of(EndFormation) == []
