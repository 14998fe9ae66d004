"""Ranks on the way from an operator's words to engine, link and wave: each daemon is told its own place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.harness import emulated_pipeline as ep
from tests.harness.stage_core import StageDriver, join_plan
from wavepp.local_plan import LocalPlan
from wavepp_proto import limits
from wavepp_proto.errors import EngineFault, InvalidRequest, JoinRefused
from wavepp_proto.terms import (
    DaemonKey,
    Incarnation,
    JoinPlan,
    LinkKind,
    Peer,
    PipelineId,
    Rank,
    Row,
    Sampling,
    StageIndex,
)
from wavepp_stage.core.join_plan import check_plan, needs_rebuild
from wavepp_stage.engine.torch.engine import TorchEngine
from wavepp_stage.runtime.engines import engine_plan, link_plan
from wavepp_stage.runtime.settings import StageSettings

PLACES = [(stage, rank) for stage in range(3) for rank in range(2)]


def of_rank(stage: int, rank: int, stages: int = 3, ranks: int = 2) -> JoinPlan:
    keys = [DaemonKey(PipelineId("p"), StageIndex(s), Rank(r)) for s in range(stages) for r in range(ranks)]
    peers = tuple(
        Peer(key, Incarnation(100 + number), f"host{key.stage}r{key.rank}:1", "") for number, key in enumerate(keys)
    )
    own = keys[stage * ranks + rank]
    return replace(join_plan(stage=stage, stages=stages), key=own, ranks=ranks, peers=peers, link=LinkKind.GRPC)


# --- what an operator says ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"ranks": 0}, "ranks"),
        ({"ranks": limits.MAX_RANKS + 1}, "ranks"),
        ({"ranks": 2, "rank": 2}, "rank"),
        ({"rank": 1}, "rank"),
        ({"ranks": 2, "engine": "torch"}, "ranks"),
    ],
)
def test_daemon_is_refused_by_name_when_its_rank_cannot_be(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        StageSettings(**{"stage": 0, "stages": 2, "model": "emulated", "engine": "emulated", **changes})
    assert refused.value.fields["field"] == field


def test_daemon_has_the_place_that_its_operator_says() -> None:
    settings = StageSettings(1, 2, "emulated", "emulated", rank=3, ranks=4)
    assert settings.key == DaemonKey(PipelineId("default"), StageIndex(1), Rank(3))


def test_local_cluster_has_a_process_for_every_rank() -> None:
    plan = LocalPlan("emulated", "emulated", stages=2, ranks=2, pool_blocks=(9, 8, 7, 6), state_slots=(5, 4))
    assert [plan.name(*place) for place in plan.places] == ["stage-0.0", "stage-0.1", "stage-1.0", "stage-1.1"]
    assert [plan.of(plan.pool_blocks, *place) for place in plan.places] == ["9", "8", "7", "6"]
    assert [plan.of(plan.state_slots, *place) for place in plan.places] == ["5", "5", "4", "4"]
    assert [plan.of(plan.host_pool_blocks, *place) for place in plan.places] == ["0"] * 4


def test_local_cluster_names_stages_alone_when_each_has_one_rank() -> None:
    plan = LocalPlan("emulated", "emulated", stages=2, pool_blocks=(9, 8))
    assert [(plan.name(*place), plan.of(plan.pool_blocks, *place)) for place in plan.places] == [
        ("stage-0", "9"),
        ("stage-1", "8"),
    ]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"ranks": 0}, "ranks"),
        ({"ranks": limits.MAX_RANKS + 1}, "ranks"),
        ({"pool_blocks": (1, 2, 3)}, "pool_blocks"),
        ({"layers": ("0:1", "1:2", "2:3", "3:4")}, "layers"),
        ({"engine": "torch", "model": "."}, "ranks"),
    ],
)
def test_local_cluster_is_refused_by_name_when_its_ranks_cannot_be(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        LocalPlan(**{"model": "emulated", "engine": "emulated", "stages": 2, "ranks": 2, **changes})
    assert refused.value.fields["field"] == field


# --- what a formation says ----------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "rank"), PLACES)
def test_engine_and_link_are_those_of_the_rank(stage: int, rank: int) -> None:
    plan = of_rank(stage, rank)
    engine = engine_plan(plan, "model")
    assert (engine.stage, engine.rank, engine.ranks, engine.place) == (stage, rank, 2, 2 * stage + rank)
    link = link_plan(plan, "127.0.0.1", 1.0, 1.0)
    following = ("", 0) if stage == 2 else (f"host{stage + 1}r{rank}:1", 100 + 2 * (stage + 1) + rank)
    assert (link.rank, link.next_address, link.next_incarnation) == (rank, *following)


@pytest.mark.parametrize(("rank", "ranks", "field"), [(2, 2, "rank"), (0, limits.MAX_RANKS + 1, "ranks")])
def test_join_is_refused_when_its_rank_is_out_of_range(rank: int, ranks: int, field: str) -> None:
    plan = replace(join_plan(), key=DaemonKey(PipelineId("p"), StageIndex(0), Rank(rank)), ranks=ranks)
    with pytest.raises(JoinRefused) as refused:
        check_plan(plan)
    assert refused.value.fields["field"] == field


def test_cache_is_built_anew_when_the_number_of_ranks_changes() -> None:
    plan = of_rank(0, 0)
    assert needs_rebuild(plan, replace(plan, ranks=4))
    assert not needs_rebuild(plan, replace(plan))


# --- what engines do ----------------------------------------------------------------------------


def test_torch_refuses_ranks_by_name() -> None:
    plan = replace(ep.plan_of(0, 2), ranks=2)
    with pytest.raises(EngineFault) as refused:
        TorchEngine().load(plan, lambda done, total: None)
    assert (refused.value.fields["field"], refused.value.fields["value"]) == ("ranks", "2")


@pytest.mark.parametrize(("stage", "rank"), PLACES)
def test_only_rank_0_of_the_last_stage_samples(stage: int, rank: int) -> None:
    driver = StageDriver.joined(of_rank(stage, rank))
    hold = driver.announce("a", range(8), send_tokens=stage == 0)
    driver.prepare(hold)
    wave, _ = driver.run_wave(Row(hold, 0, 8, final=True))
    assert wave.work.rows[0].sampling == (Sampling(seed=11) if (stage, rank) == (2, 0) else None)
