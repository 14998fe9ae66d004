"""Rounds where the cache is the engine's: between two waves, never lost without an answer, never late unnoticed."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from tests.harness.engine_thread import PATIENCE_S, EngineThread, engine_thread
from tests.harness.eventually import eventually
from tests.harness.stage_core import B
from wavepp_proto.errors import EngineFault, FormationEnded
from wavepp_proto.terms import JoinPlan
from wavepp_stage.core.block_cache import BlockCache
from wavepp_stage.core.cache_manager import Lease
from wavepp_stage.core.cache_shape import CacheShape
from wavepp_stage.core.digest_feed import DigestFeed
from wavepp_stage.core.events import Action, FormationEnd, RoundArrived, SendVotes
from wavepp_stage.runtime import cache_door


async def blocked(stage: EngineThread, chunks: int = 3) -> None:
    """A request that runs: its first wave is at the gate, the others are queued. Its round was the first."""
    hold = stage.announce("running", chunks * B)
    await stage.door.post(stage.round(hold))
    stage.send_chunks(hold, chunks)
    await eventually(lambda: stage.order[-1] == "wave 1")


async def begun(stage: EngineThread, event: RoundArrived) -> asyncio.Task[list[Action]]:
    """The event, on its way through the door."""
    task = asyncio.create_task(stage.door.post(event))
    await asyncio.sleep(0)
    return task


async def test_round_waits_for_one_wave_when_the_cache_is_the_engines() -> None:
    with engine_thread() as stage:
        await blocked(stage)
        asked = await begun(stage, stage.round(stage.announce("b", 2 * B)))
        stage.let(1)
        async with asyncio.timeout(PATIENCE_S):
            votes = (await asked)[0]
        assert isinstance(votes, SendVotes)
        await eventually(lambda: stage.order[-1] == "wave 2")
        assert stage.order == ["round 1", "wave 1", "round 2", "wave 2"]
        assert set(stage.core.threads) == {"executor-test"}


async def test_round_does_not_wait_when_the_cache_is_ours() -> None:
    with engine_thread("any") as stage:
        await blocked(stage)
        await stage.door.post(stage.round(stage.announce("b", 2 * B)))
        assert stage.order == ["round 1", "wave 1", "round 2"]
        assert set(stage.core.threads) == {threading.current_thread().name}


async def test_round_is_handled_under_the_time_at_which_it_is_when_it_waited() -> None:
    with engine_thread() as stage:
        await blocked(stage)
        asked = await begun(stage, stage.round(stage.announce("b", B)))
        opened = time.monotonic()
        stage.let(1)
        await asked
        assert stage.core.handled[-1].now >= opened


async def test_round_is_answered_when_its_formation_ends_behind_a_wave() -> None:
    with engine_thread() as stage:
        await blocked(stage)
        asked = await begun(stage, stage.round(stage.announce("b", B)))
        stage.core.post(FormationEnd(stage.events.fence(), time.monotonic()))
        ended = stage.executor.end()
        with pytest.raises(FormationEnded):
            await asked
        assert stage.order == ["round 1", "wave 1"]
        assert not ended.done()
        stage.let(1)
        await asyncio.wrap_future(ended)


async def test_round_and_load_are_answered_when_the_daemon_closes_behind_a_wave() -> None:
    with engine_thread() as stage:
        await blocked(stage)
        load = asyncio.wrap_future(stage.executor.call(lambda engine: engine.name))
        stage.executor.close()
        with pytest.raises(EngineFault, match="closing"):
            await load
        assert stage.order == ["round 1", "wave 1"]
        with pytest.raises(EngineFault, match="closing"):
            await stage.door.post(stage.round(stage.announce("b", B)))


async def test_round_is_never_handled_when_its_stream_went_away() -> None:
    with engine_thread() as stage:
        await blocked(stage)
        event = stage.round(stage.announce("b", B))
        asked = await begun(stage, event)
        asked.cancel()
        await asyncio.wait([asked])
        again = await begun(stage, event)
        stage.let(1)
        await again
        assert stage.order[:3] == ["round 1", "wave 1", "round 2"]


async def test_round_waits_for_a_wave_however_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the wave takes too long is the controller's to say: it knows what to expect."""
    with engine_thread() as stage:
        await blocked(stage)
        monkeypatch.setattr(cache_door, "LONGEST_WAIT_S", 0.0)
        asked = await begun(stage, stage.round(stage.announce("b", B)))
        for _ in range(100):  # each turn of the loop is a deadline
            await asyncio.sleep(0)
        assert not asked.done()
        monkeypatch.undo()
        stage.let(1)
        await asked


async def test_round_has_a_deadline_when_the_thread_hangs_in_no_wave(monkeypatch: pytest.MonkeyPatch) -> None:
    let_go = threading.Event()
    with engine_thread() as stage:
        stage.executor.call(lambda engine: let_go.wait(30.0))
        monkeypatch.setattr(cache_door, "LONGEST_WAIT_S", 0.01)
        with pytest.raises(EngineFault, match="waited"):
            await stage.door.post(stage.round(stage.announce("b", B)))
        let_go.set()
        assert stage.order == []


class BrokenCache(BlockCache):
    """Its manager raises what no protocol knows."""

    def lease(self, *args: object, **kwargs: object) -> Lease:
        raise RuntimeError("page table is gone")


def broken_cache(plan: JoinPlan, feed: DigestFeed) -> BlockCache:
    return BrokenCache(CacheShape(plan.pool_blocks, plan.block_tokens), feed)


async def test_formation_has_a_fault_when_the_engines_cache_raises() -> None:
    with engine_thread(make_cache=broken_cache) as stage:
        with pytest.raises(EngineFault, match="page table is gone"):
            await stage.door.post(stage.round(stage.announce("b", B)))
        await eventually(lambda: stage.reports)
        (report,) = stage.reports
        assert report.error is not None
        assert report.error.reason == "ENGINE_FAULT"
        assert stage.executor.engine_failed


def broken_end(plan: JoinPlan, feed: DigestFeed) -> BlockCache:
    class BrokenEnd(BlockCache):
        def executor_stopped(self, formation: int) -> None:
            raise RuntimeError("page table is gone")

    return BrokenEnd(CacheShape(plan.pool_blocks, plan.block_tokens), feed)


async def test_break_is_told_when_the_engines_cache_raises_as_the_formation_ends() -> None:
    with engine_thread(make_cache=broken_end) as stage:
        stage.core.post(FormationEnd(stage.events.fence(), time.monotonic()))
        with pytest.raises(EngineFault, match="page table is gone"):
            await asyncio.wrap_future(stage.executor.end())
        assert [report.error is not None for report in stage.reports] == [True]
        assert stage.executor.engine_failed


async def test_break_is_told_before_the_end_when_the_formation_ends_meanwhile() -> None:
    entered, go = threading.Event(), threading.Event()

    class LateBreak(BlockCache):
        def lease(self, *args: object, **kwargs: object) -> Lease:
            entered.set()
            assert go.wait(PATIENCE_S)
            raise RuntimeError("page table is gone")

    def late_break(plan: JoinPlan, feed: DigestFeed) -> BlockCache:
        return LateBreak(CacheShape(plan.pool_blocks, plan.block_tokens), feed)

    with engine_thread(make_cache=late_break) as stage:
        asked = await begun(stage, stage.round(stage.announce("b", B)))
        await eventually(entered.is_set)
        ended = stage.executor.end()
        ended.add_done_callback(lambda _: stage.order.append(f"{len(stage.reports)} told"))
        go.set()
        with pytest.raises(EngineFault, match="page table is gone"):
            await asked
        await asyncio.wrap_future(ended)
        assert stage.order[-1] == "1 told"
        assert stage.executor.engine_failed
