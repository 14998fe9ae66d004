"""Profiles: the bound they set, their JSON, and the fit that finds coefficients from measured throughputs."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from wavepp import profiles
from wavepp.profile_fit import Cell, Share, doubts, fit, read_cells, residuals, weights_us
from wavepp_proto.errors import InvalidRequest
from wavepp_proto.profile import Demand, Profile, StageCosts, StageProfile

M = 16_384
COSTS = StageCosts(c_us=9_000.0, b_us=12.0, a_us=6e-5, g_us=0.1)


def cell_of(costs: StageCosts, input_tokens: int, cached_tokens: int, c: int = 8, reached: float = 1.0) -> Cell:
    """What a pipeline reaches that runs at `reached` of its bound."""
    bound = Profile("p", (StageProfile(costs, 1),), wave_tokens=M).bound([(input_tokens, cached_tokens, 1.0)])
    return Cell("f", c, bound * reached, (Share(input_tokens, cached_tokens, 1.0),))


SHAPES = ((128_000, 0), (260_000, 0), (128_000, 115_200), (260_000, 233_984), (129_088, 124_992))


def test_demand_counts_the_fewest_and_earliest_cuts_when_a_prompt_needs_several_waves() -> None:
    demand = Demand.of(40_000, 4_000, M)
    assert demand.tokens == 36_000
    assert demand.waves == 36_000 / M
    assert demand.pairs == (40_000**2 - 4_000**2) / 2
    # three chunks: 4,000 to 7,232, then two full ones
    assert demand.prefix == 4_000 + (40_000 - M) + (40_000 - 2 * M)


def test_demand_equals_the_costs_of_its_waves_when_the_suffix_fills_them() -> None:
    spent = COSTS.wave_us([(64, M)]) + COSTS.wave_us([(64 + M, M)])
    assert COSTS.demand_us(Demand.of(64 + 2 * M, 64, M)) == pytest.approx(spent, rel=1e-12)


def test_bound_is_the_slowest_stages_when_stages_differ() -> None:
    slow = replace(COSTS, b_us=24.0)
    profile = Profile("p", (StageProfile(COSTS, 1), StageProfile(slow, 1)), wave_tokens=M)
    assert profile.bound([(M, 0, 1.0)]) == pytest.approx(M / slow.wave_us([(0, M)]) * 1e6)


def test_bound_weighs_by_share_when_prompts_are_mixed() -> None:
    profile = Profile("p", (StageProfile(COSTS, 1),), wave_tokens=M)
    one, other = (M, 0, 0.75), (2 * M, 0, 0.25)
    spent = 0.75 * COSTS.demand_us(Demand.of(M, 0, M)) + 0.25 * COSTS.demand_us(Demand.of(2 * M, 0, M))
    assert profile.bound([one, other]) == pytest.approx(1.25 * M / spent * 1e6)


def test_fit_recovers_c_over_m_plus_b_a_and_g_when_every_cell_is_at_its_bound() -> None:
    found = fit([cell_of(COSTS, *shape) for shape in SHAPES], M, COSTS.c_us)
    assert found.c_us == COSTS.c_us
    assert found.b_us == pytest.approx(COSTS.b_us, rel=1e-6)
    assert found.a_us == pytest.approx(COSTS.a_us, rel=1e-6)
    assert found.g_us == pytest.approx(COSTS.g_us, rel=1e-6)


def test_fit_leaves_no_cell_above_its_bound_when_cells_fall_short() -> None:
    short = (1.0, 0.9, 0.97, 0.8, 0.99)
    cells = [cell_of(COSTS, *shape, reached=reached) for shape, reached in zip(SHAPES, short, strict=True)]
    found = fit(cells, M, 5_000.0)
    fractions = [one.fraction for one in residuals(found, cells, M)]
    assert max(fractions) <= 1.0
    assert sorted(fractions)[-1] > 1.0 - 1e-6
    assert found.c_us >= 5_000.0
    assert min(found.b_us, found.a_us, found.g_us) >= 0.0


def test_fit_has_no_better_neighbour_when_many_are_tried() -> None:
    """The vertex is the optimum of a linear program: no allowed point of a random cloud does better."""
    chance = np.random.default_rng(7)
    cells = [cell_of(COSTS, *shape, reached=float(chance.uniform(0.7, 1.0))) for shape in SHAPES]
    found = fit(cells, M, 1_000.0)
    demands = np.array([cell.demand(M) for cell in cells], float)
    measured = np.array([cell.measured_us for cell in cells])
    best = (demands @ np.array([found.c_us, found.b_us, found.a_us, found.g_us]) / measured).sum()
    cloud = np.exp(chance.normal(0.0, 1.0, (20_000, 4))) * [10_000.0, 10.0, 5e-5, 0.1]
    cloud[:, 0] = np.maximum(cloud[:, 0], 1_000.0)
    shares = cloud @ (demands / measured[:, None]).T
    cloud_best = shares[(shares <= 1.0).all(axis=1)].sum(axis=1)
    assert len(cloud_best) > 100
    assert cloud_best.max() <= best + 1e-6


def test_fit_is_bounded_but_not_pulled_when_a_cell_is_not_fitted() -> None:
    cells = [cell_of(COSTS, *shape) for shape in SHAPES]
    slow = replace(cell_of(COSTS, 64_000, 0, reached=0.1), fitted=False)
    fast = replace(cell_of(COSTS, 128_000, 0, reached=1.1), fitted=False)
    assert fit([*cells, slow], M, COSTS.c_us) == fit(cells, M, COSTS.c_us)
    bound = fit([*cells, fast], M, COSTS.c_us)
    assert all(one.fraction <= 1.0 for one in residuals(bound, [*cells, fast], M))


def test_fit_takes_the_fastest_cell_when_one_shape_was_measured_often() -> None:
    cells = [cell_of(COSTS, 128_000, 0, c, reached) for c, reached in ((1, 0.3), (8, 1.0), (32, 0.9))]
    assert [round(one.fraction, 6) for one in residuals(fit(cells, M), cells, M)] == [0.3, 1.0, 0.9]


def test_fit_names_the_cell_when_physics_forbids_it() -> None:
    with pytest.raises(InvalidRequest, match="f at c = 8 is faster") as error:
        fit([cell_of(COSTS, 128_000, 0)], M, 1e9)
    assert error.value.fields["field"] == "least_c_us"


def test_fit_refuses_when_there_are_too_many_kinds_of_prompts() -> None:
    with pytest.raises(InvalidRequest, match="33 kinds of prompts"):
        fit([cell_of(COSTS, 1_000 + tokens, 0) for tokens in range(33)], M)


def test_weights_take_their_bytes_over_the_bandwidth_when_read_once() -> None:
    assert weights_us(744e9, 4, 8e12) == pytest.approx(23_250.0)


def test_cells_are_read_when_written_flat_or_in_parts() -> None:
    flat = {"family": "cold", "input_tokens": 100, "cached_tokens": 0, "c": 2, "tokens_per_s": 5}
    parts = [{"input_tokens": 100, "cached_tokens": 90, "share": 3}, {"input_tokens": 200, "cached_tokens": 0}]
    mixed = {"family": "mixed", "parts": parts, "c": 4, "tokens_per_s": 7.5, "fitted": False, "system": "x"}
    first, second = read_cells(json.dumps([flat, mixed]))
    assert first == Cell("cold", 2, 5.0, (Share(100, 0, 1.0),))
    assert second == Cell("mixed", 4, 7.5, (Share(100, 90, 3.0), Share(200, 0, 1.0)), False, "x")
    assert second.measured_us == pytest.approx(500 / 7.5 * 1e6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "no JSON"),
        ("[]", "at least one entry"),
        ('[{"family": "f"}]', "cell 0 is wrong: KeyError"),
        ("[3]", "cell 0 is wrong"),
        ("[" * 100_000, "no JSON"),
        ('[{"family":"f","input_tokens":Infinity,"cached_tokens":0,"c":1,"tokens_per_s":1}]', "OverflowError"),
        ('[{"family":"f","input_tokens":1000000000,"cached_tokens":0,"c":1,"tokens_per_s":1}]', "number out of"),
        ('[{"family":"f","input_tokens":9,"cached_tokens":0,"c":1,"tokens_per_s":1e-320}]', "number out of"),
        (
            '[{"family":"f","input_tokens":9,"cached_tokens":0,"share":Infinity,"c":1,"tokens_per_s":1}]',
            "number out of",
        ),
        ('[{"family":"f","input_tokens":9,"cached_tokens":9,"c":1,"tokens_per_s":1}]', "cell 0 has a number out of"),
        ('[{"family":"f","input_tokens":9,"cached_tokens":0,"c":1,"tokens_per_s":0}]', "cell 0 has a number out of"),
        ('[{"family":"f","parts":[],"c":1,"tokens_per_s":1}]', "cell 0 has a number out of"),
    ],
)
def test_cells_are_refused_by_name_when_one_is_wrong(text: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read_cells(text)


@pytest.mark.parametrize("name", profiles.names())
def test_shipped_profile_holds_every_promise_when_loaded(name: str) -> None:
    """Round trip, physics and residuals, as its own provenance states them."""
    profile = profiles.load(name)
    assert Profile.from_json(profile.to_json()) == profile
    told = profile.provenance
    least = weights_us(told["weight_bytes"], len(profile.stages), told["memory_bytes_per_s"])
    assert told["least_c_us"] == pytest.approx(least)
    assert all(stage.costs.c_us >= least for stage in profile.stages)
    assert told["sources"]
    assert told["assumed"]
    for one in told["residuals"]:
        bound = profile.bound(tuple(part) for part in one["shapes"])
        assert bound == pytest.approx(one["bound_tokens_per_s"], abs=0.1)
        assert one["tokens_per_s"] <= bound


def test_shipped_profiles_are_the_papers_three_when_listed() -> None:
    assert profiles.names() == ("glm_5_2_pp4", "kimi_k3_pp8", "minimax_m2_7_pp4")
    kimi = profiles.load("kimi_k3_pp8")
    assert (len(kimi.stages), kimi.attention_every, kimi.fills) == (8, 4, 1)
    assert kimi.stages[0].state_slots > kimi.lanes
    assert kimi.stages[0].host_pool_blocks > kimi.stages[0].pool_blocks


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"pool_blocks": 0}, "pool_blocks"),
        ({"copy_us": -1.0}, "copy_us"),
        ({"copy_us": 10**400}, "copy_us"),
        ({"costs": {"a_us": 1e300}}, "a_us"),
        ({"host_pool_blocks": 1.5}, "host_pool_blocks"),
        ({"state_slots": True}, "state_slots"),
    ],
)
def test_profile_is_refused_by_name_when_a_stage_is_out_of_range(change: dict[str, object], field: str) -> None:
    document = json.loads(Profile("p", (StageProfile(COSTS, 16),)).to_json())
    document["stages"][0].update(change)
    with pytest.raises(InvalidRequest) as error:
        Profile.from_json(json.dumps(document))
    assert error.value.fields["field"] == field


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"wave_tokens": 64}, "wave_tokens"),
        ({"layers": 0}, "layers"),
        ({"link_us": float("inf")}, "link_us"),
        ({"lanes": 129}, "lanes"),
        ({"stages": []}, "stages"),
        ({"unknown": 1}, "profile"),
        ({"name": 5}, "name"),
        ({"provenance": [1]}, "provenance"),
    ],
)
def test_profile_is_refused_by_name_when_a_field_is_out_of_range(change: dict[str, object], field: str) -> None:
    document = json.loads(Profile("p", (StageProfile(COSTS, 16),)).to_json())
    document.update(change)
    with pytest.raises(InvalidRequest) as error:
        Profile.from_json(json.dumps(document))
    assert error.value.fields["field"] == field


@pytest.mark.parametrize("name", profiles.names())
def test_shipped_costs_are_found_again_when_their_own_cells_are_fitted(name: str) -> None:
    """Nobody changed a coefficient by hand: the cells that a profile keeps lead to its costs."""
    profile = profiles.load(name)
    cells = [
        Cell(
            one["family"], one["c"], one["tokens_per_s"], tuple(Share(*part) for part in one["shapes"]), one["fitted"],
            one["system"],
        )
        for one in profile.provenance["residuals"]
    ]  # fmt: skip
    costs = fit(cells, profile.wave_tokens, profile.provenance["least_c_us"])
    assert {stage.costs for stage in profile.stages} == {costs}
    found = [one.as_dict() for one in residuals(costs, cells, profile.wave_tokens)]
    assert found == profile.provenance["residuals"]


def test_a_fit_is_doubted_when_its_cells_cannot_tell_the_coefficients_apart() -> None:
    one = [Cell("cold", 8, 50_000.0, (Share(M, 0, 1.0),))]
    kinds, *others = doubts(fit(one, M), one, M)
    assert kinds.startswith("4 coefficients cannot be told apart by so few kinds of prompts (1)")
    assert others


def test_a_fit_is_doubted_for_the_coefficients_that_are_0() -> None:
    said = doubts(StageCosts(0.0, 0.0, 1.0, 1.0), [Cell("x", 1, 1.0, (Share(n * M, 0, 1.0),)) for n in (1, 2, 3, 4)], M)
    assert [text[:6] for text in said] == ["c is 0", "b is 0"]
    assert doubts(COSTS, [Cell("x", 1, 1.0, (Share(n * M, 0, 1.0),)) for n in (1, 2, 3, 4)], M) == ()
