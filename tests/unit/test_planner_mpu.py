"""Policy `mpu`, rule by rule: hand-computed (P = 4, R = 8, F = 2, so S = 12; M = 16,384, B = 64)."""

from __future__ import annotations

import pytest

from tests.harness.planning import M, daemon, flying, lane, lanes, shape, view
from wavepp_controller.core.latency_model import LatencyModel
from wavepp_controller.core.plan_mpu import MpuPolicy, Steering, Supply, choose, ladder, largest_filling
from wavepp_controller.core.planning import PlanView
from wavepp_proto.terms import StageTimes

S, P, R = 12, 4, 8
FINE = ladder(M, 1024, 64)


def policy(least: int = 1024, fills: int = 2) -> MpuPolicy:
    return MpuPolicy(LatencyModel(), least, fills)


def tokens(planner: MpuPolicy, seen: PlanView) -> int:
    """Of the next wave."""
    return sum(row.length for row in planner.plan(seen).rows)


def report(planner: MpuPolicy) -> None:
    planner.observe(daemon(0), (), 0, StageTimes(), 0.0)


@pytest.mark.parametrize(
    ("most", "least", "block", "budgets"),
    [
        (16_384, 1_024, 64, (16_384, 8_192, 4_096, 2_048, 1_024)),
        (16_384, 8_192, 64, (16_384, 8_192)),
        (16_384, 5_000, 64, (16_384, 8_192, 4_992)),  # b_min in whole blocks; the last step is cut short by it
        (1_000, 100, 8, (1_000, 496, 248, 120, 96)),  # halves are rounded down to blocks
        (4_096, 8_192, 64, (4_096,)),  # b_min is M at most
        (128, 1, 64, (128, 64)),  # and a block at least
    ],
)
def test_ladder_halves_down_to_b_min_in_whole_blocks(
    most: int, least: int, block: int, budgets: tuple[int, ...]
) -> None:
    assert ladder(most, least, block) == budgets


def test_supply_counts_what_is_not_scheduled_and_what_is_in_the_ring() -> None:
    supply = Supply.of(view([lane("a", 1_024, 6_144), lane("b", 0, 100)], flying((4_096, 50), (200,))))
    assert supply.tokens == 5_120 + 100 + 4_096 + 50 + 200
    assert supply.pieces == [50, 100, 200, 4_096, 5_120]
    assert supply.suffixes == [100, 5_120]


def test_waves_are_at_least_the_pieces_that_cannot_share_one() -> None:
    supply = Supply.of(view(lanes(*[4_096] * 8)))
    assert supply.waves(8_192) == 4  # 4,096 is not more than half: W / b
    assert supply.waves(8_128) == 8  # more than half of 8,128: one wave each, W / b is 4.03
    assert supply.waves(2_048) == 16  # W / b; one piece counts once, however long


@pytest.mark.parametrize(
    ("lengths", "budget"),
    [((32_768,), 2_048), ((131_072,), 8_192), ((4_096,) * 8, 2_048), ((4_096,) * 16, 4_096), ((307_200,), 16_384)],
)
def test_budget_is_the_largest_that_supplies_enough_waves(lengths: tuple[int, ...], budget: int) -> None:
    """The worked numbers, without the cap on newly split pieces."""
    assert FINE[largest_filling(FINE, Supply.of(view(lanes(*lengths))), S)] == budget


def test_budget_is_b_min_when_none_supplies_enough_waves() -> None:
    assert FINE[largest_filling(FINE, Supply.of(view(lanes(2_048))), S)] == 1_024


@pytest.mark.parametrize(
    ("lengths", "budget"),
    [
        ((32_768,), 2_048),  # 8,192 supplies P, and splits the piece anyway: nothing is newly split
        ((131_072,), 8_192),
        ((4_096,) * 8, 4_096),  # 8,192 supplies P; 2,048 would newly split everything
        ((4_096,) * 16, 4_096),
        ((307_200,), 16_384),
    ],
)
def test_thinner_budget_is_refused_when_it_newly_splits_too_much(lengths: tuple[int, ...], budget: int) -> None:
    assert FINE[choose(FINE, Supply.of(view(lanes(*lengths))), S, P)] == budget


def test_thinner_budget_may_newly_split_an_eighth_of_the_work() -> None:
    """16,384 supplies P = 4 waves with W = 65,536; 8,192 splits pieces in (8,192, 16,384]."""
    within = Supply.of(view(lanes(57_344, 8_192)))
    assert choose((M, 8_192), within, S, P) == 1  # 8,192 is not above 8,192: nothing newly split
    eighth = Supply.of(view(lanes(65_536, 9_344)))
    assert 9_344 <= 0.125 * eighth.tokens < 9_408
    assert choose((M, 8_192), eighth, S, P) == 1
    above = Supply.of(view(lanes(65_536, 9_408)))
    assert choose((M, 8_192), above, S, P) == 0


def test_cap_does_not_count_when_no_larger_budget_supplies_the_stages() -> None:
    supply = Supply.of(view(lanes(12_288, 12_288)))
    assert supply.waves(M) == 2
    assert choose((M, 8_192), supply, S, P) == 1


def test_pieces_in_flight_cannot_be_newly_split() -> None:
    supply = Supply.of(view(lanes(65_536), flying((12_288,), (12_288,))))
    assert choose((M, 8_192), supply, S, P) == 1


def test_burst_raises_the_budget_at_once() -> None:
    planner = policy()
    assert tokens(planner, view(lanes(32_768))) == 2_048
    assert tokens(planner, view(lanes(307_200), flying((2_048,)))) == M


def test_rise_of_one_step_counts_when_it_has_lasted_half_a_ring_of_decisions() -> None:
    planner = policy(least=8_192)
    assert tokens(planner, view(lanes(65_536))) == 8_192
    high = view(lanes(307_200), flying((8_192,)))
    assert [tokens(planner, high) for _ in range(R // 2)] == [8_192, 8_192, 8_192, M]


def test_rise_begins_again_when_it_was_interrupted() -> None:
    planner = policy(least=8_192)
    low, high = view(lanes(65_536), flying((8_192,))), view(lanes(307_200), flying((8_192,)))
    tokens(planner, low)
    for _ in range(3):
        assert tokens(planner, high) == 8_192
    assert tokens(planner, low) == 8_192
    assert [tokens(planner, high) for _ in range(4)] == [8_192, 8_192, 8_192, M]


def test_fall_counts_when_it_has_lasted_a_ring_of_decisions() -> None:
    planner = policy(least=8_192)
    assert tokens(planner, view(lanes(307_200))) == M
    low = view(lanes(131_072), flying((M,)))
    assert Supply.of(low).waves(M) == 9 < 0.9 * S
    assert [tokens(planner, low) for _ in range(R)] == [M] * (R - 1) + [8_192]


def test_fall_waits_when_the_present_budget_supplies_nearly_enough() -> None:
    planner = policy(least=8_192)
    assert tokens(planner, view(lanes(307_200))) == M
    nearly = view(lanes(163_840), flying((M,)))
    assert 0.9 * S <= Supply.of(nearly).waves(M) == 11 < S
    assert [tokens(planner, nearly) for _ in range(3 * R)] == [M] * 3 * R


def test_budget_is_chosen_afresh_when_nothing_is_in_flight() -> None:
    planner = policy(least=8_192)
    assert tokens(planner, view(lanes(307_200))) == M
    assert tokens(planner, view(lanes(65_536))) == 8_192


@pytest.mark.parametrize(
    ("before", "wanted", "thin", "after"),
    [
        (Steering(2), 2, False, Steering(2)),
        (Steering(2, rising=3), 2, False, Steering(2)),
        (Steering(2), 0, False, Steering(0)),
        (Steering(2), 1, False, Steering(2, rising=1)),
        (Steering(2, rising=3), 1, False, Steering(1)),
        (Steering(2, falling=5), 1, False, Steering(2, rising=1)),
        (Steering(1), 3, True, Steering(1, falling=1)),
        (Steering(1, falling=7), 3, True, Steering(3)),
        (Steering(1, falling=7), 3, False, Steering(1, falling=8)),
    ],
)
def test_steering_moves_as_the_rules_say(before: Steering, wanted: int, thin: bool, after: Steering) -> None:
    assert before.after(wanted, R, thin) == after


def test_fewer_fills_want_fewer_waves() -> None:
    """Kimi K3: budgets {M, M/2} and one fill, so S = R = 8."""
    assert tokens(policy(8_192, fills=1), view(lanes(131_072))) == M
    assert tokens(policy(8_192, fills=0), view(lanes(65_536))) == M  # S = P waves: the paper's K3 runs
    assert tokens(policy(8_192, fills=1), view(lanes(65_536))) == 8_192
    assert tokens(policy(8_192, fills=2), view(lanes(131_072))) == 8_192


def test_leftover_is_not_filled_with_a_small_fragment_of_a_larger_request() -> None:
    """Budget 16,384: a fragment has at least max(b_min, b / 2) = 8,192 tokens."""
    planner = policy(least=8_192)
    wave = planner.plan(view([lane("a", 0, 8_256), lane("b", 0, 400_000), lane("c", 0, 500)])).rows
    assert shape(wave) == [("a", 0, 8_256, True), ("c", 0, 500, True)]
    wave = policy(least=8_192).plan(view([lane("a", 0, 8_192), lane("b", 0, 400_000)])).rows
    assert shape(wave) == [("a", 0, 8_192, True), ("b", 0, 8_192, False)]


def test_leftover_is_filled_when_a_stop_ends_the_fragment() -> None:
    wave = policy(8_192).plan(view([lane("a", 0, 8_256), lane("b", 0, 400_000, stops=(640,))])).rows
    assert shape(wave) == [("a", 0, 8_256, True), ("b", 0, 640, False)]


def test_chunks_end_on_snapshot_points_within_the_budget() -> None:
    wave = policy(8_192).plan(view([lane("a", 0, 400_000, snapshots=(10_240, 20_480))])).rows
    assert [(row.length, row.snapshots) for row in wave] == [(10_240, (10_240,))]


BUSY = flying((M,), (M,), (M,), (M,))


def test_lone_small_wave_waits_for_company_when_the_ring_is_busy() -> None:
    planner = policy(8_192)
    seen = view(lanes(4_032), BUSY, more_soon=True, now=7.0)
    assert planner.plan(seen).rows == ()
    assert planner.plan(seen).wait_until == pytest.approx(7.005)  # no wave's time is known


def test_lone_small_wave_waits_a_quarter_of_its_time_when_that_is_known() -> None:
    model = LatencyModel()
    model.seed({f"{stage}.0": {"c_us": 10_000, "b_us": 10, "a_us": 0, "g_us": 0} for stage in range(P)})
    planner = MpuPolicy(model, 8_192, 2)
    assert planner.plan(view(lanes(3_000), BUSY, more_soon=True)).wait_until == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("lengths", "in_flight"),
    [((4_032,), BUSY[:3]), ((8_192,), BUSY), ((4_096, 4_096), BUSY), ((400_000,), BUSY)],
    ids=["ring not busy", "half its budget", "half its budget together", "more is left"],
)
def test_wave_goes_at_once_when_it_is_not_lone_and_small_in_a_busy_ring(lengths: tuple[int, ...], in_flight) -> None:  # type: ignore[no-untyped-def]
    assert policy(8_192).plan(view(lanes(*lengths), in_flight, more_soon=True)).rows


def test_lone_small_wave_goes_at_once_when_no_request_is_in_admission() -> None:
    """It waited 5 ms, or a quarter of a wave, for company that could not come."""
    assert shape(policy(8_192).plan(view(lanes(4_032), BUSY)).rows) == [("a", 0, 4_032, True)]


def test_wait_ends_with_the_next_report() -> None:
    planner = policy(8_192)
    seen = view(lanes(4_032), BUSY, more_soon=True)
    assert not planner.plan(seen).rows
    report(planner)
    assert shape(planner.plan(seen).rows) == [("a", 0, 4_032, True)]


def test_wait_ends_with_the_next_vote() -> None:
    planner = policy(8_192)
    assert not planner.plan(view(lanes(1_000), BUSY, more_soon=True)).rows
    both = planner.plan(view(lanes(1_000, 1_000), BUSY, more_soon=True)).rows
    assert shape(both) == [("a", 0, 1_000, True), ("b", 0, 1_000, True)]


def test_wait_ends_with_its_time() -> None:
    planner = policy(8_192)
    assert not planner.plan(view(lanes(4_032), BUSY, more_soon=True)).rows
    assert not planner.plan(view(lanes(4_032), BUSY, more_soon=True, now=0.004)).rows
    assert planner.plan(view(lanes(4_032), BUSY, more_soon=True, now=0.005)).rows


def test_waiting_is_no_decision() -> None:
    """A decision is a planned wave: neither a rise nor a fall gets older while one waits."""
    planner = policy(8_192)
    assert tokens(planner, view(lanes(307_200))) == M
    low = view(lanes(4_032), BUSY, more_soon=True)
    for _ in range(2 * R):
        assert not planner.plan(low).rows
    report(planner)
    assert planner.plan(low).rows
    assert [tokens(planner, view(lanes(131_072), flying((M,)))) for _ in range(R - 1)] == [M] * (R - 2) + [8_192]


def test_equal_events_give_equal_waves() -> None:
    def run() -> list[object]:
        planner = policy()
        seen = [view(lanes(*[1_000 * (n % 7 + 1)] * (n % 5 + 1)), BUSY[: n % 5], now=n / 100) for n in range(60)]
        return [planner.plan(one) for one in seen]

    assert run() == run()
