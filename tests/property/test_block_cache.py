"""BlockCache against a model that is too simple to be wrong (tests/harness/cache_model.py).

Two ways to draw histories of the same machine: hypothesis, which shrinks what fails, and long walks,
where every seed has its own mix of steps and reaches what needs many of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import settings

from tests.harness.cache_machine import ATTENTION, LOT, LOTS, RECURRENT, SLICE, CacheMachine, some
from tests.harness.stage_core import B
from wavepp_stage.core import block_cache, copies, digest_feed


@pytest.fixture(autouse=True)
def small_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_cache, "EVICTION_SLICE", SLICE)
    monkeypatch.setattr(block_cache, "OFFLOAD_SLICE", SLICE)
    monkeypatch.setattr(digest_feed, "MAX_DIGEST_HASHES", 3)  # whatever is told in two parts is cut
    monkeypatch.setattr(copies, "MAX_COPIES", LOT)
    monkeypatch.setattr(copies, "MAX_LOTS", LOTS)


TestBlockCache = CacheMachine.TestCase
TestBlockCache.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)


@pytest.mark.parametrize("seed", range(40))
def test_model_and_cache_agree_when_a_long_history_is_drawn(seed: int) -> None:
    """Hypothesis mixes all rules; here every seed has a mix of its own, some of which seldom let a copy end."""
    draw = random.Random(seed)
    machine = CacheMachine()
    machine.start(
        pool=draw.randint(7, 12),
        floor=draw.randint(0, 2),
        host=draw.choice([0, 2, 5, 9]),
        slots=draw.randint(3, 8),
        groups=draw.choice([(ATTENTION,), (ATTENTION, RECURRENT), (ATTENTION,), (RECURRENT,)]),
        warm=[],
    )

    def fresh() -> list[int]:
        blocks, changes = draw.randint(1, 7), draw.sample(range(7), draw.randint(0, 2))
        return [int(at in changes) for at in range(blocks) for _ in range(B)] + [9] * draw.randint(1, B)

    favourites = [fresh() for _ in range(draw.randint(2, 6))]  # asked for again: prefixes come back from the host

    def prompt() -> list[int]:
        return draw.choice(favourites) if draw.random() < 0.7 else fresh()

    def held(step: Callable[[int], None], *phases: str) -> Callable[[], None]:
        return lambda: step(draw.randint(0, 100)) if some(*phases)(machine) else None

    steps: list[Callable[[], None]] = [
        lambda: machine.prepare(prompt(), draw.randint(0, 2), draw.choice([0, 1, 2]), draw.random() < 0.2),
        held(lambda at: machine.revise(at, draw.randint(0, 3), draw.randint(0, 2)), "escrowed", "committed"),
        held(machine.materialise_a_slice, "committed", "materialising"),
        held(lambda at: machine.prepare_a_row(at, draw.randint(1, 4), {draw.randint(1, 4)}), "owned"),
        held(lambda at: machine.retire_a_row(at, draw.randint(0, 8)), "owned"),
        held(machine.run_to_the_end, "committed", "materialising", "owned"),
        held(machine.release, "escrowed", "committed", "materialising", "owned"),
        lambda: machine.serve(prompt()),
        machine.start_copies,
        lambda: machine.run_a_copy(draw.randint(0, 4)) if machine.copying else None,
        lambda: machine.report_a_copy(draw.randint(0, 9)) if machine.copied else None,
        machine.read_digests,
        machine._end_formation,
        lambda: machine.stop_executors(draw.random() < 0.5) if machine.model.dying else None,
    ]
    weights = [draw.choice([1.0, 4.0, 8.0]) for _ in steps]
    weights[5], weights[7] = draw.choice([0, 1, 3]), draw.choice([0, 0, 1, 3])  # these end every copy
    weights[12] = draw.choice([0.0, 0.2, 0.5])
    for step in draw.choices(steps, weights, k=400):
        step()
        machine.cache_agrees_with_the_model()
