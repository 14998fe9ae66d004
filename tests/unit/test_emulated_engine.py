"""The emulated engine: stages chained by hand against the unsplit oracle, and every fault it must find."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.harness.emulated_pipeline import (
    POOL,
    PRESET,
    VOCABULARY,
    B,
    key_of,
    loaded,
    on_stage,
    plan_of,
    row_of,
    run_wave,
    tokens_of,
    wave_of,
)
from wavepp_proto.errors import EngineFault, NonFinite
from wavepp_proto.terms import CacheGroup, RowResult, Sampling
from wavepp_stage.engine.base import EnginePlan, RowWork, StageEngine, WaveOutcome, WaveWork
from wavepp_stage.engine.emulated import EmulatedEngine, emulated_model_facts, expected_first_token


def test_engine_satisfies_the_protocol_when_typed() -> None:
    engine: StageEngine = EmulatedEngine()
    assert engine.name == "emulated"


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("length", [1, B - 1, B, B + 1, 2 * B, 4 * B + 3])
def test_first_token_equals_the_oracle_when_a_prompt_runs_whole(stages: int, length: int) -> None:
    tokens = tokens_of(length)
    row = row_of(tokens, 0, length, range(-(-length // B)), Sampling())
    outcomes = run_wave(loaded(stages), [row])
    assert outcomes[-1].payload is None
    assert outcomes[-1].results == (RowResult(0, expected_first_token(tokens, VOCABULARY)),)
    assert all(not outcome.faults for outcome in outcomes)


@pytest.mark.parametrize("chunk", [1, 3, B, 2 * B, 7])
def test_first_token_equals_the_oracle_when_a_prompt_runs_in_chunks(chunk: int) -> None:
    tokens = tokens_of(18)
    engines = loaded(2)
    table = [9, 3, 7, 1, 5]
    results: list[RowResult] = []
    for ordinal, start in enumerate(range(0, len(tokens), chunk), 1):
        end = min(start + chunk, len(tokens))
        sampling = Sampling() if end == len(tokens) else None
        outcomes = run_wave(engines, [row_of(tokens, start, end, table[: -(-end // B)], sampling)], ordinal)
        assert not any(outcome.faults for outcome in outcomes)
        results += outcomes[-1].results
    assert results == [RowResult(0, expected_first_token(tokens, VOCABULARY))]


def test_reuse_answers_as_a_cold_prompt_when_two_blocks_are_shared() -> None:
    first, shared = tokens_of(10, seed=1), 2 * B
    second = first[:shared] + tokens_of(7, seed=2)
    engines = loaded(2)
    run_wave(engines, [row_of(first, 0, len(first), [0, 1, 2], Sampling())])
    outcomes = run_wave(engines, [row_of(second, shared, len(second), [0, 1, 5, 6], Sampling())], 2)
    assert outcomes[-1].results[0].token_id == expected_first_token(second, VOCABULARY)


def test_rows_answer_on_their_own_when_one_wave_carries_several() -> None:
    prompts = [tokens_of(5, seed=3), tokens_of(9, seed=4), tokens_of(4, seed=5)]
    tables = [[0, 1], [2, 3, 4], [5]]
    rows = [row_of(p, 0, len(p), table, Sampling()) for p, table in zip(prompts, tables, strict=True)]
    outcomes = run_wave(loaded(2), rows)
    expected = [RowResult(i, expected_first_token(p, VOCABULARY)) for i, p in enumerate(prompts)]
    assert list(outcomes[-1].results) == expected


def test_row_faults_when_a_prefix_block_was_never_written() -> None:
    tokens = tokens_of(12)
    outcomes = run_wave(loaded(1), [row_of(tokens, 8, 12, [4, 5, 6], Sampling())])
    assert outcomes[0].faults.keys() == {0}
    assert str(outcomes[0].faults[0]).startswith("bad canary in block 0 (device block 4): unwritten")
    assert outcomes[0].results == ()


def test_row_faults_when_a_prefix_block_belongs_to_another_prompt() -> None:
    mine, other = tokens_of(12, seed=1), tokens_of(12, seed=2)
    engines = loaded(2)
    run_wave(engines, [row_of(mine, 0, 8, [0, 1])])
    run_wave(engines, [row_of(other, 0, 4, [1])], 2)
    good = row_of(other, 4, 8, [1, 2], Sampling())
    outcomes = run_wave(engines, [row_of(mine, 8, 12, [0, 1, 3], Sampling()), good], 3)
    assert str(outcomes[0].faults[0]).startswith("bad canary in block 1 (device block 1)")
    assert outcomes[1].faults.keys() == {0}
    assert outcomes[1].results == (RowResult(1, expected_first_token(other[:8], VOCABULARY)),)


def test_row_faults_when_a_full_block_was_only_half_overwritten() -> None:
    """A block taken over by another sequence loses its tag with the first token written into it."""
    mine, other = tokens_of(8, seed=1), tokens_of(2, seed=2)
    engines = loaded(1)
    run_wave(engines, [row_of(mine, 0, 4, [0])])
    run_wave(engines, [row_of(other, 0, 2, [0])], 2)
    outcomes = run_wave(engines, [row_of(mine, 4, 8, [0, 1], Sampling())], 3)
    assert "unwritten" in str(outcomes[0].faults[0])


def test_later_stage_faults_when_its_partial_block_is_of_another_prefix() -> None:
    """Inside a block there is no tag yet: the previous stage's state gives it away."""
    mine, other = tokens_of(8, seed=1), tokens_of(8, seed=2)
    engines = loaded(2)
    run_wave(engines, [row_of(mine, 0, 2, [0]), row_of(other, 0, 2, [1])])
    first = engines[0].run(wave_of(on_stage(row_of(mine, 2, 4, [0]), 0, 2)), None)
    second = engines[1].run(wave_of(on_stage(row_of(mine, 2, 4, [1]), 1, 2)), first.payload)
    assert second.faults == {0: "state at token 2 differs from the previous stage's: this cache is of another prefix"}


def test_void_row_flows_as_zeros_when_it_stands_between_others() -> None:
    tokens = tokens_of(6)
    rows = [row_of(tokens, 0, 6, [0, 1], Sampling(), void=True), row_of(tokens, 0, 6, [2, 3], Sampling())]
    engines = loaded(2)
    outcomes = run_wave(engines, rows)
    assert outcomes[0].payload is not None
    assert outcomes[0].payload[:6].sum() == 0
    assert outcomes[1].results == (RowResult(1, expected_first_token(tokens, VOCABULARY)),)
    after = run_wave(engines, [row_of(tokens, 4, 6, [0, 5], Sampling())], 2)
    assert "unwritten" in str(after[0].faults[0])


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        (row_of([1, 2, 3], 0, 3, [POOL]), "block table leaves the pool of 16 blocks"),
        (row_of([1, 2, 3], 0, 3, [-1]), "block table leaves the pool of 16 blocks"),
        (row_of([1, 2, 3, 4, 5], 0, 5, [0]), "1 blocks of 4 tokens for [0, 5)"),
        (row_of([1, 2, 3], 3, 3, [0]), "chunk [3, 3) is empty or negative"),
    ],
)
def test_row_faults_when_its_block_table_does_not_fit(row: RowWork, cause: str) -> None:
    assert loaded(1)[0].run(wave_of(row), None).faults == {0: cause}


def test_row_faults_when_the_first_stage_gets_no_tokens() -> None:
    row = on_stage(row_of([1, 2, 3], 0, 3, [0]), 1, 2)
    assert loaded(1)[0].run(wave_of(row), None).faults == {0: "no token ids for [0, 3)"}


def test_run_raises_when_the_payload_does_not_fit_the_wave() -> None:
    first, second = loaded(2)
    wave = wave_of(on_stage(row_of([1, 2, 3], 0, 3, [0]), 1, 2))
    with pytest.raises(EngineFault, match=r"payload none instead of \(3, 2\)"):
        second.run(wave, None)
    with pytest.raises(EngineFault, match="takes no payload"):
        first.run(wave, first.receive_buffer(3))
    with pytest.raises(ValueError, match="has 32 bytes instead of 48"):
        second.decode(b"\0" * 32, 3)


def test_logits_and_logprobs_agree_with_the_first_token_when_asked() -> None:
    tokens = tokens_of(7)
    sampling = Sampling(top_logprobs=3, full_logits=True)
    (result,) = run_wave(loaded(1), [row_of(tokens, 0, 7, [0, 1], sampling)])[0].results
    row = np.frombuffer(result.logits, "<f4").astype(np.float64)
    assert row.shape == (VOCABULARY,)
    assert int(row.argmax()) == result.token_id == result.top_logprobs[0].token_id
    expected = np.sort(row - np.log(np.exp(row).sum()))[::-1][:3]
    np.testing.assert_allclose([pair.logprob for pair in result.top_logprobs], expected, atol=1e-6)


def test_sampling_follows_the_seed_when_the_temperature_is_high() -> None:
    tokens = tokens_of(7)
    drawn = {expected_first_token(tokens, VOCABULARY, Sampling(temperature=50.0, seed=seed)) for seed in range(40)}
    assert len(drawn) > 20
    row = row_of(tokens, 0, 7, [0, 1], Sampling(temperature=50.0, seed=5))
    (result,) = run_wave(loaded(2), [row])[-1].results
    assert result.token_id == expected_first_token(tokens, VOCABULARY, Sampling(temperature=50.0, seed=5))
    cold = expected_first_token(tokens, VOCABULARY, Sampling(temperature=1e-3, seed=5))
    assert cold == expected_first_token(tokens, VOCABULARY)


def test_gate_holds_the_wave_when_a_test_blocks_it() -> None:
    entered, release = threading.Event(), threading.Event()
    seen: list[int] = []

    def gate(wave: WaveWork) -> None:
        seen.append(wave.ordinal)
        entered.set()
        assert release.wait(30)

    engine = EmulatedEngine(gate=gate)
    engine.load(plan_of(0, 1), lambda done, total: None)
    outcomes: list[WaveOutcome] = []
    row = row_of([1, 2, 3], 0, 3, [0], Sampling())
    thread = threading.Thread(target=lambda: outcomes.append(engine.run(wave_of(row), None)))
    thread.start()
    assert entered.wait(30)
    assert outcomes == []
    release.set()
    thread.join(30)
    assert seen == [1]
    assert outcomes[0].results == (RowResult(0, expected_first_token([1, 2, 3], VOCABULARY)),)


def test_modelled_time_adds_up_when_waves_run_back_to_back() -> None:
    engine = EmulatedEngine()
    engine.load(plan_of(0, 1, PRESET + ",token_us=1000,wave_us=2000"), lambda done, total: None)
    begun = time.monotonic()
    for _ in range(4):
        engine.run(wave_of(row_of([1, 2, 3], 0, 3, [0])), None)
    # Four waves of 5 ms; late timers are caught up with, early ends would be a bug.
    assert time.monotonic() - begun >= 4 * 0.005 - 0.001


def test_wait_ends_at_once_when_the_engine_is_closed() -> None:
    entered = threading.Event()
    engine = EmulatedEngine(seconds_per_wave=3600.0, gate=lambda wave: entered.set())
    engine.load(plan_of(0, 1), lambda done, total: None)
    thread = threading.Thread(target=engine.run, args=(wave_of(row_of([1], 0, 1, [0])), None))
    thread.start()
    assert entered.wait(30)
    engine.close()
    engine.close()
    thread.join(30)
    assert not thread.is_alive()


def test_pool_is_poisoned_again_when_loaded_a_second_time() -> None:
    tokens = tokens_of(8)
    (engine,) = loaded(1)
    run_wave([engine], [row_of(tokens, 0, 4, [0])])
    facts = engine.load(plan_of(0, 1), lambda done, total: None)
    assert facts.loaded_layers == tuple(range(6))
    assert facts.bytes_per_block == (B + 1) * 8
    outcomes = run_wave([engine], [row_of(tokens, 4, 8, [0, 1])], 2)
    assert "unwritten" in str(outcomes[0].faults[0])


@pytest.mark.parametrize(
    ("preset", "field"),
    [
        ("emulated:", "model"),
        ("torch", "model"),
        ("emulated:layer=3", "layer"),
        ("emulated:layers", "layers"),
        ("emulated:layers=2,layers=3", "layers"),
        ("emulated:layers=0", "layers"),
        ("emulated:layers=1.5", "layers"),
        ("emulated:vocabulary=99999999", "vocabulary"),
        ("emulated:window=-1", "window"),
        ("emulated:token_us=nan", "token_us"),
        ("emulated:token_us=-1", "token_us"),
        ("emulated:wave_us=inf", "wave_us"),
        ("emulated:copy_us=x", "copy_us"),
        ("emulated:attention_every=-1", "attention_every"),
        ("emulated:layers=2,", ""),
    ],
)
def test_preset_is_refused_by_name_when_it_is_malformed(preset: str, field: str) -> None:
    with pytest.raises(EngineFault) as caught:
        emulated_model_facts(preset)
    assert caught.value.fields["field"] == field


def test_facts_have_defaults_and_one_fingerprint_when_only_times_differ() -> None:
    plain = emulated_model_facts("emulated")
    assert (plain.layers, plain.vocabulary, plain.window) == (32, 32_000, 1_048_576)
    assert plain.recurrent_layers == ()
    assert plain.fingerprint == emulated_model_facts("emulated:token_us=2.5,copy_us=3").fingerprint
    assert plain.fingerprint != emulated_model_facts("emulated:layers=31").fingerprint
    assert plain.fingerprint != emulated_model_facts("emulated:attention_every=4").fingerprint


@pytest.mark.parametrize(
    ("every", "recurrent"),
    [(0, (0, 1, 2, 3, 4, 5)), (1, ()), (2, (0, 2, 4)), (4, (0, 1, 2, 4, 5)), (9, (0, 1, 2, 3, 4, 5))],
)
def test_every_nth_layer_attends_when_the_preset_says_so(every: int, recurrent: tuple[int, ...]) -> None:
    assert emulated_model_facts(f"{PRESET},attention_every={every}").recurrent_layers == recurrent


def test_groups_follow_the_band_when_stages_hold_different_layers() -> None:
    hybrid = PRESET + ",attention_every=4"
    facts = [EmulatedEngine().load(plan_of(stage, 3, hybrid), lambda done, total: None) for stage in range(3)]
    assert [found.groups for found in facts] == [
        (CacheGroup.RECURRENT,),
        (CacheGroup.ATTENTION, CacheGroup.RECURRENT),
        (CacheGroup.RECURRENT,),
    ]
    assert [found.bytes_per_block for found in facts] == [0, (B + 1) * 8, 0]
    assert [found.bytes_per_state for found in facts] == [24, 24, 24]
    plain = EmulatedEngine().load(plan_of(0, 1), lambda done, total: None)
    assert (plain.groups, plain.bytes_per_state) == ((CacheGroup.ATTENTION,), 0)


def test_load_raises_when_the_band_is_not_of_the_model() -> None:
    plan = EnginePlan(PRESET, 0, 1, 0, 7, B, POOL, 64, 8)
    with pytest.raises(EngineFault) as caught:
        EmulatedEngine().load(plan, lambda done, total: None)
    assert caught.value.fields["field"] == "last_layer"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"state_slots": 0}, "state_slots"),
        ({"host_pool_blocks": -1}, "host_pool_blocks"),
        ({"pool_blocks": 0}, "pool_blocks"),
    ],
)
def test_load_raises_when_a_pool_is_too_small(change: dict[str, Any], field: str) -> None:
    plan = replace(plan_of(0, 1, PRESET + ",attention_every=0"), **change)
    with pytest.raises(EngineFault) as caught:
        EmulatedEngine().load(plan, lambda done, total: None)
    assert caught.value.fields["field"] == field


@pytest.mark.parametrize(("layer", "stage"), [(0, 0), (1, 0), (4, 2)])
def test_row_is_void_at_its_stage_when_it_holds_the_token_that_is_planted_to_be_nan(layer: int, stage: int) -> None:
    engines = loaded(3, f"{PRESET},nan_token=96,nan_layer={layer}")
    bad, good = [*range(9), 96], list(range(20, 27))
    rows = [row_of(bad, 0, 10, [0, 1, 2], Sampling()), row_of(good, 0, 7, [3, 4], Sampling(), key=key_of("other"))]
    outcomes = run_wave(engines, rows)
    assert [0 in outcome.faults for outcome in outcomes[: stage + 1]] == [False] * stage + [True]
    error = outcomes[stage].faults[0]
    assert isinstance(error, NonFinite)
    assert error.fields == {"stage": str(stage), "layer": str(layer), "row": "0"}
    assert RowResult(1, expected_first_token(good, VOCABULARY)) in outcomes[-1].results
    if stage < 2:
        assert not np.any(outcomes[stage].payload[:10])  # type: ignore[index]
    # Nothing was written: the blocks are as unreadable as before.
    after = run_wave(engines, [row_of(bad, 8, 9, [0, 1, 2])], 2)
    assert "unwritten" in str(after[stage].faults[0])


def test_draw_is_greedy_when_the_temperature_is_too_small_to_divide_by() -> None:
    for tokens in (tokens_of(5, seed) for seed in range(5)):
        tiny = Sampling(temperature=1e-310, seed=3)
        assert expected_first_token(tokens, VOCABULARY, tiny) == expected_first_token(tokens, VOCABULARY)
