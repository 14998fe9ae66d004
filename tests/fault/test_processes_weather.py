"""Connections that fail and processes that pause, each for less than the silence that means lost: nobody notices.

Real processes with a hybrid model, few state slots and a host tier, so that every kind of message is under way
when its connection breaks. No request may fail, the formation stays, and nothing leaks: not even what an
inventory would repair.
"""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path

import pytest

from tests.harness.processes import BLOCK_TOKENS, VOCABULARY, Processes, random_prompt
from tests.harness.variant import expected_first_token, servable
from wavepp import PrefillResult

pytestmark = pytest.mark.processes

MODEL = servable(f"emulated:layers=8,attention_every=4,vocabulary={VOCABULARY},window=65536,token_us=200,copy_us=500")
REQUESTS = 50
SPREAD_S = 5.0


async def _weather(cluster: Processes, draw: random.Random, over: asyncio.Event) -> None:
    """Until `over`: cuts in a row, a stall, an outage, or a process that stands still for a moment."""

    async def passes(seconds: float) -> None:
        await asyncio.wait({waiting}, timeout=seconds)

    waiting = asyncio.ensure_future(over.wait())
    while not over.is_set():
        await passes(draw.uniform(0.05, 0.4))
        match draw.randrange(4):
            case 0:
                for _ in range(4):
                    cluster.proxy.cut()
                    await passes(draw.uniform(0.0, 0.1))
            case 1:
                cluster.proxy.hold()
                await passes(draw.choice([0.1, 0.5]))
            case 2:
                cluster.proxy.go_down()
                await passes(draw.choice([0.1, 0.5]))
            case _:
                name = draw.choice(sorted(cluster.pids()))
                cluster.signal(name, signal.SIGSTOP)
                await passes(draw.choice([0.1, 0.5]))
                cluster.signal(name, signal.SIGCONT)
        cluster.proxy.heal()


@pytest.mark.parametrize("seed", range(2))
async def test_no_request_fails_when_connections_break_and_processes_pause_for_less_than_the_silence(
    tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    shared = [random_prompt(100 * seed + index, 8 * BLOCK_TOKENS) for index in range(3)]
    async with Processes(
        tmp_path, MODEL, proxied=True, stages=1 + seed, pool_blocks=(40,), host_pool_blocks=(30,), state_slots=(3,),
        snapshot_tokens=2 * BLOCK_TOKENS,
    ) as cluster:  # fmt: skip
        over = asyncio.Event()
        weather = asyncio.create_task(_weather(cluster, draw, over))

        async def one(index: int) -> str:
            await asyncio.wait({weather}, timeout=draw.uniform(0.0, SPREAD_S))
            tokens = draw.choice(shared)[: draw.randrange(1, 8 * BLOCK_TOKENS)] + random_prompt(1000 + index, 40)
            request = asyncio.create_task(cluster.client.prefill(tokens))
            if draw.random() < 0.2:
                await asyncio.wait({request}, timeout=draw.uniform(0.0, 0.3))
                request.cancel()
            outcome = (await asyncio.gather(request, return_exceptions=True))[0]
            if isinstance(outcome, asyncio.CancelledError):
                return "cancelled"
            assert isinstance(outcome, PrefillResult), outcome
            assert outcome.first_token == expected_first_token(tokens, VOCABULARY)
            return "finished"

        kinds = await asyncio.gather(*(one(index) for index in range(REQUESTS)))
        over.set()
        await weather
        assert len(kinds) == REQUESTS
        await cluster.nothing_held()
        pipeline = await cluster.serving(cluster.first)
        assert pipeline.formation == cluster.first
        assert [daemon.orphans for daemon in pipeline.daemons] == [0] * len(pipeline.daemons)
