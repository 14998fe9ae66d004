"""CopyQueue: numbers, bounds, and lots that end in order whatever is reported when."""

from __future__ import annotations

import numpy as np

from wavepp_stage.core.copies import MAX_COPIES, MAX_LOTS, CopyQueue
from wavepp_stage.core.work import CopyDirection


def plan(queue: CopyQueue, copies: int) -> list[int]:
    nodes, blocks = np.arange(1, copies + 1, dtype=np.int64), np.arange(copies, dtype=np.int32)
    return [lot.copy.number for lot in queue.plan(CopyDirection.OFFLOAD, nodes, blocks, blocks)]


def ended(queue: CopyQueue, number: int, *, ok: bool = True) -> list[tuple[int, bool | None]]:
    return [(lot.copy.number, lot.ok) for lot in queue.report(number, ok)]


def test_copies_are_cut_into_lots_when_they_are_many() -> None:
    queue = CopyQueue()
    assert plan(queue, 2 * MAX_COPIES + 1) == [1, 2, 3]
    assert [len(lot) for lot in queue.take()] == [MAX_COPIES, MAX_COPIES, 1]
    assert plan(queue, 0) == []


def test_bounded_number_of_lots_is_under_way_when_more_are_planned() -> None:
    queue = CopyQueue()
    for _ in range(MAX_LOTS + 2):
        plan(queue, 1)
    assert [lot.number for lot in queue.take()] == [1, 2, 3, 4]
    assert queue.take() == []
    queue.report(2, True)  # moves no more, although it has not ended: its place is free
    assert [lot.number for lot in queue.take()] == [5]


def test_lot_ends_after_all_earlier_ones_when_reported_out_of_order() -> None:
    queue = CopyQueue()
    for _ in range(3):
        plan(queue, 1)
    queue.take()
    assert ended(queue, 3) == []
    assert ended(queue, 2, ok=False) == []
    assert queue.ended == 0
    assert ended(queue, 1) == [(1, True), (2, False), (3, True)]
    assert queue.ended == 3


def test_report_changes_nothing_when_the_lot_has_ended_or_was_reported() -> None:
    queue = CopyQueue()
    plan(queue, 1)
    plan(queue, 1)
    queue.take()
    assert ended(queue, 2, ok=False) == []
    assert ended(queue, 2, ok=True) == []
    assert ended(queue, 1) == [(1, True), (2, False)]
    assert ended(queue, 1) == []


def test_lots_not_started_are_cancelled_when_the_formation_ends() -> None:
    queue = CopyQueue()
    for _ in range(MAX_LOTS + 1):
        plan(queue, 1)
    queue.take()
    assert [lot.copy.number for lot in queue.end_formation(7)] == [MAX_LOTS + 1]
    assert queue.settle() == []
    assert plan(queue, 1) == [MAX_LOTS + 2]  # of the next formation
    assert [lot.copy.number for lot in queue.executor_stopped(7)] == [1, 2, 3, 4, 5]
    assert [lot.number for lot in queue.take()] == [MAX_LOTS + 2]


def test_earlier_copies_count_as_stopped_when_a_later_formation_stopped() -> None:
    """There is one copy thread: once it is drained for the later, nothing older moves."""
    queue = CopyQueue()
    plan(queue, 1)
    queue.take()
    queue.end_formation(1)
    plan(queue, 1)
    queue.take()
    queue.end_formation(2)
    assert [lot.copy.number for lot in queue.executor_stopped(2)] == [1, 2]
    assert queue.executor_stopped(1) == []
