"""Blocks that escrows leave alone, and the one oversized request that may use them."""

from __future__ import annotations

import pytest

from tests.harness.fake_pipeline import BLOCK, FakePipeline, record, tokens
from wavepp_controller.core.config import ControllerConfig
from wavepp_controller.core.events import FormPipeline, SendRound, SendWave
from wavepp_controller.core.headroom import headroom_blocks
from wavepp_proto.hashing import HashScope, hash_blocks
from wavepp_proto.terms import Finished, Prepare


@pytest.mark.parametrize(
    ("stages", "wave_tokens", "pool", "blocks"),
    [(2, 64, 10_000, 16), (4, 16_384, 10_000, 2_500), (4, 16_384, 1_000_000, 8_192), (1, 64, 3, 0)],
)
def test_headroom_is_two_rings_of_waves_or_a_quarter_of_the_smallest_pool(
    stages: int, wave_tokens: int, pool: int, blocks: int
) -> None:
    assert headroom_blocks(stages, wave_tokens, BLOCK, pool) == blocks


def test_plans_carry_the_headroom_of_the_smallest_pool_when_nobody_chose_another() -> None:
    members = [record(0, pool_blocks=200), record(1, pool_blocks=40)]
    (formed,) = FakePipeline(config=ControllerConfig(wave_tokens=64), members=members).of(FormPipeline)
    assert [plan.floor_blocks for plan in formed.plans] == [10, 10]
    (formed,) = FakePipeline(config=ControllerConfig(wave_tokens=64, floor_blocks=3), members=members).of(FormPipeline)
    assert [plan.floor_blocks for plan in formed.plans] == [3, 3]


def small() -> FakePipeline:
    """Pools of 40 blocks with a headroom of 10: requests of 31 to 40 blocks are oversized."""
    members = [record(stage, pool_blocks=40) for stage in (0, 1)]
    return FakePipeline(config=ControllerConfig(wave_tokens=64), members=members)


def prepared(pipeline: FakePipeline) -> list[list[Prepare]]:
    rounds = [action.round for action in pipeline.of(SendRound) if action.key.stage == 0]
    return [list(one.prepares) for one in rounds if one.prepares]


def names(pipeline: FakePipeline) -> list[list[str]]:
    return [[entry.key.request_id for entry in entries] for entries in prepared(pipeline)]


@pytest.mark.parametrize(("blocks", "ignores"), [(30, False), (31, True), (40, True)])
def test_headroom_is_ignored_when_a_request_does_not_fit_without_it(blocks: int, ignores: bool) -> None:
    pipeline = small()
    pipeline.submit("a", blocks * BLOCK)
    assert [[one.ignore_headroom for one in entries] for entries in prepared(pipeline)] == [[ignores]]
    assert isinstance(pipeline.outcome("a"), Finished)


def test_oversized_request_is_prepared_alone_when_others_are_ready_too() -> None:
    pipeline = small()
    pipeline.hold = {SendRound}
    for seed, (name, blocks) in enumerate([("z", 1), ("a", 1), ("big", 35), ("b", 1), ("c", 1)]):
        pipeline.submit(name, blocks * BLOCK, seed)
    pipeline.hold = set()
    pipeline.release_held()
    assert names(pipeline) == [["z"], ["a"], ["big"], ["b", "c"]]
    assert all(isinstance(pipeline.outcome(name), Finished) for name in ("z", "a", "big", "b", "c"))


def test_nothing_overtakes_an_oversized_request_when_it_waits_for_a_holder_without_its_blocks() -> None:
    pipeline = small()
    pipeline.hold = {SendWave}
    pipeline.submit("a", 10 * BLOCK, seed=1)  # three waves
    pipeline.submit("big", 35 * BLOCK, seed=2)
    pipeline.submit("b", BLOCK, seed=3)
    assert [pipeline.state(name) for name in ("a", "big", "b")] == ["running", "hinted", "hinted"]
    first, *rest = pipeline.held
    pipeline.held = [first]
    pipeline.release_held()  # the last stage reports a chunk of `a`: its blocks are taken everywhere
    assert names(pipeline)[:2] == [["a"], ["big"]]
    pipeline.held = rest + pipeline.held
    pipeline.hold = set()
    pipeline.release_held()
    assert all(isinstance(pipeline.outcome(name), Finished) for name in ("a", "big", "b"))


def test_nobody_is_prepared_beside_an_oversized_request_when_it_is_not_admitted_yet() -> None:
    pipeline = small()
    for at in (0, 1):
        pipeline.digest(at, hash_blocks(HashScope("f1", f"B{BLOCK}"), tokens(64, 2), BLOCK))
    pipeline.daemon(0).hits["big"] = 64  # the other stage has nothing: a second round lowers it
    pipeline.hold = {SendRound}
    pipeline.submit("big", 35 * BLOCK, seed=2)
    pipeline.submit("b", BLOCK, seed=3)
    pipeline.release_held()
    assert [action.round.prepares for action in pipeline.held if isinstance(action, SendRound)] == [(), ()]
    assert (pipeline.state("big"), pipeline.state("b")) == ("preparing", "hinted")
    pipeline.hold = set()
    pipeline.release_held()
    assert names(pipeline) == [["big"], ["b"]]
    assert all(isinstance(pipeline.outcome(name), Finished) for name in ("big", "b"))
