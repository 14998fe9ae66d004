"""Any chunking, any snapshots and any copies in between: emulated stages answer as the unsplit model does.

One prompt runs in random chunks over three stages of different groups and leaves snapshots at random blocks;
some of its blocks go to the host and come back elsewhere. Another prompt then goes on from any snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from tests.harness.emulated_pipeline import (
    HOST_POOL,
    POOL,
    PRESET,
    SLOTS,
    VOCABULARY,
    B,
    key_of,
    loaded,
    lot_of,
    row_of,
    run_wave,
    tokens_of,
)
from wavepp_proto.terms import RowResult, Sampling
from wavepp_stage.core.work import CopyDirection, StateWork
from wavepp_stage.engine.emulated import EmulatedEngine, expected_first_token

BLOCKS = 7
"""Most full blocks of the first prompt: both prompts fit the pool of 16."""


@dataclass(frozen=True, slots=True)
class Plan:
    every: int
    """The preset's `attention_every`."""
    length: int
    cuts: tuple[int, ...]
    """Chunk ends inside the prompt, ascending."""
    snapshots: tuple[int, ...]
    """Positions, ascending multiples of B."""
    moved: tuple[int, ...]
    """Blocks of the prompt that go to the host and come back."""
    resume: int
    """Snapshot that the second prompt goes on from."""
    rest: int
    """Tokens of the second prompt behind it."""


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    length = draw(st.integers(B + 1, BLOCKS * B + B - 1))
    places = st.sampled_from(range(B, length // B * B + 1, B))
    snapshots = tuple(sorted(draw(st.sets(places, min_size=1, max_size=SLOTS - 2))))
    cuts = tuple(sorted(draw(st.sets(st.integers(1, length - 1), max_size=5))))
    moved = tuple(sorted(draw(st.sets(st.integers(0, length // B - 1), max_size=HOST_POOL))))
    every = draw(st.sampled_from((0, 1, 2, 4)))
    return Plan(every, length, cuts, snapshots, moved, draw(st.sampled_from(snapshots)), draw(st.integers(1, 2 * B)))


def compute(engines: list[EmulatedEngine], plan: Plan, tokens: list[int]) -> None:
    """Blocks 0, 1, ... and working slot 0; snapshot i goes to slot 2 + i."""
    slots = {position: 2 + number for number, position in enumerate(plan.snapshots)}
    results: list[RowResult] = []
    start = 0
    for end in (*plan.cuts, plan.length):
        inside = tuple((position, slots[position]) for position in plan.snapshots if start < position <= end)
        sampling = Sampling() if end == plan.length else None
        row = row_of(tokens, start, end, range(-(-end // B)), sampling, state=StateWork(0, snapshots=inside))
        outcomes = run_wave(engines, [row])
        assert [outcome.faults for outcome in outcomes] == [{}] * len(engines)
        results += outcomes[-1].results
        start = end
    assert results == [RowResult(0, expected_first_token(tokens, VOCABULARY))]


def move(engines: list[EmulatedEngine], blocks: tuple[int, ...]) -> dict[int, int]:
    """Off-load the blocks and bring them back from the end of the pool on; where each block is now."""
    host = list(range(len(blocks)))[::-1]
    now = {block: POOL - 1 - number for number, block in enumerate(blocks)}
    for engine in engines:
        engine.copy(lot_of(CopyDirection.OFFLOAD, blocks, host))
        engine.copy(lot_of(CopyDirection.ONBOARD, list(now.values()), host))
    return now


@given(plans())
def test_answers_equal_the_oracle_whatever_is_chunked_kept_and_copied(plan: Plan) -> None:
    engines = loaded(3, f"{PRESET},attention_every={plan.every}")
    first = tokens_of(plan.length, seed=1)
    compute(engines, plan, first)
    now = move(engines, plan.moved)
    second = first[: plan.resume] + tokens_of(plan.rest, seed=2)
    shared = [now.get(block, block) for block in range(plan.resume // B)]
    spare = [block for block in range(BLOCKS + 1) if block not in shared]
    needed = -(-len(second) // B) - len(shared)
    row = row_of(
        second, plan.resume, len(second), [*shared, *spare[:needed]], Sampling(),
        state=StateWork(1, restore=2 + plan.snapshots.index(plan.resume)), key=key_of("s"),
    )  # fmt: skip
    outcomes = run_wave(engines, [row], 9)
    assert [outcome.faults for outcome in outcomes] == [{}] * len(engines)
    assert outcomes[-1].results == (RowResult(0, expected_first_token(second, VOCABULARY)),)
