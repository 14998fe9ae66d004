"""Where recurrent snapshots are taken, and how many are promised for them (B = 16)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wavepp_controller.core.snapshot_policy import SnapshotPolicy
from wavepp_proto.hashing import reuse_cap

B = 16


def policy(every: int = 64, slots: int | None = 400) -> SnapshotPolicy:
    return SnapshotPolicy.of(B, every, slots)


@pytest.mark.parametrize(
    ("start", "prompt", "expected"),
    [
        (0, 200, (64, 128, 192)),
        (64, 200, (128, 192)),
        (192, 200, ()),  # the last full block is reused: its snapshot is there
        (176, 200, (192,)),
        (0, 192, (64, 128, 192)),  # the end of the prompt is a periodic place too
        (0, 15, ()),
        (0, 64, (64,)),
    ],
)
def test_periodic_places_and_the_end_of_the_prompt_are_taken_when_in_the_suffix(
    start: int, prompt: int, expected: tuple[int, ...]
) -> None:
    assert policy().positions(start, prompt, (), 100) == expected


def test_wanted_places_are_taken_when_they_lie_in_the_suffix() -> None:
    assert policy(every=0).positions(32, 200, (16, 32, 48, 208), 100) == (48, 192)


def test_end_then_wanted_then_latest_periodic_places_are_kept_when_room_is_short() -> None:
    made = policy()
    assert made.positions(0, 500, (80, 96), 1) == (496,)
    assert made.positions(0, 500, (80, 96), 2) == (80, 496)
    assert made.positions(0, 500, (80, 96), 3) == (80, 96, 496)
    assert made.positions(0, 500, (80, 96), 5) == (80, 96, 384, 448, 496)
    assert made.positions(0, 500, (80,), 0) == ()


@pytest.mark.parametrize(
    ("every", "expected"), [(100, (96, 192)), (1, (16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192)), (0, (192,))]
)
def test_distance_is_rounded_to_whole_blocks_when_it_is_none(every: int, expected: tuple[int, ...]) -> None:
    assert policy(every).positions(0, 200, (), 100) == expected


@pytest.mark.parametrize(("slots", "most"), [(None, 0), (2, 1), (3, 1), (4, 2), (11, 2), (12, 3), (400, 100)])
def test_one_request_takes_a_quarter_of_the_slots_or_two_at_most(slots: int | None, most: int) -> None:
    made = policy(every=16, slots=slots)
    assert made.most == most
    assert len(made.positions(0, 16 * 500, (), 1000)) == most
    assert made.promised(0, 16 * 500) == most


def test_one_more_is_promised_than_is_known_when_there_is_room_for_a_spare() -> None:
    assert policy().promised(0, 200) == 4
    assert policy().promised(192, 200) == 1
    assert policy(slots=8).promised(0, 200) == 2
    assert policy(slots=None).promised(0, 200) == 0


@pytest.mark.parametrize(("slots", "from_start", "from_snapshot"), [(2, 1, 0), (3, 1, 1), (8, 2, 2), (12, 3, 3)])
def test_promise_leaves_slots_for_the_working_state_and_the_snapshot_begun_with(
    slots: int, from_start: int, from_snapshot: int
) -> None:
    made = policy(every=16, slots=slots)
    assert (made.promised(0, 500), made.promised(160, 500)) == (from_start, from_snapshot)


@given(
    st.integers(1, 2000),
    st.data(),
    st.sampled_from([0, 16, 40, 64, 512]),
    st.integers(2, 64),
    st.lists(st.integers(0, 130).map(lambda block: block * B), max_size=5),
)
def test_places_are_whole_blocks_of_the_suffix_within_the_promise(
    prompt: int, data: st.DataObject, every: int, slots: int, wanted: list[int]
) -> None:
    made = policy(every, slots)
    start = data.draw(st.integers(0, reuse_cap(prompt, B) // B)) * B
    promised = made.promised(start, prompt)
    places = made.positions(start, prompt, wanted, promised)
    assert list(places) == sorted(set(places))
    assert all(start < place <= prompt and place % B == 0 for place in places)
    assert len(places) <= promised <= max(1, min(2, slots - 2), slots // 4)
    end = prompt // B * B
    assert (end in places) == (end > start and promised > 0)
    assert promised + 1 + (start > 0) <= slots
