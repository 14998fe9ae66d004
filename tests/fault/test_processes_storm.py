"""Requests that are cancelled or run out of time at random moments, in real processes.

The moments are drawn from seeds; where a request is by then is up to the machine. Whatever it was
doing, it must leave nothing held on any stage.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest

from tests.harness.processes import QUICK, Processes, Run, answers, random_prompt
from wavepp import PrefillResult
from wavepp.errors import DeadlineExpired, TooLate

pytestmark = pytest.mark.processes

REQUESTS = 60
SHARED_TOKENS = 160
LATEST_S = 1.0


async def _cancelled_or_done(run: Run, after_s: float) -> str:
    """Cancel the request `after_s` seconds from now unless it has its outcome by then."""
    done, _ = await asyncio.wait({run.task}, timeout=after_s)
    if done:
        return _kind(run, await run.outcome())
    run.task.cancel()
    await asyncio.wait({run.task}, timeout=10)
    assert run.task.cancelled()
    return "cancelled"


async def _late_or_done(run: Run) -> str:
    return _kind(run, await run.outcome())


def _kind(run: Run, outcome: object) -> str:
    if isinstance(outcome, PrefillResult):
        assert answers(outcome, run.prompt)
        return "finished"
    assert isinstance(outcome, DeadlineExpired | TooLate), outcome
    return "late"


@pytest.mark.parametrize("seed", [1, 2])
async def test_nothing_stays_held_when_requests_are_cancelled_or_late_at_random_moments(
    tmp_path: Path, seed: int
) -> None:
    """The pools are small: requests also wait for room, and evict each other's prefixes."""
    draw = random.Random(seed)
    shared = random_prompt(seed, SHARED_TOKENS)
    async with Processes(tmp_path, f"{QUICK},token_us=200", pool_blocks=(60, 50, 70)) as cluster:
        waits = []
        for number in range(REQUESTS):
            prompt = shared[: draw.randrange(SHARED_TOKENS)] + random_prompt(1000 + number, draw.randint(1, 500))
            moment = draw.uniform(0.001, LATEST_S)
            match draw.randrange(3):
                case 0:
                    waits.append(_cancelled_or_done(cluster.run(prompt), moment))
                case 1:
                    waits.append(_late_or_done(cluster.run(prompt, deadline=moment)))
                case _:
                    waits.append(_late_or_done(cluster.run(prompt)))
        kinds = Counter(await asyncio.gather(*waits))
        assert kinds.total() == REQUESTS
        assert {"finished", "cancelled", "late"} == set(kinds)
        await cluster.nothing_held()
        assert await cluster.formation() == cluster.first
        await cluster.run(shared).succeeds()
