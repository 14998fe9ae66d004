"""What is believed of requests that are not there yet: a loop by who follows whom, later ones by rate and work."""

from __future__ import annotations

import pytest

from wavepp_controller.core.arrivals import Arrivals
from wavepp_proto.profile import StageCosts

COSTS = StageCosts(10_000.0, 10.0)
"""10 ms a wave and 10 us a token."""


def test_clients_are_in_a_loop_when_somebody_follows_every_end() -> None:
    seen = Arrivals()
    for number in range(40):
        seen.ended(1, number)
        seen.came([(0, 100)], number + 0.02, dated=True)
    assert seen.looped


def test_loop_is_no_longer_believed_when_five_ends_in_a_row_have_nobody_follow() -> None:
    seen = Arrivals()
    believed = []
    for number in range(5):
        seen.ended(1, number)
        seen.came([(0, 100)], number + 0.5, dated=True)
        believed.append(seen.looped)
    assert believed == [True, True, True, True, False]


def test_loop_is_believed_again_when_ends_are_followed() -> None:
    seen = Arrivals()
    seen.ended(8, 0.0)
    seen.came([], 1.0, dated=True)
    assert not seen.looped
    for number in range(16):
        seen.ended(1, 2.0 + number)
        seen.came([(0, 100)], 2.01 + number, dated=True)
    assert seen.looped


def test_many_who_ended_at_once_are_followed_when_they_come_in_a_row() -> None:
    """Twenty come 10 ms after one another, the last of them 200 ms after the end."""
    seen = Arrivals()
    seen.ended(20, 0.0)
    for number in range(20):
        seen.came([(0, 100)], 0.01 * (number + 1), dated=True)
    seen.came([], 9.0, dated=True)
    assert seen.looped


def test_one_arrival_follows_one_end_when_several_ended() -> None:
    seen = Arrivals()
    for number in range(4):
        seen.ended(4, number)
        seen.came([(0, 100)], number + 0.01, dated=True)
    seen.came([], 9.0, dated=True)
    assert not seen.looped


def test_arrival_follows_an_end_when_it_could_not_be_seen_at_once() -> None:
    """The ring was full: nobody was asked for a plan."""
    seen = Arrivals()
    for number in range(8):
        seen.ended(1, number)
        seen.came([(0, 100)], number + 0.5, dated=False)
    assert seen.looped


def test_later_requests_are_those_that_come_until_the_work_is_done() -> None:
    """One a second, each 10 + 90 ms: a load of 0.1 (of the last three seconds 4/3 as much). 0.9 s of work take 0.9 /
    (1 - 0.1333) s, in which 1.38 come."""
    seen = Arrivals()
    for number in range(4):
        seen.came([(0, 9_000)], number, dated=True)
    load = 4 * 0.1 / 3
    assert seen.later(900_000.0, COSTS, 3.0) == pytest.approx(0.9 * 4 / 3 / (1 - load))


def test_no_later_requests_are_expected_when_too_few_have_come() -> None:
    seen = Arrivals()
    seen.came([(0, 9_000)] * 3, 0.0, dated=True)
    assert seen.later(900_000.0, COSTS, 1.0) == 0.0


def test_later_requests_are_finite_when_more_comes_than_can_be_done() -> None:
    seen = Arrivals()
    seen.came([(0, 9_000)] * 20, 0.0, dated=True)
    assert seen.later(900_000.0, COSTS, 0.1) == pytest.approx(0.9 * 20 / 0.1 / 0.05)


@pytest.mark.parametrize(("way_back_s", "looped"), [(0.15, True), (0.25, False)])
def test_way_back_may_be_long_when_requests_take_long(way_back_s: float, looped: bool) -> None:
    """A sixth of 1.2 s."""
    seen = Arrivals()
    for number in range(16):
        seen.took(1.2)
        seen.ended(1, 2.0 * number)
        seen.came([(0, 100)], 2.0 * number + way_back_s, dated=True)
    assert seen.looped is looped
