"""Votes over cache groups: what each answer of the cache becomes, and what is held after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.scripted_cache import ScriptedCache
from tests.harness.stage_core import StageDriver, join_plan
from wavepp_proto.errors import InvalidRequest
from wavepp_proto.terms import (
    CacheGroup,
    GroupBlocks,
    GroupEndpoint,
    HoldKey,
    Incarnation,
    Prepare,
    Revise,
    Row,
    Vote,
    VoteOutcome,
)
from wavepp_stage.core.cache_manager import Escrow, Lease, Shortfall
from wavepp_stage.core.machine import StageMachine

ATTENTION, RECURRENT = CacheGroup.ATTENTION, CacheGroup.RECURRENT
HITS = (GroupEndpoint(ATTENTION, 32), GroupEndpoint(RECURRENT, 16))
SHORT = Shortfall(blocks=2, states=1)
MISSING = (GroupBlocks(ATTENTION, 2), GroupBlocks(RECURRENT, 1))


class Stage(StageDriver):
    """A stage of both groups over a scripted cache; "a" is announced."""

    def __init__(self) -> None:
        self.cache = ScriptedCache()
        plan = join_plan(groups=(ATTENTION, RECURRENT), state_slots=8)
        machine = StageMachine(Incarnation(7), lambda plan, feed: self.cache)
        super().__init__(machine, plan)
        self.rejoin(plan)
        self.hold = self.announce("a", range(40))


@pytest.fixture
def stage() -> Iterator[Stage]:
    driver = Stage()
    yield driver
    driver.machine.check()


def phase(stage: Stage, hold: HoldKey) -> str | None:
    state = stage.cache.hold_state(hold)
    return state.phase if state else None


def test_vote_tells_the_own_hit_of_each_group_when_everything_is_held(stage: Stage) -> None:
    stage.cache.lease_answer = Lease(16, 16, HITS)
    stage.cache.commit_answer = Escrow(16, 7, 3, backed_free=4, backed_offload=1, backed_evict=2)
    assert stage.prepare(stage.hold, 16) == Vote(
        stage.hold, VoteOutcome.COMMITTED, 16, 16, HITS, 7, (), backed_free=4, backed_offload=1, backed_evict=2
    )


def test_vote_is_lower_and_uncommitted_when_the_lease_is_shorter_than_asked(stage: Stage) -> None:
    stage.cache.lease_answer = Lease(16, 16, HITS)
    vote = stage.prepare(stage.hold, 32)
    assert (vote.outcome, vote.endpoint, vote.group_endpoints) == (VoteOutcome.LOWER, 16, HITS)
    assert phase(stage, stage.hold) == "escrowed"


@pytest.mark.parametrize("step", ["lease", "escrow", "commit"])
def test_nothing_is_held_when_room_is_short_at_any_step_of_a_prepare(stage: Stage, step: str) -> None:
    answers = {
        "lease": Lease(0, 16, HITS, SHORT),
        "escrow": Escrow(16, 7, shortfall=SHORT),
        "commit": Escrow(16, 7, shortfall=SHORT),
    }
    stage.cache.lease_answer = Lease(16, 16, HITS)
    setattr(stage.cache, f"{step}_answer", answers[step])
    demand = 0 if step == "lease" else 7
    assert stage.prepare(stage.hold, 16) == Vote(
        stage.hold, VoteOutcome.NO_CAPACITY, 0, 16, HITS, demand, shortfall=MISSING
    )
    assert phase(stage, stage.hold) is None
    stage.cache.lease_answer = stage.cache.escrow_answer = stage.cache.commit_answer = None
    assert stage.prepare(stage.hold, 16).outcome is VoteOutcome.COMMITTED


def test_shortfall_names_only_the_group_that_is_short(stage: Stage) -> None:
    stage.cache.lease_answer = Lease(0, 0, (), Shortfall(states=3))
    assert stage.prepare(stage.hold).shortfall == (GroupBlocks(RECURRENT, 3),)


def test_revise_is_lower_when_an_earlier_snapshot_is_all_there_is(stage: Stage) -> None:
    """The endpoint asked for has no snapshot here: the stage holds less, and says so."""
    stage.cache.lease_answer = Lease(32, 32, HITS)
    stage.prepare(stage.hold, 32)
    stage.cache.revise_answer = Escrow(16, 6)
    vote = stage.revise(stage.hold, 24)
    assert vote == Vote(stage.hold, VoteOutcome.LOWER, 16, 32, HITS, 6)
    assert phase(stage, stage.hold) == "escrowed"
    stage.cache.revise_answer = None
    assert stage.revise(stage.hold, 16).outcome is VoteOutcome.COMMITTED
    assert phase(stage, stage.hold) == "committed"


def test_old_hold_stays_when_a_revise_finds_no_room(stage: Stage) -> None:
    stage.cache.lease_answer = Lease(32, 32, HITS)
    first = stage.prepare(stage.hold, 32)
    stage.cache.revise_answer = Escrow(32, 9, shortfall=SHORT)
    vote = stage.revise(stage.hold, 16)
    assert vote == Vote(stage.hold, VoteOutcome.NO_CAPACITY, 32, 32, HITS, 9, MISSING)
    assert stage.prepare(stage.hold, 32) == first  # still committed there
    assert stage.cache.names().count("lease") == 1


def test_prepare_starts_over_when_it_counts_other_snapshots(stage: Stage) -> None:
    stage.prepare(stage.hold, 16, snapshots=1)
    stage.prepare(stage.hold, 16, snapshots=1)
    assert stage.cache.names().count("lease") == 1
    stage.prepare(stage.hold, 16, snapshots=2)
    assert stage.cache.names()[-4:] == ["release", "lease", "escrow", "commit"]


def test_prepare_of_a_running_request_is_answered_alike(stage: Stage) -> None:
    stage.cache.lease_answer = Lease(16, 16, HITS)
    first = stage.prepare(stage.hold, 16)
    stage.run_wave(Row(stage.hold, 16, 8))
    assert stage.prepare(stage.hold, 16) == first


@pytest.mark.parametrize(
    ("group", "legal"), [(ATTENTION, (True, True, True)), (RECURRENT, (False, True, True))], ids=lambda it: str(it)
)
def test_group_endpoint_is_refused_when_the_stage_has_no_such_group(group: CacheGroup, legal: tuple[bool, ...]) -> None:
    """Blocks are numbered on every stage, one without attention layers too."""
    for groups, fine in zip(((ATTENTION,), (RECURRENT,), (ATTENTION, RECURRENT)), legal, strict=True):
        slots = 8 if RECURRENT in groups else 0
        stage = StageDriver(StageMachine(Incarnation(7), lambda plan, feed: ScriptedCache()), join_plan())
        stage.rejoin(join_plan(groups=groups, state_slots=slots))
        asked = Prepare(stage.announce("a", range(40)), 8, (GroupEndpoint(group, 8),))
        if fine:
            assert stage.votes(prepares=[asked])[0].outcome is VoteOutcome.COMMITTED
        else:
            with pytest.raises(InvalidRequest, match="no such cache group"):
                stage.votes(prepares=[asked])


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (Prepare(HoldKey("a", 1), 0, snapshots=-1), "snapshots"),  # type: ignore[arg-type]
        (Revise(HoldKey("a", 1), 0, snapshots=(1 << 20) + 1), "snapshots"),  # type: ignore[arg-type]
        (Prepare(HoldKey("a", 1), 8, (GroupEndpoint(RECURRENT, 3),)), "group_endpoints"),  # type: ignore[arg-type]
    ],
)
def test_round_is_refused_by_name_when_a_count_is_out_of_range(
    stage: Stage, asked: Prepare | Revise, field: str
) -> None:
    entries = {"prepares": [asked]} if isinstance(asked, Prepare) else {"revises": [asked]}
    with pytest.raises(InvalidRequest) as caught:
        stage.votes(**entries)
    assert caught.value.fields["field"] == field
    assert stage.cache.called == []
