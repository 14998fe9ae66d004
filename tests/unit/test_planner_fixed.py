"""Policy `fixed`: packing by hand-computed examples (B = 16)."""

from __future__ import annotations

import pytest

from wavepp_controller.core.planner import Lane, plan_fixed
from wavepp_proto.terms import Attempt, HoldKey, RequestId, Row

B = 16


def lane(name: str, start: int, prompt: int) -> Lane:
    return Lane(HoldKey(RequestId(name), Attempt(1)), start, prompt)


def shape(rows: tuple[Row, ...]) -> list[tuple[str, int, int, bool]]:
    return [(row.key.request_id, row.start, row.length, row.final) for row in rows]


def test_wave_is_full_when_one_prompt_is_longer_than_it() -> None:
    assert shape(plan_fixed([lane("a", 32, 1000)], 128, 8, B)) == [("a", 32, 128, False)]


def test_prompts_share_a_wave_in_order_when_they_fit() -> None:
    rows = plan_fixed([lane("a", 0, 20), lane("b", 16, 50), lane("c", 0, 10)], 128, 8, B)
    assert shape(rows) == [("a", 0, 20, True), ("b", 16, 34, True), ("c", 0, 10, True)]


def test_interior_chunk_ends_on_a_block_when_the_rest_of_the_wave_is_ragged() -> None:
    rows = plan_fixed([lane("a", 0, 20), lane("b", 0, 500)], 128, 8, B)
    assert shape(rows) == [("a", 0, 20, True), ("b", 0, 96, False)]


def test_leftover_smaller_than_a_block_is_left_when_only_a_long_prompt_waits() -> None:
    rows = plan_fixed([lane("a", 0, 120), lane("b", 0, 500)], 128, 8, B)
    assert shape(rows) == [("a", 0, 120, True)]


def test_short_rest_behind_uses_the_leftover_when_the_lane_before_it_cannot() -> None:
    rows = plan_fixed([lane("a", 0, 120), lane("b", 0, 500), lane("c", 16, 23)], 128, 8, B)
    assert shape(rows) == [("a", 0, 120, True), ("c", 16, 7, True)]


@pytest.mark.parametrize(("prompt", "length"), [(1, 1), (B - 1, B - 1), (B, B), (B + 1, B + 1), (2 * B, 2 * B)])
def test_chunk_is_final_and_whole_when_the_prompt_is_short(prompt: int, length: int) -> None:
    assert shape(plan_fixed([lane("a", 0, prompt)], 128, 8, B)) == [("a", 0, length, True)]


@pytest.mark.parametrize(("prompt", "expected"), [(127, (127, True)), (128, (128, True)), (129, (128, False))])
def test_chunk_ends_the_prompt_when_it_is_at_most_a_wave(prompt: int, expected: tuple[int, bool]) -> None:
    ((_, _, length, final),) = shape(plan_fixed([lane("a", 0, prompt)], 128, 8, B))
    assert (length, final) == expected


def test_rows_stop_at_the_most_a_wave_may_hold_when_many_lanes_wait() -> None:
    rows = plan_fixed([lane(str(i), 0, 1) for i in range(9)], 128, 4, B)
    assert [row.key.request_id for row in rows] == ["0", "1", "2", "3"]


def test_nothing_is_planned_when_there_are_no_lanes() -> None:
    assert plan_fixed([], 128, 8, B) == ()


def taken(rows: tuple[Row, ...]) -> list[tuple[int, int, tuple[int, ...]]]:
    return [(row.start, row.length, row.snapshots) for row in rows]


def special(start: int, prompt: int, snapshots: tuple[int, ...] = (), stops: tuple[int, ...] = ()) -> Lane:
    return Lane(HoldKey(RequestId("a"), Attempt(1)), start, prompt, snapshots, stops)


@pytest.mark.parametrize(
    ("snapshots", "length", "inside"),
    [
        ((96, 192), 96, (96,)),  # the chunk ends on a snapshot point
        ((80, 112, 192), 112, (80, 112)),  # on the last one
        ((32, 192), 128, (32,)),  # half of a wave is not given away for it
        ((64,), 128, (64,)),
        ((128, 192), 128, (128,)),
        ((144,), 128, ()),
    ],
)
def test_interior_chunk_ends_on_a_snapshot_point_when_one_lies_near(
    snapshots: tuple[int, ...], length: int, inside: tuple[int, ...]
) -> None:
    assert taken(plan_fixed([special(0, 1000, snapshots)], 128, 8, B)) == [(0, length, inside)]


def test_final_chunk_carries_its_snapshots_when_the_prompt_ends_in_it() -> None:
    assert taken(plan_fixed([special(64, 160, (80, 160))], 128, 8, B)) == [(64, 96, (80, 160))]
    assert taken(plan_fixed([special(64, 165, (80, 160))], 128, 8, B)) == [(64, 101, (80, 160))]


@pytest.mark.parametrize(("stops", "length"), [((16, 64), 16), ((128,), 128), ((144,), 128), ((48,), 48)])
def test_chunk_ends_at_the_first_stop_when_it_reaches_one(stops: tuple[int, ...], length: int) -> None:
    assert taken(plan_fixed([special(0, 1000, (), stops)], 128, 8, B)) == [(0, length, ())]


def test_others_fill_the_wave_when_a_stop_ends_a_chunk_early() -> None:
    rows = plan_fixed([special(0, 100, (48, 96), (48,)), lane("b", 0, 500)], 128, 8, B)
    assert shape(rows) == [("a", 0, 48, False), ("b", 0, 80, False)]
    assert [row.snapshots for row in rows] == [(48,), ()]
