"""Policy `fixed`: packing by hand-computed examples (B = 16)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from wavepp_controller.core.planner import Lane, ShortFirst, plan_fixed
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


def names(lanes: Sequence[Lane]) -> list[str]:
    return [one.key.request_id for one in lanes]


LONG = lane("long", 0, 1000)


def test_short_rests_go_before_a_longer_prompt_in_their_own_order() -> None:
    lanes = [LONG, lane("other long", 0, 500), lane("s1", 16, 50), lane("s2", 0, 20)]
    assert names(ShortFirst(0.5, 128).order(lanes, 4)) == ["s1", "s2", "long", "other long"]


def test_next_short_prompt_goes_first_once_what_the_last_one_overdrew_is_earned_again() -> None:
    """96 of a wave of 128 are 64 more than its share of 32: two waves of the long one earn them. With credit for a
    whole wave, one prompt after the other went first, and every wave cut the long one and read its prefix again."""
    first, shown = ShortFirst(0.25, 128), list[str]()
    for number in range(7):
        rows = plan_fixed(first.order([LONG, lane(f"s{number}", 0, 96)], 2), 128, 8, B)
        first.sent(rows)
        shown.append(rows[0].key.request_id)
    assert shown == ["s0", "long", "long", "s3", "long", "long", "s6"]


@pytest.mark.parametrize(
    ("share", "lanes", "peers"),
    [
        (0.0, [LONG, lane("s", 0, 20)], 2),  # switched off
        (0.5, [lane("whole", 0, 128), lane("s", 0, 20)], 2),  # the first ends within the wave
        (0.5, [LONG, lane("s", 0, 129)], 2),  # none ends within one
        (0.5, [LONG, lane("lower class", 0, 20)], 1),
    ],
)
def test_order_stays_when_no_short_rest_of_its_class_waits_behind_a_longer_one(
    share: float, lanes: list[Lane], peers: int
) -> None:
    assert ShortFirst(share, 128).order(lanes, peers) == lanes


def test_short_prompts_get_no_more_than_their_share_however_many_come() -> None:
    """A quarter of the tokens: the long prompt's time is bounded."""
    first, share, wave = ShortFirst(0.25, 128), 0.25, 128
    given = {"long": 0, "short": 0}
    for number in range(100):
        lanes = [lane("long", given["long"] // B * B, 1 << 20), *(lane(f"s{number}.{i}", 0, 32) for i in range(8))]
        rows = plan_fixed(first.order(lanes, len(lanes)), wave, 8, B)
        first.sent(rows)
        for row in rows:
            given["long" if row.key.request_id == "long" else "short"] += row.length
    assert given["long"] + given["short"] == 100 * wave
    assert share * 100 * wave <= given["short"] <= share * 100 * wave + 2 * wave


def test_tokens_that_were_not_moved_ahead_spend_nothing() -> None:
    first = ShortFirst(0.25, 128)
    for _ in range(50):
        first.order([LONG], 1)
        first.sent(plan_fixed([LONG], 128, 8, B))
    lanes = [LONG, *(lane(f"s{i}", 0, 64) for i in range(8))]
    assert names(first.order(lanes, 9)) == ["s0", "long", "s1", "s2", "s3", "s4", "s5", "s6", "s7"]
