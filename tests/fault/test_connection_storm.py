"""A connection between controller and stage that fails in every way at random moments, while requests run.

Outages are drawn shorter and longer than the silence that ends a formation; requests may try again in the
next one. Whatever happens, every answer is right, and at the end nothing is held anywhere.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.conformance.test_serving import B, oracle, prompt
from tests.harness.cluster import Cluster
from tests.harness.variant import servable
from wavepp import PrefillResult

pytestmark = pytest.mark.processes

MODEL = servable("emulated:layers=8,attention_every=4,vocabulary=1000,window=65536,token_us=50,copy_us=300")
REQUESTS = 60
SPREAD_S = 6.0


async def _weather(cluster: Cluster, draw: random.Random, over: asyncio.Event) -> None:
    """Until `over`: now and then the connection is reset, stalls, goes away or is slow, for a while."""

    async def passes(seconds: float) -> None:
        waiting = asyncio.ensure_future(over.wait())
        await asyncio.wait({waiting}, timeout=seconds)
        waiting.cancel()

    proxy = cluster.proxy
    while not over.is_set():
        await passes(draw.uniform(0.02, 0.3))
        match draw.randrange(4):
            case 0:
                proxy.cut()
            case 1:
                proxy.hold()
                await passes(draw.choice([0.1, 0.3, 1.8]))
            case 2:
                proxy.go_down()
                await passes(draw.choice([0.1, 0.3, 2.0]))
            case _:
                proxy.delay(draw.uniform(0.0, 0.02))
                await passes(0.2)
        proxy.heal()


@pytest.mark.parametrize("seed", range(3))
async def test_every_answer_is_right_when_a_connection_fails_in_every_way(seed: int) -> None:
    draw = random.Random(seed)
    shared = [prompt(8 * B, 50 + index) for index in range(5)]
    async with Cluster(
        stages=1 + seed, model=MODEL, proxied=True, pool_blocks=(60,), host_pool_blocks=60, state_slots=20,
        snapshot_tokens=4 * B, inventory_ms=200, silence_ms=1250, attempts=8,
    ) as cluster:  # fmt: skip
        over = asyncio.Event()
        weather = asyncio.create_task(_weather(cluster, draw, over))

        async def one(index: int) -> str:
            await asyncio.wait({weather}, timeout=draw.uniform(0.0, SPREAD_S))
            tokens = draw.choice(shared)[: draw.randrange(1, 8 * B)] + prompt(draw.randrange(1, 200), index)
            request = asyncio.create_task(cluster.client.prefill(tokens, deadline=60))
            if draw.random() < 0.2:
                await asyncio.wait({request}, timeout=draw.uniform(0.0, 0.2))
                request.cancel()
            outcome = (await asyncio.gather(request, return_exceptions=True))[0]
            if isinstance(outcome, asyncio.CancelledError):
                return "cancelled"
            assert isinstance(outcome, PrefillResult), outcome
            assert outcome.first_token == oracle(tokens)
            return "finished"

        kinds = await asyncio.gather(*(one(index) for index in range(REQUESTS)))
        over.set()
        await weather
        assert len(kinds) == REQUESTS
        assert "finished" in kinds
        await cluster.serving()
