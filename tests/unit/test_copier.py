"""The copy thread: lots in order, their ends told to the core, and a drain that means what it says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from tests.harness.eventually import eventually_sync
from wavepp_proto.errors import EngineFault
from wavepp_stage.core.events import Action, CopiesEnded, Event
from wavepp_stage.core.work import CopyDirection, CopyLot
from wavepp_stage.runtime.copier import Copier


class Core:
    """Notes what the copier posts."""

    def __init__(self) -> None:
        self.ended: list[tuple[int, bool]] = []
        self.on_end: Callable[[int], None] = lambda number: None

    def post(self, event: Event) -> list[Action]:
        assert isinstance(event, CopiesEnded)
        self.ended.append((event.number, event.ok))
        self.on_end(event.number)
        return []


class Engine:
    """Copies nothing; waits at a gate if there is one, and fails where it is told to."""

    def __init__(self) -> None:
        self.copied: list[int] = []
        self.gate: threading.Event | None = None
        self.failing: dict[int, Exception] = {}

    def copy(self, lot: CopyLot) -> None:
        if self.gate is not None:
            assert self.gate.wait(30)
        if lot.number in self.failing:
            raise self.failing[lot.number]
        self.copied.append(lot.number)


def lot(number: int, blocks: int = 2, direction: CopyDirection = CopyDirection.OFFLOAD) -> CopyLot:
    ids = np.arange(blocks, dtype=np.int32)
    return CopyLot(number, direction, ids, ids)


@contextmanager
def copying() -> Iterator[tuple[Copier, Core, Engine]]:
    core, engine = Core(), Engine()
    copier = Copier(core, engine, lambda *_: None, "copier-test")  # type: ignore[arg-type]
    try:
        yield copier, core, engine
    finally:
        if engine.gate is not None:
            engine.gate.set()
        assert copier.close(10)


def test_lots_run_in_the_order_in_which_they_were_handed_over() -> None:
    with copying() as (copier, core, engine):
        for number in range(1, 6):
            copier.start(lot(number))
        copier.drain(10)
        assert engine.copied == [1, 2, 3, 4, 5]
        assert core.ended == [(number, True) for number in range(1, 6)]
        assert copier.counts.blocks == {"offload": 10, "onboard": 0}
        assert copier.counts.failed_lots == 0


@pytest.mark.parametrize("error", [EngineFault("no host tier"), MemoryError("pinned memory")])
def test_failed_lot_is_told_and_the_next_one_runs_when_an_engine_raises(error: Exception) -> None:
    with copying() as (copier, core, engine):
        engine.failing[1] = error
        copier.start(lot(1, direction=CopyDirection.ONBOARD))
        copier.start(lot(2, direction=CopyDirection.ONBOARD))
        copier.drain(10)
        assert core.ended == [(1, False), (2, True)]
        assert copier.counts.blocks == {"offload": 0, "onboard": 2}
        assert copier.counts.failed_lots == 1


def test_waiter_is_woken_after_the_core_knows() -> None:
    seen: list[int] = []
    with copying() as (copier, core, _):
        copier.on_ended = lambda: seen.append(len(core.ended))
        copier.start(lot(1))
        copier.start(lot(2))
        copier.drain(10)
    assert seen == [1, 2]


def test_drain_waits_for_lots_that_the_end_of_another_sets_free() -> None:
    with copying() as (copier, core, engine):
        core.on_end = lambda number: copier.start(lot(number + 1)) if number < 4 else None
        copier.start(lot(1))
        copier.drain(10)
        assert engine.copied == [1, 2, 3, 4]


def test_drain_is_a_typed_error_when_a_copy_hangs() -> None:
    with copying() as (copier, core, engine):
        engine.gate = threading.Event()
        copier.start(lot(1))
        with pytest.raises(EngineFault) as refused:
            copier.drain(0.01)
        assert refused.value.fields == {"field": "copies", "value": "1", "limit": "0.01 s"}
        engine.gate.set()
        copier.drain(10)
        assert core.ended == [(1, True)]


def test_what_has_not_begun_is_dropped_when_the_copier_closes() -> None:
    core, engine = Core(), Engine()
    engine.gate = threading.Event()
    copier = Copier(core, engine, lambda *_: None, "copier-test")  # type: ignore[arg-type]
    copier.start(lot(1))
    eventually_sync(lambda: copier._busy)
    copier.start(lot(2))
    assert not copier.close(0.01)
    engine.gate.set()
    assert copier.close(10)
    copier.start(lot(3))
    assert core.ended == [(1, True)]
