"""Plans that a stage refuses by name, and those for which it needs another cache."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.harness.stage_core import join_plan
from wavepp_proto.errors import JoinRefused
from wavepp_proto.limits import MAX_POOL_BLOCKS, MAX_STATE_SLOTS
from wavepp_proto.terms import (
    NOTHING_LOADED,
    CacheGroup,
    DaemonKey,
    Incarnation,
    JoinPlan,
    Peer,
    PipelineId,
    StageIndex,
)
from wavepp_stage.core.join_plan import check_plan, needs_rebuild

ATTENTION, RECURRENT = CacheGroup.ATTENTION, CacheGroup.RECURRENT


@pytest.mark.parametrize(
    ("plan", "field"),
    [
        (join_plan(pool_blocks=0), "pool_blocks"),
        (join_plan(floor_blocks=16), "floor_blocks"),
        (join_plan(block_tokens=0), "block_tokens"),
        (join_plan(stage=2), "stage"),
        (join_plan(layers=(4, 4)), "last_layer"),
        (join_plan(stages=65), "stages"),
        (join_plan(host_pool_blocks=-1), "host_pool_blocks"),
        (join_plan(host_pool_blocks=MAX_POOL_BLOCKS + 1), "host_pool_blocks"),
        (join_plan(state_slots=2), "state_slots"),
        (join_plan(groups=(RECURRENT,)), "state_slots"),
        (join_plan(groups=(RECURRENT,), state_slots=1), "state_slots"),
        (join_plan(groups=(ATTENTION, RECURRENT), state_slots=MAX_STATE_SLOTS + 1), "state_slots"),
        (join_plan(groups=()), "groups"),
        (join_plan(groups=(ATTENTION, ATTENTION)), "groups"),
        (join_plan(silence_ms=0), "silence_ms"),
    ],
)
def test_plan_is_refused_by_name_when_a_field_is_out_of_range(plan: JoinPlan, field: str) -> None:
    with pytest.raises(JoinRefused) as caught:
        check_plan(plan)
    assert caught.value.fields["field"] == field


@pytest.mark.parametrize(
    "plan",
    [
        join_plan(host_pool_blocks=MAX_POOL_BLOCKS),
        join_plan(groups=(RECURRENT,), state_slots=2),
        join_plan(groups=(ATTENTION, RECURRENT), state_slots=MAX_STATE_SLOTS, host_pool_blocks=8),
    ],
)
def test_plan_is_taken_when_every_field_is_in_range(plan: JoinPlan) -> None:
    check_plan(plan)


HYBRID = join_plan(groups=(ATTENTION, RECURRENT), state_slots=8, host_pool_blocks=4)


@pytest.mark.parametrize(
    ("other", "rebuild"),
    [
        (replace(HYBRID, groups=(RECURRENT,)), True),
        (replace(HYBRID, state_slots=9), True),
        (replace(HYBRID, host_pool_blocks=0), True),
        (replace(HYBRID, groups=(RECURRENT, ATTENTION)), False),
        (replace(HYBRID, floor_blocks=3, silence_ms=9), False),
    ],
)
def test_cache_is_built_anew_when_its_shape_changed(other: JoinPlan, rebuild: bool) -> None:
    assert needs_rebuild(HYBRID, other) is rebuild
    assert needs_rebuild(None, other)


def loaded(*peers: tuple[int, int, int, int], epoch: int = 1) -> JoinPlan:
    """A plan of stages that load together; each peer is (incarnation, first layer, last layer, load)."""
    made = tuple(
        Peer(
            DaemonKey(PipelineId("p"), StageIndex(stage)), Incarnation(incarnation), "a:1", "a:2", first, last, load, 64
        )
        for stage, (incarnation, first, last, load) in enumerate(peers)
    )
    return replace(join_plan(epoch=epoch), peers=made)


TOGETHER = loaded((1, 0, 4, 77), (2, 4, 8, 77))


@pytest.mark.parametrize(
    ("other", "rebuild"),
    [
        (loaded((1, 0, 4, 77), (2, 4, 8, NOTHING_LOADED)), True),  # its wave failed, or its process is another one
        (loaded((1, 0, 4, 78), (2, 4, 8, 77)), True),  # the first loaded with others meanwhile
        (loaded((1, 0, 4, NOTHING_LOADED), (2, 4, 8, NOTHING_LOADED)), True),
        (loaded((1, 0, 4, 77), (2, 4, 9, 77)), True),  # the others' bands are part of what was loaded
        (replace(TOGETHER, peers=(TOGETHER.peers[0], replace(TOGETHER.peers[1], pool_blocks=9))), True),  # and pools
        (loaded((1, 0, 4, 77), (3, 4, 8, 77), epoch=2), False),  # it fenced itself for silence: what it loaded is there
    ],
)
def test_cache_is_built_anew_when_those_who_load_together_changed(other: JoinPlan, rebuild: bool) -> None:
    assert needs_rebuild(TOGETHER, other) is rebuild


def test_peers_are_no_matter_when_every_stage_loads_alone() -> None:
    before, after = loaded((1, 0, 4, 0), (2, 4, 8, 0)), loaded((1, 0, 4, 0), (9, 4, 10, 0))
    assert not needs_rebuild(before, after)
