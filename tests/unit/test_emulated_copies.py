"""Copies between the tiers of the emulated engine: what moves, when it may be read, and what is refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.harness.emulated_pipeline import (
    HOST_POOL,
    POOL,
    PRESET,
    VOCABULARY,
    B,
    loaded,
    lot_of,
    plan_of,
    row_of,
    run_wave,
    tokens_of,
)
from wavepp_proto.errors import EngineFault
from wavepp_proto.terms import RowResult, Sampling
from wavepp_stage.core.work import CopyDirection, CopyLot
from wavepp_stage.engine.emulated import EmulatedEngine, expected_first_token

OFFLOAD, ONBOARD = CopyDirection.OFFLOAD, CopyDirection.ONBOARD
PROMPT = tokens_of(3 * B + 1)
EXPECTED = RowResult(0, expected_first_token(PROMPT, VOCABULARY))


def computed(stages: int = 1, preset: str = PRESET) -> list[EmulatedEngine]:
    """Device blocks 0, 1, 2 hold the first three blocks of PROMPT."""
    engines = loaded(stages, preset)
    run_wave(engines, [row_of(PROMPT, 0, 3 * B, [0, 1, 2])])
    return engines


def last_token(engines: Sequence[EmulatedEngine], blocks: Sequence[int]) -> RowResult | str:
    """The answer of PROMPT's last chunk over `blocks`, or the first stage's reason to refuse it."""
    outcomes = run_wave(engines, [row_of(PROMPT, 3 * B, 3 * B + 1, [*blocks, 9], Sampling())], 2)
    faults = [str(outcome.faults[0]) for outcome in outcomes if outcome.faults]
    return faults[0] if faults else outcomes[-1].results[0]


def test_blocks_answer_as_before_when_they_come_back_to_other_places() -> None:
    engines = computed(stages=2)
    for engine in engines:
        engine.copy(lot_of(OFFLOAD, [0, 2], [5, 1]))
        engine.copy(lot_of(ONBOARD, [12, 7], [1, 5]))
    assert last_token(engines, [7, 1, 12]) == EXPECTED


def test_row_faults_when_it_reads_a_block_that_was_off_loaded() -> None:
    (engine,) = computed()
    engine.copy(lot_of(OFFLOAD, [1], [0]))
    assert str(last_token([engine], [0, 1, 2])).startswith("bad canary in block 1 (device block 1): unwritten")


def test_row_faults_when_lots_swapped_their_blocks() -> None:
    (engine,) = computed()
    engine.copy(lot_of(OFFLOAD, [0, 1], [0, 1]))
    engine.copy(lot_of(ONBOARD, [0, 1], [1, 0]))
    assert str(last_token([engine], [0, 1, 2])).startswith("bad canary in block 0 (device block 0): 0x")


def test_device_block_may_be_overwritten_when_its_off_load_is_complete() -> None:
    (engine,) = computed()
    engine.copy(lot_of(OFFLOAD, [0], [0]))
    run_wave([engine], [row_of(tokens_of(B, seed=2), 0, B, [0])])
    engine.copy(lot_of(ONBOARD, [6], [0]))
    assert last_token([engine], [6, 1, 2]) == EXPECTED


def test_off_load_is_refused_when_its_block_was_overwritten_meanwhile() -> None:
    def overwrite(lot: CopyLot) -> None:
        run_wave([engine], [row_of([1, 2], 0, 2, [0])])

    engine = EmulatedEngine(copy_gate=overwrite)
    engine.load(plan_of(0, 1), lambda done, total: None)
    run_wave([engine], [row_of(PROMPT, 0, 3 * B, [0, 1, 2])])
    with pytest.raises(EngineFault, match="device block 0 of lot 1 holds no full block"):
        engine.copy(lot_of(OFFLOAD, [0, 1], [0, 1]))
    # Nothing of the lot moved.
    assert str(last_token([engine], [5, 1, 2])).startswith("bad canary in block 0 (device block 5)")


def test_row_faults_when_a_block_is_read_before_its_copy_is_complete() -> None:
    under_way, finish = threading.Event(), threading.Event()

    def gate(lot: CopyLot) -> None:
        if lot.direction is ONBOARD:
            under_way.set()
            assert finish.wait(30)

    engine = EmulatedEngine(copy_gate=gate)
    engine.load(plan_of(0, 1), lambda done, total: None)
    run_wave([engine], [row_of(PROMPT, 0, 3 * B, [0, 1, 2])])
    engine.copy(lot_of(OFFLOAD, [2], [4]))
    # The target holds something of the same prefix already: only the copy under way makes it unreadable.
    run_wave([engine], [row_of(PROMPT, 0, 3 * B, [10, 11, 3])])
    thread = threading.Thread(target=engine.copy, args=(lot_of(ONBOARD, [3], [4], number=2),))
    thread.start()
    assert under_way.wait(30)
    assert str(last_token([engine], [0, 1, 3])).startswith("bad canary in block 2 (device block 3): unwritten")
    finish.set()
    thread.join(30)
    assert last_token([engine], [0, 1, 3]) == EXPECTED


def test_modelled_copies_add_up_when_lots_follow_each_other() -> None:
    (engine,) = computed(preset=PRESET + ",copy_us=2000")
    begun = time.monotonic()
    engine.copy(lot_of(OFFLOAD, [0, 1, 2], [0, 1, 2]))
    engine.copy(lot_of(ONBOARD, [0, 1], [0, 1]))
    # Five blocks of 2 ms on one copy engine.
    assert time.monotonic() - begun >= 5 * 0.002 - 0.001


def test_copy_ends_at_once_and_moves_nothing_when_the_engine_is_closed() -> None:
    under_way = threading.Event()
    engine = EmulatedEngine(seconds_per_copy=3600.0, copy_gate=lambda lot: under_way.set())
    engine.load(plan_of(0, 1), lambda done, total: None)
    run_wave([engine], [row_of(PROMPT, 0, 3 * B, [0, 1, 2])])
    ends: list[EngineFault] = []

    def copy() -> None:
        try:
            engine.copy(lot_of(OFFLOAD, [0], [0], number=7))
        except EngineFault as fault:
            ends.append(fault)

    thread = threading.Thread(target=copy)
    thread.start()
    assert under_way.wait(30)
    engine.close()
    thread.join(30)
    assert [fault.fields["value"] for fault in ends] == ["7"]


def test_waves_go_on_when_a_copy_is_under_way() -> None:
    """One wave is computed while the copy holds: neither waits for the other."""
    answers: list[RowResult | str] = []
    engine = EmulatedEngine(copy_gate=lambda lot: answers.append(last_token([engine], [0, 1, 2])))
    engine.load(plan_of(0, 1), lambda done, total: None)
    run_wave([engine], [row_of(PROMPT, 0, 3 * B, [0, 1, 2]), row_of(tokens_of(B, seed=2), 0, B, [4])])
    engine.copy(lot_of(OFFLOAD, [4], [0]))
    assert answers == [EXPECTED]


@pytest.mark.parametrize(
    ("device", "host", "field", "message"),
    [
        ([POOL], [0], "device", "leaves the device pool"),
        ([-1], [0], "device", "leaves the device pool"),
        ([0], [HOST_POOL], "host", "leaves the host pool"),
        ([0], [-1], "host", "leaves the host pool"),
        ([0, 1], [2], "host", "names 2 device and 1 host blocks"),
        ([0, 1], [2, 2], "host", "names a host block twice"),
        ([1, 1], [2, 3], "device", "names a device block twice"),
        ([3], [2], "device", "holds no full block"),
    ],
)
def test_lot_is_refused_by_name_when_it_does_not_fit(
    device: list[int], host: list[int], field: str, message: str
) -> None:
    (engine,) = computed()
    with pytest.raises(EngineFault, match=message) as caught:
        engine.copy(lot_of(OFFLOAD, device, host))
    assert caught.value.fields["field"] == field
    assert last_token([engine], [0, 1, 2]) == EXPECTED


def test_lot_is_refused_when_the_stage_has_no_host_tier_or_is_not_loaded() -> None:
    engine = EmulatedEngine()
    with pytest.raises(EngineFault, match="not loaded"):
        engine.copy(lot_of(OFFLOAD, [0], [0]))
    engine.load(replace(plan_of(0, 1), host_pool_blocks=0), lambda done, total: None)
    with pytest.raises(EngineFault, match="no host tier"):
        engine.copy(lot_of(OFFLOAD, [0], [0]))


def test_copies_move_nothing_and_take_no_time_when_no_layer_attends() -> None:
    """Blocks of such a stage are numbers: the copy of an unwritten one is no error."""
    engine = EmulatedEngine(seconds_per_copy=3600.0)
    engine.load(plan_of(0, 1, PRESET + ",attention_every=0"), lambda done, total: None)
    engine.copy(lot_of(OFFLOAD, [0, 1], [0, 1]))
    engine.copy(lot_of(ONBOARD, [2], [1]))
    with pytest.raises(EngineFault, match="leaves the device pool"):
        engine.copy(lot_of(OFFLOAD, [POOL], [0]))
