"""Engines that own their cache: admission runs on their thread, between two waves, and nothing waits for long.

The emulated engine plays such an engine (`cache_thread=engine`); its cache refuses to be asked on any other thread.
"""

from __future__ import annotations

import asyncio
import random
import threading

import pytest

from tests.conformance.test_serving import B, M, oracle, prompt
from tests.harness.cluster import EMULATED, Cluster
from tests.harness.eventually import eventually
from tests.harness.thread_bound import ThreadBoundCache
from wavepp import errors
from wavepp_stage.core import machine
from wavepp_stage.core.work import WaveWork
from wavepp_stage.engine.emulated import EmulatedEngine

pytestmark = pytest.mark.engines("emulated", why="it chooses the engine by itself")
OWNER = f"{EMULATED},cache_thread=engine"


@pytest.fixture(autouse=True)
def bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "BlockCache", ThreadBoundCache)


class Gate:
    """Lets one wave after the other through, on one stage, and notes which came."""

    def __init__(self, cluster: Cluster, stage: int) -> None:
        self.came: list[int] = []
        self._permits = threading.Semaphore(0)
        engine = cluster.daemons[stage].equipment.engine
        assert isinstance(engine, EmulatedEngine)
        engine._gate = self._enter

    def _enter(self, wave: WaveWork) -> None:
        self.came.append(wave.ordinal)
        assert self._permits.acquire(timeout=60)

    def let(self, waves: int) -> None:
        self._permits.release(waves)


async def test_request_is_admitted_behind_one_wave_when_many_are_queued() -> None:
    async with Cluster(stages=1, model=OWNER) as cluster:
        gate = Gate(cluster, 0)
        long, short = prompt(5 * M, 1), prompt(20, 2)
        running = asyncio.create_task(cluster.client.prefill(long))
        await eventually(lambda: gate.came == [1])
        other = asyncio.create_task(cluster.client.prefill(short))
        await eventually(lambda: cluster.daemons[0].executor._jobs._admissions, about="its round to wait")
        assert cluster.daemons[0].executor.queued >= 2
        gate.let(1)
        core = cluster.daemons[0].core
        await eventually(lambda: len(core.read(lambda one: one.inventory().holds)) == 2, about="its hold")
        assert gate.came == [1, 2]
        gate.let(100)
        assert ((await running).first_token, (await other).first_token) == (oracle(long), oracle(short))


async def test_requests_finish_when_waves_last_longer_than_a_round_may_take() -> None:
    """The controller opens its streams again and asks again: each round is handled once, behind the wave."""
    async with Cluster(stages=2, model=OWNER, round_deadline_ms=100) as cluster:
        gate = Gate(cluster, 0)
        long, short = prompt(2 * M, 1), prompt(20, 2)
        running = asyncio.create_task(cluster.client.prefill(long))
        await eventually(lambda: gate.came == [1])
        other = asyncio.create_task(cluster.client.prefill(short))
        counters = cluster.controller.machine.status
        await eventually(lambda: counters().counters.get("streams_reopened", 0) >= 3)
        gate.let(100)
        assert ((await running).first_token, (await other).first_token) == (oracle(long), oracle(short))
        assert cluster.formation == 1


async def test_daemon_closes_when_admission_waits_behind_a_wave_that_hangs() -> None:
    async with Cluster(stages=2, model=OWNER) as cluster:
        gate = Gate(cluster, 1)
        running = asyncio.create_task(cluster.client.prefill(prompt(3 * M, 1)))
        await eventually(lambda: gate.came == [1])
        other = asyncio.create_task(cluster.client.prefill(prompt(20, 2)))
        await eventually(lambda: cluster.daemons[1].executor._jobs._admissions, about="its round to wait")
        closing = asyncio.create_task(cluster.daemons[1].close())
        for request in (running, other):
            with pytest.raises(errors.WaveppError) as failed:
                await request
            assert failed.value.retryable
        gate.let(100)
        await closing
        await cluster.restart(1)
        await cluster.serving(formation=2)
        tokens = prompt(40, 3)
        assert (await cluster.client.prefill(tokens)).first_token == oracle(tokens)


@pytest.mark.parametrize("seed", range(2))
async def test_answers_stay_exact_when_requests_come_and_go_and_pools_are_small(seed: int) -> None:
    rng = random.Random(seed)
    model = f"{OWNER},token_us=20"
    shared = prompt(10 * B, 50)
    async with Cluster(stages=3, model=model, pool_blocks=(120, 60, 90)) as cluster:

        async def one(index: int) -> None:
            tokens = shared[: rng.randrange(10 * B)] + prompt(rng.randrange(1, 300), index)
            task = asyncio.create_task(cluster.client.prefill(tokens))
            await asyncio.wait({task}, timeout=rng.uniform(0.0, 0.5))
            if rng.random() < 0.3:
                task.cancel()
            (outcome,) = await asyncio.gather(task, return_exceptions=True)
            assert isinstance(outcome, asyncio.CancelledError) or outcome.first_token == oracle(tokens)  # type: ignore[union-attr]

        await asyncio.gather(*(one(index) for index in range(40)))
