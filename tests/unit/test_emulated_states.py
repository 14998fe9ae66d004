"""Recurrent states of the emulated engine: snapshots, restores, and every slot that must be refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.harness.emulated_pipeline import (
    KEY,
    PRESET,
    SLOTS,
    VOCABULARY,
    B,
    key_of,
    loaded,
    on_stage,
    row_of,
    run_wave,
    tokens_of,
    wave_of,
)
from wavepp_proto.terms import HoldKey, RowResult, Sampling
from wavepp_stage.core.work import RowWork, StateWork
from wavepp_stage.engine.emulated import EmulatedEngine, expected_first_token

RECURRENT = PRESET + ",attention_every=0"
HYBRID = PRESET + ",attention_every=2"
MIXED = PRESET + ",attention_every=4"
"""Over three stages: recurrent, hybrid, recurrent."""
PROMPT = tokens_of(5 * B + 2)
EXPECTED = RowResult(0, expected_first_token(PROMPT, VOCABULARY))


def row(
    start: int,
    end: int,
    state: StateWork | None,
    tokens: Sequence[int] = PROMPT,
    key: HoldKey = KEY,
    first_block: int = 0,
    void: bool = False,
) -> RowWork:
    """[start, end) of `tokens` in blocks from `first_block` on; the last chunk of a prompt samples."""
    table = range(first_block, first_block - (-end // B))
    sampling = Sampling() if end == len(tokens) else None
    return row_of(tokens, start, end, table, sampling, void, state, key)


def fault_of(engine: EmulatedEngine, refused: RowWork) -> str:
    outcome = engine.run(wave_of(refused), None)
    assert outcome.results == ()
    assert outcome.faults.keys() == {0}
    return str(outcome.faults[0])


@pytest.mark.parametrize("preset", [RECURRENT, HYBRID, MIXED])
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("chunk", [1, 3, B, 2 * B, 7, len(PROMPT)])
def test_first_token_equals_the_oracle_when_states_carry_the_chunks(preset: str, stages: int, chunk: int) -> None:
    engines = loaded(stages, preset)
    results: list[RowResult] = []
    for ordinal, start in enumerate(range(0, len(PROMPT), chunk), 1):
        outcomes = run_wave(engines, [row(start, min(start + chunk, len(PROMPT)), StateWork(2))], ordinal)
        assert not any(outcome.faults for outcome in outcomes)
        results += outcomes[-1].results
    assert results == [EXPECTED]


@pytest.mark.parametrize("preset", [RECURRENT, HYBRID, MIXED])
def test_snapshot_answers_as_a_cold_prompt_when_another_request_restores_it(preset: str) -> None:
    engines = loaded(3, preset)
    shared = 3 * B
    second = PROMPT[:shared] + tokens_of(5, seed=2)
    run_wave(engines, [row(0, 4 * B, StateWork(0, snapshots=((shared, 4),)))])
    # The first request goes on, and its slot with it; the snapshot stays.
    run_wave(engines, [row(4 * B, len(PROMPT), StateWork(0))], 2)
    reuse = row_of(
        second, shared, len(second), [0, 1, 2, 9, 10], Sampling(), state=StateWork(1, restore=4), key=key_of("s")
    )
    outcomes = run_wave(engines, [reuse], 3)
    assert not any(outcome.faults for outcome in outcomes)
    assert outcomes[-1].results == (RowResult(0, expected_first_token(second, VOCABULARY)),)


def test_interior_snapshots_equal_those_of_separate_chunks() -> None:
    """One chunk of three blocks, and three chunks of one: a request that restores either goes on to the same state."""
    whole, apart = loaded(1, RECURRENT)[0], loaded(1, RECURRENT)[0]
    positions = (B, 2 * B, 3 * B)
    whole.run(wave_of(row(0, 3 * B, StateWork(0, snapshots=tuple(zip(positions, (1, 2, 3), strict=True))))), None)
    for position, slot in zip(positions, (1, 2, 3), strict=True):
        apart.run(wave_of(row(position - B, position, StateWork(0, snapshots=((position, slot),)))), None)
    for position, slot in zip(positions, (1, 2, 3), strict=True):
        resumed = wave_of(row(position, len(PROMPT), StateWork(5, restore=slot)))
        outcomes = [engine.run(resumed, None) for engine in (whole, apart)]
        assert [outcome.results for outcome in outcomes] == [(EXPECTED,), (EXPECTED,)]


def test_no_cell_is_read_when_no_layer_attends() -> None:
    """A restore needs only the slot: the blocks before it were never written, and are only numbers."""
    (engine,) = loaded(1, RECURRENT)
    engine.run(wave_of(row(0, 2 * B, StateWork(0, snapshots=((2 * B, 1),)), first_block=0)), None)
    outcome = engine.run(wave_of(row(2 * B, len(PROMPT), StateWork(0, restore=1), first_block=9)), None)
    assert outcome.results == (EXPECTED,)


def test_hybrid_row_faults_when_only_its_state_is_there() -> None:
    (engine,) = loaded(1, HYBRID)
    engine.run(wave_of(row(0, 2 * B, StateWork(0, snapshots=((2 * B, 1),)))), None)
    refused = row(2 * B, len(PROMPT), StateWork(0, restore=1), first_block=9)
    assert fault_of(engine, refused).startswith("bad canary in block 0 (device block 9): unwritten")


def test_hybrid_row_faults_when_only_its_blocks_are_there() -> None:
    """An attention hit without a snapshot must not start from an empty state."""
    (engine,) = loaded(1, HYBRID)
    engine.run(wave_of(row(0, 2 * B, StateWork(0))), None)
    assert fault_of(engine, row(2 * B, len(PROMPT), StateWork(3))) == "bad state in slot 3: unwritten"


def test_hybrid_row_faults_when_cells_and_state_are_of_two_prefixes() -> None:
    """Inside a block no tag tells prefixes apart: the two kinds of state do."""
    (engine,) = loaded(1, HYBRID)
    other = tokens_of(2 * B, seed=2)
    engine.run(wave_of(row(0, 2, StateWork(0)), row(0, 2, StateWork(1), other, key_of("s"), first_block=8)), None)
    refused = row(2, B, StateWork(0), first_block=8)
    assert fault_of(engine, refused) == "cells and recurrent state differ before token 2"


def test_later_stage_faults_when_its_state_is_of_another_prefix() -> None:
    first, second = loaded(2, RECURRENT)
    other = tokens_of(2 * B, seed=2)
    mine, theirs = row(0, 2, StateWork(0)), row(0, 2, StateWork(1), other, key_of("s"))
    run_wave([first, second], [mine, theirs])
    going_on = first.run(wave_of(on_stage(row(2, 4, StateWork(0)), 0, 2)), None)
    wrong = replace(on_stage(row(2, 4, StateWork(1)), 1, 2), key=key_of("s"))
    outcome = second.run(wave_of(wrong), going_on.payload)
    assert outcome.faults == {0: "state at token 2 differs from the previous stage's: this cache is of another prefix"}


def test_row_faults_when_the_snapshot_is_of_another_prefix_or_position() -> None:
    (engine,) = loaded(1, RECURRENT)
    other = tokens_of(3 * B, seed=2)
    engine.run(wave_of(row(0, 3 * B, StateWork(0, snapshots=((2 * B, 2), (3 * B, 3))))), None)
    engine.run(wave_of(row(0, 2 * B, StateWork(1, snapshots=((2 * B, 4),)), other, key_of("s"))), None)
    for slot, came in ((3, "a snapshot at 12 of prefix"), (4, "a snapshot at 8 of prefix"), (5, "unwritten")):
        cause = fault_of(engine, row(2 * B, len(PROMPT), StateWork(0, restore=slot)))
        assert cause.startswith(f"bad state in slot {slot}: {came}")
    outcome = engine.run(wave_of(row(2 * B, len(PROMPT), StateWork(0, restore=2))), None)
    assert outcome.results == (EXPECTED,)


def test_row_faults_when_it_restores_a_working_state() -> None:
    (engine,) = loaded(1, RECURRENT)
    engine.run(wave_of(row(0, 2 * B, StateWork(0))), None)
    cause = fault_of(engine, row(2 * B, len(PROMPT), StateWork(1, restore=0), key=key_of("s")))
    assert cause.startswith("bad state in slot 0: r's working state at 8 of prefix")


def test_row_faults_when_its_working_slot_was_given_to_another() -> None:
    (engine,) = loaded(1, RECURRENT)
    engine.run(wave_of(row(0, 2, StateWork(0))), None)
    engine.run(wave_of(row(0, 2, StateWork(0), key=key_of("s"))), None)
    assert fault_of(engine, row(2, 4, StateWork(0))).startswith("bad state in slot 0: s's working state at 2")


def test_row_faults_when_its_snapshot_was_reused_before_it_was_restored() -> None:
    (engine,) = loaded(1, RECURRENT)
    engine.run(wave_of(row(0, 2 * B, StateWork(0, snapshots=((2 * B, 1),)))), None)
    other = tokens_of(2 * B, seed=2)
    engine.run(wave_of(row(0, 2 * B, StateWork(2, snapshots=((2 * B, 1),)), other, key_of("s"))), None)
    cause = fault_of(engine, row(2 * B, len(PROMPT), StateWork(3, restore=1), key=key_of("t")))
    assert cause.startswith("bad state in slot 1: a snapshot at 8 of prefix")


@pytest.mark.parametrize("start", [1, 2, 4, 5])
def test_row_faults_when_it_does_not_start_where_the_working_state_stands(start: int) -> None:
    (engine,) = loaded(1, RECURRENT)
    engine.run(wave_of(row(0, 3, StateWork(0))), None)
    assert fault_of(engine, row(start, start + 1, StateWork(0))).startswith(
        "bad state in slot 0: r's working state at 3"
    )


def test_nothing_is_written_when_a_row_is_void_or_refused() -> None:
    (engine,) = loaded(1, HYBRID)
    engine.run(wave_of(row(0, B, StateWork(0, snapshots=((B, 1),)))), None)
    void = row(B, 2 * B, None, void=True)
    refused = row(B, 2 * B, StateWork(0, restore=5, snapshots=((2 * B, 1),)))
    outcome = engine.run(wave_of(void, refused), None)
    assert outcome.faults.keys() == {1}
    rest = row(B, len(PROMPT), StateWork(0, restore=1))
    assert engine.run(wave_of(rest), None).results == (EXPECTED,)


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        (None, "no recurrent state for this row"),
        (StateWork(SLOTS), f"slot {SLOTS} is not among the {SLOTS} state slots"),
        (StateWork(-1), f"slot -1 is not among the {SLOTS} state slots"),
        (StateWork(0, restore=SLOTS), f"slot {SLOTS} is not among the {SLOTS} state slots"),
        (StateWork(0, snapshots=((B, SLOTS),)), f"slot {SLOTS} is not among the {SLOTS} state slots"),
        (StateWork(1, restore=1), "one state slot has two uses among [1, 1]"),
        (StateWork(1, snapshots=((B, 2), (2 * B, 2))), "one state slot has two uses among [1, 2, 2]"),
        (StateWork(1, snapshots=((0, 2),)), "snapshot at 0 in the chunk [0, 10)"),
        (StateWork(1, snapshots=((3, 2),)), "snapshot at 3 in the chunk [0, 10)"),
        (StateWork(1, snapshots=((3 * B, 2),)), "snapshot at 12 in the chunk [0, 10)"),
        (StateWork(1, snapshots=((2 * B, 2), (B, 3))), "snapshot at 4 in the chunk [0, 10)"),
        (StateWork(1, restore=2), "bad state in slot 2: unwritten"),
    ],
)
def test_row_faults_when_its_state_work_makes_no_sense(state: StateWork | None, cause: str) -> None:
    (engine,) = loaded(1, RECURRENT)
    assert fault_of(engine, row(0, 10, state)) == cause
    assert engine.run(wave_of(row(0, len(PROMPT), StateWork(0))), None).results == (EXPECTED,)
