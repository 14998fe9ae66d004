"""A daemon whose engine's thread does not come back gives up, and says which wave; one that is merely slow does not."""

from __future__ import annotations

import asyncio

import pytest

from tests.harness.engine_thread import EngineThread, engine_thread
from tests.harness.eventually import eventually
from tests.harness.stage_core import B
from wavepp_proto.errors import ENGINE_HUNG, EngineFault
from wavepp_stage.engine.base import EngineFacts
from wavepp_stage.runtime import executor_watch
from wavepp_stage.runtime.executor_watch import ExecutorWatch

FACTS = EngineFacts(0, 8, "emulated", (0,), wave_allowance_s=0.0)


async def computing(stage: EngineThread, limit_ms: int = 0) -> None:
    hold = stage.announce("running", B)
    await stage.door.post(stage.round(hold))
    stage.send_chunks(hold, 1, limit_ms)
    await eventually(lambda: stage.executor.executing is not None)


async def test_verdict_names_the_wave_when_an_ended_formation_keeps_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_watch, "GRACE_S", 0.0)
    with engine_thread() as stage:
        watch = ExecutorWatch(stage.executor, 3)
        await computing(stage)
        watch.ending(asyncio.wrap_future(stage.executor.end()), FACTS, blamed=True)
        error = await watch.hung
        assert (error.fields["cause"], error.fields["stage"]) == (ENGINE_HUNG, "3")
        assert "has not returned from wave 1" in error.message
        assert not watch.gets_on(FACTS)


async def test_engine_is_judged_by_what_the_controller_allowed_when_the_formation_ends_for_another_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its own allowance, two minutes, is beside the point; a join that waits for the thread fails by name."""
    slept: list[float] = []

    async def until(stopped: asyncio.Future[None], seconds: float) -> None:
        slept.append(seconds)
        await asyncio.sleep(0)

    monkeypatch.setattr(executor_watch, "_until", until)
    with engine_thread() as stage:
        watch = ExecutorWatch(stage.executor, 3)
        await computing(stage, limit_ms=5100)
        stopped = asyncio.wrap_future(stage.executor.end())
        watch.ending(stopped, None, blamed=False)
        with pytest.raises(EngineFault, match="stage 3: the engine has not returned from wave 1") as caught:
            await watch.stopped(asyncio.shield(stopped))
        assert {name: caught.value.fields[name] for name in ("cause", "stage", "limit")} == {
            "cause": ENGINE_HUNG, "stage": "3", "limit": "5.1 s",
        }  # fmt: skip
    left_s, grace_s = slept
    assert (left_s <= 5.1, grace_s) == (True, 1.0)


async def test_verdict_waits_for_copies_when_the_wave_itself_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def until(stopped: asyncio.Future[None], seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(executor_watch, "_until", until)
    with engine_thread() as stage:
        watch = ExecutorWatch(stage.executor, 3)
        watch.ending(asyncio.get_running_loop().create_future(), FACTS, blamed=True)
        assert "has not returned from what it does" in (await watch.hung).message
    assert slept == [35.0]


async def test_verdict_comes_at_once_when_the_end_itself_fails() -> None:
    with engine_thread() as stage:
        watch = ExecutorWatch(stage.executor, 0)
        stopped = asyncio.get_running_loop().create_future()
        stopped.set_exception(EngineFault("copies did not end"))
        watch.ending(stopped, FACTS, blamed=False)
        assert "copies did not end" in (await watch.hung).message


async def test_nothing_is_said_when_the_wave_ends_though_nobody_waits_for_it_any_more() -> None:
    with engine_thread() as stage:
        watch = ExecutorWatch(stage.executor, 0)
        await computing(stage)
        stopped = asyncio.wrap_future(stage.executor.end())
        watch.ending(stopped, FACTS, blamed=False)
        waiter = asyncio.ensure_future(asyncio.shield(stopped))
        await asyncio.sleep(0)
        waiter.cancel()
        stage.let(1)
        await stopped
        await eventually(lambda: not watch._tasks)
        assert not watch.hung.done()
        assert watch.gets_on(FACTS)


async def test_engine_gets_on_as_long_as_it_keeps_within_its_allowance(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_thread() as stage:
        watch = ExecutorWatch(stage.executor, 0)
        await computing(stage)
        assert watch.gets_on(FACTS)
        monkeypatch.setattr(executor_watch, "SLACK_S", 0.0)
        await eventually(lambda: not watch.gets_on(FACTS))
        stage.let(1)
        await eventually(lambda: watch.gets_on(FACTS))
