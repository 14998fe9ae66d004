"""Pipelines with recurrent layers: hints, snapshots in rounds and waves, and hits lost for want of one."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from tests.harness.fake_pipeline import BLOCK, FakePipeline, record, tokens
from wavepp_controller.core.config import ControllerConfig
from wavepp_controller.core.events import BeatArrived, SendRound, SendWave
from wavepp_controller.core.verdicts import PipelineFacts, check_fits
from wavepp_proto.errors import NeverFits
from wavepp_proto.hashing import HashScope, hash_blocks
from wavepp_proto.terms import (
    Admitted,
    CacheGroup,
    Finished,
    GroupBlocks,
    Heartbeat,
    MemberRecord,
    ModelFacts,
    Prepare,
    Revise,
)

ATTENTION, RECURRENT = CacheGroup.ATTENTION, CacheGroup.RECURRENT
BOTH = (ATTENTION, RECURRENT)


def member(stage: int, stages: int, groups: tuple[CacheGroup, ...], slots: int) -> MemberRecord:
    return record(stage, stages, groups=groups, state_slots=slots if RECURRENT in groups else 0)


def hybrid(*bands: tuple[CacheGroup, ...], slots: int = 400, sharing: bool = False, **config: Any) -> FakePipeline:
    """Bands of two layers each; in a stage with both groups the first layer is recurrent."""
    bands = bands or (BOTH, BOTH)
    recurrent = tuple(
        layer
        for stage, groups in enumerate(bands)
        for layer in (2 * stage, 2 * stage + 1)
        if RECURRENT in groups and (layer % 2 == 0 or ATTENTION not in groups)
    )
    members = [member(stage, len(bands), groups, slots) for stage, groups in enumerate(bands)]
    model = replace(members[0].model, recurrent_layers=recurrent)
    made = ControllerConfig(**{"wave_tokens": 64, "floor_blocks": 0, "snapshot_tokens": 128, **config})
    return FakePipeline(config=made, members=[replace(one, model=model) for one in members], sharing=sharing)


def hashes(count: int, seed: int = 0) -> bytes:
    return hash_blocks(HashScope("f1", f"B{BLOCK}"), tokens(count, seed), BLOCK)


def holds(pipeline: FakePipeline, name: str, stage: int, held: int, snapshots: list[int], count: int = 500) -> None:
    """The stage truly holds so many tokens of the prompt and these snapshots, and says so."""
    daemon = pipeline.daemon(stage)
    groups = daemon.plan.groups
    hits = {ATTENTION: held, RECURRENT: max(snapshots, default=0)}
    daemon.group_hits[name] = {group: hits[group] for group in groups}
    daemon.hits[name] = min(daemon.group_hits[name].values())
    if RECURRENT in groups:
        daemon.snapshots[name] = snapshots
    pipeline.digest(stage, hashes(count), snapshots, held // BLOCK)


def asked(pipeline: FakePipeline, stage: int = 0) -> list[Revise | Prepare]:
    rounds = [action.round for action in pipeline.of(SendRound) if action.key.stage == stage]
    entries: list[Revise | Prepare] = []
    for one in rounds:
        entries += [*one.revises, *one.prepares]
    return entries


def rows(pipeline: FakePipeline, name: str) -> list[tuple[int, int, tuple[int, ...]]]:
    waves = pipeline.waves()
    return [(row.start, row.length, row.snapshots) for wave in waves for row in wave if row.key.request_id == name]


def admitted(pipeline: FakePipeline, name: str) -> Admitted:
    return pipeline.of_request(name, Admitted)[-1]


# --- hints --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("snapshots", "candidate"),
    [
        ([[128, 256], [128, 256]], 256),
        ([[128, 256], [128]], 128),
        ([[256], [128]], 0),
        ([[], []], 0),  # field bug 18: blocks are there, no state is, so nothing may be reused
    ],
)
def test_hint_is_the_deepest_snapshot_that_everybody_has_within_the_blocks(
    snapshots: list[list[int]], candidate: int
) -> None:
    pipeline = hybrid()
    holds(pipeline, "a", 0, 400, snapshots[0])
    holds(pipeline, "a", 1, 300, snapshots[1])
    pipeline.submit("a", 500)
    assert admitted(pipeline, "a").candidate == candidate


def test_stages_are_asked_for_what_their_groups_need_when_bands_differ() -> None:
    pipeline = hybrid((ATTENTION,), (RECURRENT,), BOTH)
    holds(pipeline, "a", 0, 400, [])
    holds(pipeline, "a", 1, 0, [128, 256, 384])
    holds(pipeline, "a", 2, 304, [128, 256])
    pipeline.submit("a", 500)
    assert (admitted(pipeline, "a").candidate, admitted(pipeline, "a").endpoint) == (256, 256)


def test_hint_starts_from_the_cap_when_no_stage_attends() -> None:
    pipeline = hybrid((RECURRENT,), (RECURRENT,))
    for stage in (0, 1):
        holds(pipeline, "a", stage, 0, [128, 256, 496])
    pipeline.submit("a", 496)
    assert admitted(pipeline, "a").candidate == 256  # 496 is the whole prompt: one token must be computed


def test_repeat_hits_at_once_when_the_first_has_just_finished() -> None:
    """Field bug 22: the digests have not said so yet."""
    pipeline = hybrid()
    for name in ("second", "third"):
        for daemon in pipeline.daemons.values():
            daemon.hits[name] = 496
    for name in ("first", "second", "third"):
        pipeline.submit(name, 500)
    assert [admitted(pipeline, name).endpoint for name in ("first", "second", "third")] == [0, 496, 496]
    assert rows(pipeline, "third") == [(496, 4, ())]


# --- rounds -------------------------------------------------------------------------------------


def test_endpoint_falls_to_a_common_snapshot_when_leases_find_less_than_the_hint() -> None:
    """Field bug 16 through the core: candidate 80, snapshots {64, 72, 90} and {64, 80} (in blocks)."""
    pipeline = hybrid()
    count = 100 * BLOCK
    for stage in (0, 1):  # digests are older than the caches
        pipeline.digest(stage, hashes(count), [80 * BLOCK])
        pipeline.daemon(stage).hits["a"] = 90 * BLOCK
    pipeline.daemon(0).snapshots["a"] = [64 * BLOCK, 72 * BLOCK, 90 * BLOCK]
    pipeline.daemon(1).snapshots["a"] = [64 * BLOCK, 80 * BLOCK]
    pipeline.submit("a", count)
    assert [(type(one), getattr(one, "endpoint", 0) // BLOCK) for one in asked(pipeline)[1:]] == [
        (Revise, 72),
        (Revise, 64),
    ]
    assert (admitted(pipeline, "a").candidate, admitted(pipeline, "a").endpoint) == (80 * BLOCK, 64 * BLOCK)
    assert admitted(pipeline, "a").rounds == 3


def test_room_for_snapshots_is_asked_for_from_the_endpoint_in_question() -> None:
    pipeline = hybrid()
    for stage, snapshots in ((0, [128, 256]), (1, [128, 256])):
        holds(pipeline, "a", stage, 400, snapshots)
    pipeline.daemon(1).snapshots["a"] = [128]
    pipeline.submit("a", 600)
    prepare, revise = asked(pipeline)
    assert (prepare.snapshots, revise.snapshots) == (4, 5)  # 384, 512, 592 and a spare; one more from 128
    assert [row[2] for row in rows(pipeline, "a") if row[2]] == [(256,), (384,), (400,), (512,), (592,)]


def test_no_snapshots_are_asked_for_when_no_stage_is_recurrent() -> None:
    pipeline = hybrid((ATTENTION,), (ATTENTION,))
    pipeline.submit("a", 600)
    assert [one.snapshots for one in asked(pipeline)] == [0]
    assert all(row[2] == () for row in rows(pipeline, "a"))


def test_snapshot_is_taken_on_demand_when_a_hit_was_lost_for_want_of_one() -> None:
    pipeline = hybrid()
    holds(pipeline, "a", 0, 400, [128])
    holds(pipeline, "a", 1, 304, [128])
    pipeline.submit("a", 500)
    found = admitted(pipeline, "a")
    assert (found.endpoint, found.lost_to_snapshots, found.best_stage_hit) == (128, 304 - 128, 128)
    assert sorted(place for row in rows(pipeline, "a") for place in row[2]) == [256, 304, 384, 496]
    assert pipeline.counter("tokens_lost_to_snapshots") == 176


def test_nothing_is_lost_to_snapshots_when_the_hint_was_short() -> None:
    pipeline = hybrid()
    for daemon in pipeline.daemons.values():  # no digest has come
        daemon.hits["a"] = 256
        daemon.group_hits["a"] = {ATTENTION: 256, RECURRENT: 256}
    pipeline.submit("a", 500)
    assert (admitted(pipeline, "a").endpoint, admitted(pipeline, "a").lost_to_snapshots) == (0, 0)


def test_one_request_takes_no_more_snapshots_than_its_part_of_the_slots() -> None:
    pipeline = hybrid(slots=8, snapshot_tokens=16)
    pipeline.submit("a", 500)
    assert [one.snapshots for one in asked(pipeline)] == [2]
    assert sorted(place for row in rows(pipeline, "a") for place in row[2]) == [480, 496]


# --- room ---------------------------------------------------------------------------------------


def test_request_is_tried_when_a_later_capacity_covers_blocks_and_slots() -> None:
    pipeline = hybrid()
    daemon = pipeline.daemon(1)
    daemon.free, daemon.state_slots = 10, (1, 1, 1)
    daemon.short_groups["a"] = (GroupBlocks(ATTENTION, 4), GroupBlocks(RECURRENT, 2))
    pipeline.submit("a", 40)
    seq = daemon.seq

    def hear(blocks: int, free: int, evictable: int, escrowed: int) -> None:
        nonlocal seq
        seq += 1
        daemon.free, daemon.state_slots = blocks, (free, evictable, escrowed)
        capacity = replace(daemon.capacity(), seq=seq)
        pipeline.post(BeatArrived(daemon.plan.key, Heartbeat(daemon.fence(0), 1, capacity=capacity), pipeline.now))

    hear(14, 1, 1, 0)  # one slot is still missing
    hear(13, 3, 0, 0)  # and now a block
    assert pipeline.state("a") == "waiting"
    daemon.short_groups.clear()
    hear(14, 2, 3, 2)
    assert isinstance(pipeline.outcome("a"), Finished)


def test_request_never_fits_when_a_stage_has_no_slot_for_a_state_and_a_snapshot() -> None:
    members = [member(0, 2, (ATTENTION,), 0), member(1, 2, BOTH, 1)]
    with pytest.raises(NeverFits) as caught:
        check_fits(10, PipelineFacts.of(members))
    assert caught.value.fields == {"field": "state_slots", "value": "2", "limit": "1", "stage": "1"}
    check_fits(10, PipelineFacts.of([members[0], member(1, 2, BOTH, 2)]))


# --- sharing ------------------------------------------------------------------------------------


def shared(pipeline: FakePipeline, front: int, *others: tuple[str, int]) -> None:
    """`a` of `front` tokens and others of its seed become ready at once; stages can reuse whatever is asked."""
    for daemon in pipeline.daemons.values():
        daemon.hits |= {name: 100_000 for name, _ in others}
    pipeline.hold = {SendRound}
    pipeline.submit("other", 1, seed=99)
    pipeline.submit("a", front)
    for name, count in others:
        pipeline.submit(name, count)
    pipeline.hold = set()
    pipeline.release_held()


def test_front_takes_a_snapshot_at_the_shared_boundary_when_it_has_a_spare() -> None:
    pipeline = hybrid(sharing=True)
    shared(pipeline, 500, ("b", 200))
    assert admitted(pipeline, "b").endpoint == 192
    assert rows(pipeline, "a")[2:5] == [(128, 64, (192,)), (192, 64, (256,)), (256, 64, ())]
    assert rows(pipeline, "b") == [(192, 8, ())]


def test_second_boundary_costs_a_periodic_snapshot_and_never_the_first_one() -> None:
    pipeline = hybrid(sharing=True)
    shared(pipeline, 500, ("b", 200), ("c", 80))
    assert [admitted(pipeline, name).endpoint for name in "bc"] == [192, 64]
    assert sorted(place for row in rows(pipeline, "a") for place in row[2]) == [64, 192, 256, 384, 496]
    assert [one.snapshots for one in asked(pipeline) if one.key.request_id == "a"] == [5]


def test_deepest_snapshot_on_the_way_is_waited_for_when_the_boundary_cannot_have_one() -> None:
    pipeline = hybrid(sharing=True, slots=8, snapshot_tokens=32)
    shared(pipeline, 500, ("b", 300), ("c", 300), ("d", 200))  # two snapshots: the end, and what was asked first
    assert [admitted(pipeline, name).endpoint for name in "bcd"] == [288, 288, 0]
    assert sorted(place for row in rows(pipeline, "a") for place in row[2]) == [288, 496]


def test_nobody_waits_when_the_front_takes_no_snapshot_before_the_boundary() -> None:
    pipeline = hybrid(sharing=True, slots=3)  # the end of the prompt alone
    shared(pipeline, 500, ("b", 300))
    assert pipeline.counter("parked") == 0
    assert admitted(pipeline, "b").endpoint == 0


def test_snapshot_already_sent_is_waited_for_when_the_front_is_past_the_boundary() -> None:
    pipeline = hybrid(sharing=True)
    for daemon in pipeline.daemons.values():
        daemon.hits["b"] = 100_000
    pipeline.hold = {SendWave}
    pipeline.submit("a", 500)  # [0, 256) is in the ring, with a snapshot at 128 and one at 256
    pipeline.submit("b", 200)
    assert pipeline.state("b") == "waiting"
    pipeline.hold = set()
    pipeline.release_held()
    assert (admitted(pipeline, "b").endpoint, admitted(pipeline, "b").shared_tokens) == (128, 128)


def test_model_facts_name_the_groups_of_each_band() -> None:
    facts = ModelFacts("m", "f", layers=6, vocabulary=10, window=10, recurrent_layers=(0, 1, 2, 4))
    assert [facts.groups_of(first, first + 2) for first in (0, 2, 4)] == [(RECURRENT,), BOTH, BOTH]


def test_core_agrees_on_the_deepest_common_snapshot_when_snapshots_lie_anywhere() -> None:
    """Field bug 16 again, with rounds and votes in between."""
    rng = random.Random(4)
    bands = (BOTH,) * 3
    pipeline = hybrid(*bands)
    count = 40 * BLOCK + 1
    everywhere = [place * BLOCK for place in range(1, 41)]
    for stage in range(3):
        pipeline.digest(stage, hashes(count), everywhere)
    for number in range(200):
        name = f"r{number}"
        places = [sorted(rng.sample(everywhere, rng.randint(0, 10))) for _ in bands]
        for stage, snapshots in enumerate(places):
            daemon = pipeline.daemon(stage)
            daemon.hits[name], daemon.snapshots[name] = 40 * BLOCK, snapshots
        pipeline.submit(name, count)
        common = set.intersection(*(set(snapshots) for snapshots in places))
        found = admitted(pipeline, name)
        assert (found.candidate, found.endpoint) == (40 * BLOCK, max(common, default=0))
        assert found.rounds <= len({0}.union(*places)) + 1
        assert isinstance(pipeline.outcome(name), Finished)
