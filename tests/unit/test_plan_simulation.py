"""Planning in virtual time: hand-computed times, hashes without tokens, the oracle, shares of the bound, commands."""

from __future__ import annotations

import gc
import json
import statistics
import weakref
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from wavepp_proto import workload
from wavepp_proto.errors import InvalidRequest
from wavepp_proto.hashing import HASH_BYTES
from wavepp_proto.profile import Profile, StageCosts, StageProfile
from wavepp_proto.terms import Failed, Finished, PrefillEvent, RequestId, Timings
from wavepp_proto.workload import Arrival, Family, Part, Prompt, Trace, Workload
from wavepp_simulator import planning_load
from wavepp_simulator.__main__ import command
from wavepp_simulator.bounds import family_bound, least_s, useful_us
from wavepp_simulator.capacity import fewest
from wavepp_simulator.chains import Chains
from wavepp_simulator.oracle import budgets, ideal, oracle
from wavepp_simulator.planning import Deployment, Overheads, config_of, with_block_tokens
from wavepp_simulator.planning_load import Load, Played
from wavepp_simulator.planning_result import summarise

FREE = Overheads(round_s=0.0, hash_token_s=0.0, intake_token_s=0.0, announce_token_s=0.0, prepare_s=0.0)
WAVE_S = 0.1
FLAT = Profile(
    "flat",
    tuple(StageProfile(StageCosts(c_us=WAVE_S * 1e6), pool_blocks=4096) for _ in range(3)),
    block_tokens=16,
    wave_tokens=64,
    min_wave_tokens=32,
    layers=3,
)
"""Every wave takes 100 ms on each of three stages."""
SHAPED = replace(
    FLAT,
    stages=tuple(StageProfile(StageCosts(2000.0, 20.0, 0.01, 0.5), pool_blocks=4096) for _ in range(3)),
    link_us=100.0,
)


def cold(name: str, tokens: int) -> Prompt:
    return Prompt((Part(name, tokens),))


def at_once(*prompts: Prompt) -> Trace:
    return Trace("at once", tuple(Arrival(0.0, prompt) for prompt in prompts))


def small(name: str, concurrency: int = 4) -> Family:
    return replace(workload.family(name, "glm", concurrency), short=160, long=320)


def played(
    profile: Profile, asked: Workload, overheads: Overheads = FREE, mode: str = "overlapped", replicas: int = 1
) -> Played:
    return Load(profile, config_of(profile, "fixed", mode), overheads, replicas).play(asked)


def took(run: Played) -> list[float]:
    return [(one.ended_at or 0.0) - one.at for one in run.measured]


# --- times --------------------------------------------------------------------------------------


def test_a_prompt_takes_its_waves_and_the_pipeline_when_messages_are_free() -> None:
    one_wave, four_waves = played(FLAT, at_once(cold("a", 64))), played(FLAT, at_once(cold("a", 256)))
    assert took(one_wave) == [pytest.approx(3 * WAVE_S)]
    assert took(four_waves) == [pytest.approx((4 + 2) * WAVE_S)]
    assert [len(ran) for ran in four_waves.ran.values()] == [4, 4, 4]


def test_every_message_takes_half_a_round() -> None:
    """Submit, announce, acknowledge, prepare, vote, wave, report, tell: eight; hashing and one slice of preparing."""
    overheads = replace(FREE, round_s=0.002, hash_token_s=1e-5, prepare_s=0.0005)
    run = played(FLAT, at_once(cold("a", 64)), overheads)
    assert took(run) == [pytest.approx(3 * WAVE_S + 8 * 0.001 + 64e-5 + 0.0005)]
    (one,) = run.measured
    assert (one.admitted_at or 0.0) - one.at == pytest.approx(6 * 0.001 + 64e-5)


def test_who_becomes_ready_in_a_pause_shares_the_next_round_when_something_runs() -> None:
    """The first round takes from 15 to 25 ms and is followed by as long a pause; both that become ready in it, at 27
    and at 33 ms, share the round at 35 ms, and hear at 50 ms that they are admitted."""
    asked = [Arrival(at_s, cold(f"p{number}", 256)) for number, at_s in enumerate((0.0, 0.012, 0.018))]
    run = played(FLAT, Trace("pause", tuple(asked)), replace(FREE, round_s=0.010))
    assert [one.admitted_at - one.at for one in run.asked.values() if one.admitted_at is not None] == [
        pytest.approx(0.030),
        pytest.approx(0.050 - 0.012),
        pytest.approx(0.050 - 0.018),
    ]


def test_prompts_that_are_sent_at_once_come_one_after_the_other() -> None:
    """Each takes 64 ms to be read; the first is announced in another 32 ms and fills a wave alone."""
    overheads = replace(FREE, intake_token_s=1e-3, announce_token_s=5e-4)
    run = played(FLAT, at_once(*(cold(f"p{number}", 64) for number in range(3))), overheads)
    assert [(one.admitted_at or 0.0) - one.at for one in run.measured] == [
        pytest.approx(number * 0.064 + 0.032) for number in (1, 2, 3)
    ]


def test_a_closed_loop_asks_its_prompts_from_the_first_one_after_the_preload() -> None:
    family = small("short_reuse")
    load = Load(FLAT, config_of(FLAT, "fixed", "overlapped"), FREE, 1)
    run = load.play(family, 24)
    asked = [one.prompt for one in list(run.asked.values())[len(family.preloaded) :]]
    assert asked == [family.prompt(number) for number in range(len(asked))]


@pytest.mark.parametrize("count", [5, 6, 7])
def test_a_closed_loop_is_measured_between_waves(count: int) -> None:
    """Whoever shared the last wave is counted, and nobody who shared the wave that ended the warm-up."""
    family = replace(small("short_cold", 8), short=16)
    run = Load(FLAT, config_of(FLAT, "fixed", "overlapped"), FREE, 1).play(family, count)
    ended = [one for one in run.asked.values() if one.ended_at is not None and run.start < one.ended_at <= run.end]
    assert len(run.measured) == len(ended) >= count
    assert run.measured[-1].ended_at == run.end


def test_a_link_and_the_cost_model_set_the_time_of_a_wave() -> None:
    run = played(SHAPED, at_once(cold("a", 64)))
    wave = (2000.0 + 20.0 * 64 + 0.01 * 64 * 64 / 2) / 1e6
    assert took(run) == [pytest.approx(3 * wave + 2 * 1e-4)]


def test_a_prefix_is_reused_and_not_computed_again() -> None:
    first, second = cold("a", 256), Prompt((Part("a", 192), Part("b", 64)), 192)
    run = played(FLAT, Trace("two", (Arrival(0.0, first), Arrival(10.0, second))))
    assert [one.cached_tokens for one in run.measured] == [0, 192]
    assert took(run)[1] == pytest.approx(3 * WAVE_S)


def test_copies_take_their_time_when_the_device_is_too_small() -> None:
    """Two prompts of 40 blocks in 64: 16 of the first one's go to the host. Of its 39, 15 come back for the third
    prompt, for which 16 of the second one's leave: 31 copies, one after the other, before its wave."""
    tiers = [replace(stage, pool_blocks=64, host_pool_blocks=128, copy_us=1000.0) for stage in FLAT.stages]
    profile = replace(FLAT, stages=tuple(tiers))
    again = Prompt((Part("a", 624), Part("b", 16)), 624)
    prompts = (cold("a", 640), cold("c", 640), again)
    run = played(profile, Trace("t", tuple(Arrival(10.0 * at, prompt) for at, prompt in enumerate(prompts))))
    assert [one.cached_tokens for one in run.measured] == [0, 0, 624]
    assert run.copied_blocks == 3 * (16 + 31)
    assert took(run)[2] == pytest.approx(3 * WAVE_S + 31e-3)


def test_snapshots_allow_reuse_where_layers_are_recurrent() -> None:
    stages = tuple(replace(stage, state_slots=16) for stage in FLAT.stages)
    profile = replace(FLAT, stages=stages, layers=6, attention_every=2, snapshot_tokens=64)
    second = Prompt((Part("a", 192), Part("b", 64)), 192)
    run = played(profile, Trace("two", (Arrival(0.0, cold("a", 192)), Arrival(10.0, second))))
    assert [one.cached_tokens for one in run.measured] == [0, 192]


def test_replicas_share_the_load() -> None:
    prompts = [cold(f"p{number}", 64) for number in range(8)]
    one, two = played(FLAT, at_once(*prompts)), played(FLAT, at_once(*prompts), replicas=2)
    assert one.end - one.start == pytest.approx((8 + 2) * WAVE_S)
    assert two.end - two.start == pytest.approx((4 + 2) * WAVE_S)
    assert {name.partition("/")[0] for name, ran in two.ran.items() if ran} == {"p0", "p1"}


def test_a_run_is_equal_when_it_is_played_again() -> None:
    results = [json.dumps(summarise(SHAPED, played(SHAPED, small("mixed"), Overheads.measured(3)))) for _ in range(2)]
    assert results[0] == results[1]


@pytest.mark.parametrize("mode", ["overlapped", "lockstep", "drain"])
@pytest.mark.parametrize("name", ["short_cold", "short_reuse", "mixed"])
def test_a_closed_loop_ends_in_every_mode(name: str, mode: str) -> None:
    result = summarise(SHAPED, played(SHAPED, small(name), Overheads.measured(3), mode))
    assert (result["requests"] >= 24, result["failed"]) == (True, 0)
    assert 0.2 < result["work_of_bound"] <= 1.0


# --- numbers ------------------------------------------------------------------------------------


def test_the_parts_of_a_prompt_are_worth_what_all_of_it_asks() -> None:
    costs = SHAPED.stages[0].costs
    whole = least_s(SHAPED, [(1000, 160)]) * 1e6
    for cuts in ((160, 1000), (160, 300, 301, 1000), (160, 224, 288, 1000)):
        parts = [useful_us(costs, 64, (1000, 160), a, b - a) for a, b in pairwise(cuts)]
        assert sum(parts) == pytest.approx(whole)


def test_a_saturated_closed_loop_nears_the_bound() -> None:
    result = summarise(SHAPED, played(SHAPED, small("short_cold", 16)))
    assert result["work_of_bound"] == pytest.approx(1.0, abs=0.005)
    assert result["input_tokens_per_s"] == pytest.approx(family_bound(SHAPED, small("short_cold")), rel=0.06)


def test_hits_are_counted_good_when_most_of_the_prefix_was_there() -> None:
    result = summarise(SHAPED, played(SHAPED, small("short_reuse")))
    assert (result["good_hit_rate"], result["reused_share"]) == (1.0, 0.8)


def test_the_oracle_needs_a_wave_for_each_prompt_when_one_asks() -> None:
    """One slot, two full waves of 0.1 s over three stages: 0.4 s, of which the slowest stage is worth 0.2."""
    alone = replace(small("short_cold", 1), short=128)
    assert ideal(FLAT, alone, 64, 10).fraction_of_bound == pytest.approx(0.2 / 0.4)
    assert ideal(FLAT, alone, 128, 10).fraction_of_bound == pytest.approx(0.2 / 0.3)


def test_the_oracle_takes_the_best_budget() -> None:
    profile = replace(SHAPED, wave_tokens=4096, min_wave_tokens=512)
    assert budgets(profile) == [4096, 2048, 1024, 512]
    family = replace(small("short_cold", 2), short=4096)
    found = {budget: ideal(profile, family, budget, 8).fraction_of_bound for budget in budgets(profile)}
    best = oracle(profile, family, 8)
    assert (best.budget, best.fraction_of_bound) == (1024, max(found.values()))
    assert found[1024] > found[4096]


def test_another_block_size_keeps_the_tokens_of_a_pool() -> None:
    tiers = tuple(replace(stage, host_pool_blocks=100, copy_us=3.0) for stage in FLAT.stages)
    changed = with_block_tokens(replace(FLAT, stages=tiers), 32)
    assert (changed.stages[0].pool_blocks, changed.stages[0].host_pool_blocks) == (2048, 50)
    assert changed.stages[0].copy_us == pytest.approx(6.0)
    with pytest.raises(InvalidRequest):
        with_block_tokens(replace(FLAT, stages=(replace(FLAT.stages[0], pool_blocks=1),) * 3), 32)


@pytest.mark.parametrize(
    ("needed", "most", "found"), [(1, 8, 1), (2, 8, 2), (5, 8, 5), (8, 8, 8), (9, 8, None), (3, 3, 3)]
)
def test_the_fewest_replicas_that_hold_are_found(needed: int, most: int, found: int | None) -> None:
    asked: list[int] = []

    def run(replicas: int) -> dict[str, Any]:
        asked.append(replicas)
        return {"failed": 0, "completion_s": {"p95": 10.0 * needed / replicas}}

    assert fewest(run, 10.0, most).replicas == found
    assert len(asked) == len(set(asked)) <= 6


# --- hashes -------------------------------------------------------------------------------------


def test_equal_prefixes_have_equal_hashes_when_prompts_differ_behind_them() -> None:
    chains = Chains(16)
    one = chains.hashes(Prompt((Part("a", 100), Part("b", 60), Part("c", 40))))
    other = chains.hashes(Prompt((Part("a", 100), Part("b", 90))))
    assert (len(one), len(other)) == (200 // 16 * HASH_BYTES, 190 // 16 * HASH_BYTES)
    shared = 160 // 16 * HASH_BYTES
    assert one[:shared] == other[:shared]
    assert one[shared : shared + HASH_BYTES] != other[shared : shared + HASH_BYTES]


def test_a_stream_elsewhere_has_other_hashes() -> None:
    chains = Chains(16)
    alone, behind = chains.hashes(cold("b", 64)), chains.hashes(Prompt((Part("a", 16), Part("b", 48))))
    hashes = [packed[at : at + HASH_BYTES] for packed in (alone, behind) for at in range(0, len(packed), HASH_BYTES)]
    assert len(set(hashes)) == len(hashes) == 8


# --- the command --------------------------------------------------------------------------------


def run(*arguments: str) -> Any:
    return CliRunner().invoke(command, ["plan", *arguments])


@pytest.fixture
def device(tmp_path: Path) -> str:
    path = tmp_path / "flat.json"
    path.write_text(FLAT.to_json())
    return str(path)


def test_a_trace_is_planned_when_the_command_is_given_one(device: str, tmp_path: Path) -> None:
    lines = [{"timestamp": 1000 * at, "input_length": 512 * 2, "hash_ids": [0, at + 1]} for at in range(5)]
    trace = tmp_path / "t.jsonl"
    trace.write_text("\n".join(json.dumps(line) for line in lines))
    told = run("--profile", device, "--trace", str(trace), "--speed", "0.1", "--minutes", "0.05", "--json")
    result = json.loads(told.stdout)
    assert (result["requests"], result["failed"], result["reused_share"]) == (3, 0, pytest.approx(1 / 3, abs=1e-3))
    assert result["good_hit_rate"] == 1.0


def test_capacity_is_told_when_a_tail_is_given(device: str, tmp_path: Path) -> None:
    """Eight waves at once: one pipeline ends the last one after 1 s, two after 0.6 s."""
    trace = tmp_path / "t.jsonl"
    lines = [{"timestamp": 0, "input_length": 64, "hash_ids": [at]} for at in range(8)]
    trace.write_text("\n".join(json.dumps(line) for line in lines))
    asked = ("--profile", device, "--trace", str(trace), "--p95-s", "0.7", "--policy", "fixed")
    told = run(*asked, "--replicas", "4", "--json")
    assert [one["replicas"] for one in json.loads(told.stdout)["tried"]] == [1, 2]
    assert json.loads(told.stdout)["replicas"] == 2
    assert run(*asked, "--replicas", "1").exit_code == 1
    loose = run("--profile", device, "--trace", str(trace), "--p95-s", "9", "--policy", "fixed")
    assert loose.stdout.splitlines()[-1] == "1 replica holds a p95 completion of 9 s"


def test_words_name_what_was_asked(device: str) -> None:
    told = run("--profile", device, "--family", "short_cold", "--prompt-tokens", "128", "--concurrency", "2")
    assert told.exit_code == 0
    assert "short_cold, 2 at once on 1 x flat, overlapped+adaptive" in told.stdout


@pytest.mark.parametrize(("asked", "requests"), [(("--requests", "7"), 7), ((), 256)])
def test_as_many_arrivals_are_played_as_asked_for_when_a_rate_is_given(
    device: str, asked: tuple[str, ...], requests: int
) -> None:
    load = ("--family", "short_cold", "--prompt-tokens", "64", "--rate", "5")
    result = json.loads(run("--profile", device, *load, *asked, "--json").stdout)
    assert (result["requests"], result["failed"]) == (requests, 0)
    assert result["arrivals_of_bound"] < 1


def test_arrivals_beyond_the_bound_are_told_when_a_rate_exceeds_it(device: str) -> None:
    """A wave of 64 tokens takes 100 ms: twenty prompts a second are about twice what can be done, and two a fifth."""
    load = ("--profile", device, "--family", "short_cold", "--prompt-tokens", "64", "--seconds", "20", "--rate")
    assert "arrivals exceed what the slowest stage can do (" in run(*load, "20").stdout
    assert "exceed" not in run(*load, "2").stdout


def test_a_closed_loop_is_past_its_first_round_when_nobody_says_how_long() -> None:
    """The default number of requests gives the same answer as many more."""

    def throughput(measured: int | None) -> Any:
        load = Load(SHAPED, config_of(SHAPED, "adaptive", "overlapped"), FREE, 1)
        return summarise(SHAPED, load.play(small("mixed", 2), measured))

    default = throughput(None)
    assert default["measured_s"] >= 10 or default["requests"] >= 16 * 64
    assert default["input_tokens_per_s"] == pytest.approx(throughput(200)["input_tokens_per_s"], rel=0.02)


def test_seconds_are_measured_when_a_closed_loop_is_given_them(device: str) -> None:
    load = ("--profile", device, "--family", "short_cold", "--prompt-tokens", "64", "--concurrency", "4")
    result = json.loads(run(*load, "--seconds", "3", "--json").stdout)
    assert result["measured_s"] == pytest.approx(3, abs=0.3)


def test_a_shipped_profile_is_planned_when_it_is_named() -> None:
    told = run("--profile", "glm_5_2_pp4", "--family", "suffix4k", "--concurrency", "1", "--requests", "2")
    assert told.exit_code == 0
    assert "on 1 x glm_5_2_pp4" in told.stdout


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--profile", "nothing", "--family", "mixed"), "neither a file nor one of glm_5_2_pp4"),
        ((), "either"),
        (("--family", "nothing"), "no family"),
        (("--family", "mixed", "--prompt-tokens", "5"), "no length"),
        (("--family", "short_cold", "--policy", "best"), "policy"),
        (("--family", "short_cold", "--block-tokens", "100000"), "pool_blocks"),
    ],
)
def test_the_command_says_what_is_wrong(device: str, arguments: tuple[str, ...], word: str) -> None:
    told = run("--profile", device, *arguments)
    assert told.exit_code == 2
    assert word in " ".join(told.output.split())


def test_no_deployment_is_left_behind_when_another_one_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of the paper's tables kept eight of them, 5.2 GB: the collector does not count what arrays take."""
    made: list[weakref.ref[Load]] = []

    class Watched(Load):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(weakref.ref(self))

    monkeypatch.setattr(planning_load, "Load", Watched)
    gc.disable()
    try:
        for _ in range(2):
            config = config_of(FLAT, "fixed", "overlapped")
            played = planning_load.planned(FLAT, config, FREE, at_once(cold("a", 20)))
            assert [one() for one in made] == [None] * len(made)
            assert len(played.asked) == 1
    finally:
        gc.enable()
    assert len(made) == 2


# --- short prompts behind long ones ----------------------------------------------------------------


@pytest.mark.parametrize("policy", ["fixed", "mpu", "adaptive"])
def test_short_prompt_waits_for_waves_under_way_alone_when_a_long_one_came_first(policy: str) -> None:
    """2 waves' worth behind 100: it waited for all of them at equal priority."""
    profile = replace(SHAPED, wave_tokens=64, min_wave_tokens=32)
    long, short = cold("long", 6400), cold("short", 48)
    asked = Trace("behind", (Arrival(0.0, long), Arrival(0.05, short)))
    waited = {}
    for share in (0.0, 0.25):
        config = replace(config_of(profile, policy, "overlapped"), short_share=share)
        run = Load(profile, config, FREE, 1).play(asked)
        name = next(key for key, one in run.asked.items() if one.prompt is short)
        waves = [wave for wave in next(iter(run.ran.values())) if wave.start_s >= run.asked[name].at]
        waited[share] = next(
            at for at, wave in enumerate(waves) if any(row.key.request_id == name for row in wave.rows)
        )
        assert [one.failure for one in run.measured] == ["", ""]
    assert waited[0.0] > 80
    assert waited[0.25] <= 2 * len(SHAPED.stages) + 1  # what the ring held


def test_plan_tells_how_many_waves_prompts_waited_and_how_far_they_were_stretched() -> None:
    told = run("--profile", "glm_5_2_pp4", "--family", "behind", "--concurrency", "8", "--requests", "40", "--json")
    order = json.loads(told.stdout)["order_by_kind"]
    assert set(order) == {"long", "short"}
    assert order["short"]["waited_waves_p50"] < 16
    assert order["long"]["stretch_mean"] < 1 / (1 - 0.25) + 0.5


# --- overload -----------------------------------------------------------------------------------


def classes(offered: dict[int, float], seconds: float) -> dict[int, list[float | None]]:
    """Seconds that each request of a priority took (None: not within 10 s); arrivals a second by priority, evenly."""
    begun: dict[RequestId, tuple[int, float]] = {}
    took: dict[int, list[float | None]] = {priority: [] for priority in offered}

    def told(event: PrefillEvent, timings: Timings | None) -> None:
        if isinstance(event, Finished | Failed):
            priority, at = begun.pop(event.request_id)
            spent = deployment.now - at
            took[priority].append(spent if isinstance(event, Finished) and spent <= 10.0 else None)

    config = replace(config_of(FLAT, "adaptive", "overlapped"), lanes=16)
    deployment = Deployment(FLAT, config, FREE, told)
    deployment.run(lambda: deployment.serving)
    start = deployment.now

    def submit(priority: int, number: int) -> None:
        name = RequestId(f"{priority}-{number}")
        begun[name] = (priority, deployment.now)
        deployment.submit(name, cold(name, 32), priority=priority)

    for priority, rate in offered.items():
        for number in range(round(seconds * rate)):
            deployment.agenda.at(start + number / rate, partial(submit, priority, number))
    deployment.run(
        lambda: deployment.now >= start + seconds + 12.0 or (not begun and deployment.now >= start + seconds)
    )
    for priority, _ in begun.values():
        took[priority].append(None)
    return took


def test_high_class_within_its_capacity_is_served_at_three_times_the_load() -> None:
    """FLAT serves 20 such requests a second; 9 of priority 9 (0.45 of it) come with 51 of priority 0."""
    idle = statistics.median([one for one in classes({9: 1.0}, 20.0)[9] if one is not None])
    high = classes({9: 9.0, 0: 51.0}, 60.0)[9]
    served = [one for one in high if one is not None]
    assert len(served) >= 0.99 * len(high)
    assert statistics.median(served) <= 3 * idle
