"""A hybrid model on the torch engine: recurrent states in slots, snapshots inside chunks, bands of one kind alone.

Exactness over drawn cases is in tests/property/test_torch_exact.py; here are its edges by name.
"""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from tests.harness import tiny_models
from tests.harness.torch_pipeline import Chunk, Pipeline, Sequence
from wavepp_proto.errors import EngineFault
from wavepp_proto.terms import CacheGroup, RowResult
from wavepp_stage.engine.base import RowWork, StateWork
from wavepp_stage.engine.torch import gated_delta
from wavepp_stage.engine.torch.engine import TorchEngine

B = 16
SLOTS = 8
BOUNDS = (0, 3, 6, 8)
"""Recurrent layers alone; attention first, then recurrent; recurrent, then attention."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build("qwen3_next", tmp_path_factory.mktemp("models"))


@pytest.fixture
def pipeline(model: Path) -> Pipeline:
    return Pipeline(model, BOUNDS, block_tokens=B, state_slots=SLOTS)


def prompt(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, tiny_models.VOCABULARY, length)]


def distance(model: Path, token_ids: list[int], result: RowResult) -> float:
    expected = tiny_models.unsplit_logits(model, token_ids).numpy()
    return float(np.abs(np.frombuffer(result.logits, "<f4") - expected).max())


def assert_exact(model: Path, token_ids: list[int], result: RowResult) -> None:
    assert distance(model, token_ids, result) <= 1e-4
    assert result.token_id == int(tiny_models.unsplit_logits(model, token_ids).argmax())


def donor_with_snapshots(pipeline: Pipeline, token_ids: list[int], *positions: int) -> tuple[Sequence, list[int]]:
    """A sequence prefilled in one chunk, and the slots of its snapshots."""
    slots = [pipeline.free_slots.pop() for _ in positions]
    donor = pipeline.sequence("donor", token_ids)
    pipeline.run(Chunk(donor, len(token_ids), snapshots=tuple(zip(positions, slots, strict=True))))
    return donor, slots


@pytest.mark.parametrize("bounds", [(0, 8), (0, 3, 8), (0, 3, 4, 8), BOUNDS])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 63, 64, 65, 130])
def test_answer_is_exact_when_chunks_are_shorter_than_scan_and_convolution(
    model: Path, bounds: tuple[int, ...], length: int
) -> None:
    pipeline = Pipeline(model, bounds, block_tokens=B, state_slots=SLOTS)
    sequence = pipeline.sequence("a", prompt(length))
    pipeline.run(Chunk(sequence, 1))
    while sequence.rest > 1:
        pipeline.run(Chunk(sequence, min(2, sequence.rest - 1)))
    whole = pipeline.sequence("b", sequence.token_ids)
    chunks = [Chunk(one, one.rest) for one in (sequence, whole) if one.rest]
    for result in pipeline.run(*chunks):
        assert_exact(model, sequence.token_ids, result)


@pytest.mark.parametrize("position", [B, 3 * B, 4 * B, 5 * B, 12 * B])
def test_answer_is_exact_when_restored_from_a_snapshot_inside_a_chunk(
    pipeline: Pipeline, model: Path, position: int
) -> None:
    token_ids = prompt(200)
    donor, (slot,) = donor_with_snapshots(pipeline, token_ids, position)
    again = pipeline.sequence("b", token_ids, reuse=donor, reused_blocks=position // B, restore=slot)
    assert again.slot not in (donor.slot, slot)
    assert_exact(model, token_ids, pipeline.prefill(again, chunk=70))


def test_snapshots_stay_when_their_sequence_goes_on(pipeline: Pipeline, model: Path) -> None:
    """Restored twice, by prompts that part ways at once, after the donor ended and its slot was taken over."""
    token_ids = prompt(200)
    donor, (early, late) = donor_with_snapshots(pipeline, token_ids, 6 * B, 12 * B)
    assert donor.slot is not None
    pipeline.free_slots.append(donor.slot)
    pipeline.prefill(pipeline.sequence("other", prompt(90, 1)))
    for seed, (slot, position) in enumerate([(early, 6 * B), (late, 12 * B), (early, 6 * B)]):
        branch = token_ids[:position] + prompt(50, 7 + seed)
        again = pipeline.sequence(str(seed), branch, reuse=donor, reused_blocks=position // B, restore=slot)
        assert_exact(model, branch, pipeline.prefill(again, chunk=33))


def test_snapshot_and_working_state_are_equal_when_the_chunk_ends_there(pipeline: Pipeline) -> None:
    donor, (slot,) = donor_with_snapshots(pipeline, prompt(6 * B), 6 * B)
    for engine, plan in zip(pipeline.engines, pipeline.plans, strict=True):
        for layer in engine.states.layers:
            assert plan.first_layer <= layer < plan.last_layer
            for tensor in engine.states.tensors(layer):
                assert torch.equal(tensor[slot], tensor[donor.slot])
                assert tensor[slot].any()


def test_prompt_starts_empty_when_its_slot_held_another_state(pipeline: Pipeline, model: Path) -> None:
    pipeline.free_slots = [5]
    pipeline.prefill(pipeline.sequence("a", prompt(100)))
    pipeline.free_slots = [5]
    again = pipeline.sequence("b", prompt(3, 1))
    assert_exact(model, again.token_ids, pipeline.prefill(again, chunk=1))


def test_wrong_snapshot_shows_in_the_logits(pipeline: Pipeline, model: Path) -> None:
    """The tolerance of 1e-4 means something: a state of another position is off by far more."""
    token_ids = prompt(200)
    donor, slots = donor_with_snapshots(pipeline, token_ids, 5 * B, 11 * B)
    for restore in (slots[0], None):
        pipeline.free_slots = [0]
        again = pipeline.sequence("b", token_ids, reuse=donor, reused_blocks=11, restore=restore)
        assert distance(model, token_ids, pipeline.prefill(again)) > 2e-2


def test_rows_keep_their_own_states_when_batched_with_void_rows(pipeline: Pipeline, model: Path) -> None:
    shared = prompt(120)
    donor, (slot,) = donor_with_snapshots(pipeline, shared, 7 * B)
    one, two, victim = (pipeline.sequence(str(number), prompt(80, number)) for number in (1, 2, 3))
    again = pipeline.sequence("again", shared, reuse=donor, reused_blocks=7, restore=slot)
    pipeline.run(Chunk(victim, 20, void=True), Chunk(one, 30), Chunk(two, 79), Chunk(victim, 3, void=True))
    results = pipeline.run(
        Chunk(one, 50), Chunk(victim, 11, void=True), Chunk(again, again.rest), Chunk(two, 1), Chunk(victim, 80)
    )
    assert [result.row for result in results] == [0, 2, 3, 4]
    for sequence, result in zip((one, again, two, victim), results, strict=True):
        assert_exact(model, sequence.token_ids, result)


def states(pipeline: Pipeline) -> list[torch.Tensor]:
    return [
        tensor for engine in pipeline.engines for layer in engine.states.layers
        for tensor in engine.states.tensors(layer)
    ]  # fmt: skip


def test_only_named_slots_change_when_a_wave_runs(pipeline: Pipeline) -> None:
    live, victim = pipeline.sequence("a", prompt(50)), pipeline.sequence("v", prompt(50))
    before = [tensor.clone() for tensor in states(pipeline)]
    spare = pipeline.free_slots.pop()
    pipeline.run(Chunk(victim, 40, void=True), Chunk(live, 50, snapshots=((2 * B, spare),)))
    for old, new in zip(before, states(pipeline), strict=True):
        assert (old != new).flatten(1).any(1).nonzero().flatten().tolist() == sorted([live.slot or 0, spare])


def test_states_never_move_and_memory_stays_flat_over_many_waves(pipeline: Pipeline) -> None:
    token_ids = prompt(120)
    donor, (slot,) = donor_with_snapshots(pipeline, token_ids, 4 * B)
    spare = pipeline.free_slots.pop()

    def reuse_often(times: int) -> None:
        for _ in range(times):
            free, slots = list(pipeline.free), list(pipeline.free_slots)
            again = pipeline.sequence("b", token_ids, reuse=donor, reused_blocks=4, restore=slot)
            while again.rest:
                end = again.computed + min(again.rest, 24)
                due = tuple((at, spare) for at in range(again.computed + 1, end + 1) if at % B == 0)[:1]
                pipeline.run(Chunk(again, end - again.computed, snapshots=due))
            pipeline.free, pipeline.free_slots = free, slots

    before = [tensor.data_ptr() for tensor in states(pipeline)]
    process = psutil.Process()
    reuse_often(20)
    memory = process.memory_info().rss
    reuse_often(200)
    # 600 waves; one leaked state a wave would be 600 x 48 KiB.
    assert process.memory_info().rss - memory < 8 * 1024 * 1024
    assert [tensor.data_ptr() for tensor in states(pipeline)] == before


def test_projections_and_convolution_run_once_per_wave_when_it_has_many_rows(pipeline: Pipeline) -> None:
    calls: Counter[str] = Counter()
    for engine in pipeline.engines:
        for layer in engine.band.recurrent_layers:
            mixer = engine.band.model.model.layers[layer].linear_attn
            for name in ("in_proj_qkvz", "in_proj_ba", "norm", "out_proj"):
                mixer.get_submodule(name).register_forward_hook(lambda *_, name=name: calls.update([name]))
    pipeline.run(*(Chunk(pipeline.sequence(str(number), prompt(40, number)), 30) for number in range(4)))
    assert calls == dict.fromkeys(("in_proj_qkvz", "in_proj_ba", "norm", "out_proj"), 6)


def test_layers_keep_their_global_numbers_when_the_band_is_not_the_first(model: Path) -> None:
    """field_bugs 17: one numbering; the cache and the states of band [3, 6) know no layer 0."""
    pipeline = Pipeline(model, BOUNDS, block_tokens=B, state_slots=SLOTS)
    engine, facts = pipeline.engines[1], pipeline.facts[1]
    assert facts.loaded_layers == (3, 4, 5)
    assert (engine.cache.layers, engine.states.layers) == ((3,), (4, 5))
    assert [engine.band.model.model.layers[layer].linear_attn.layer_idx for layer in (4, 5)] == [4, 5]
    donor, (slot,) = donor_with_snapshots(pipeline, prompt(100), 5 * B)
    for layer in (4, 5):
        assert engine.states.tensors(layer)[1][slot].any()
    with pytest.raises(KeyError):
        engine.states.tensors(1)
    # Another restored state in layer 4 of this stage alone must reach the answer.
    again = pipeline.sequence("b", donor.token_ids, reuse=donor, reused_blocks=5, restore=slot)
    engine.states.tensors(4)[1][slot].zero_()
    assert distance(model, donor.token_ids, pipeline.prefill(again)) > 1e-3


def test_facts_name_the_groups_of_each_band(model: Path) -> None:
    pipeline = Pipeline(model, (0, 3, 4, 8), block_tokens=B, state_slots=SLOTS)
    attention, recurrent = CacheGroup.ATTENTION, CacheGroup.RECURRENT
    assert [facts.groups for facts in pipeline.facts] == [(recurrent,), (attention,), (attention, recurrent)]
    block = 2 * B * 2 * 24 * 4
    assert [facts.bytes_per_block for facts in pipeline.facts] == [0, block, block]
    # 3 inputs of 2 x 2 x 16 + 4 x 24 channels, and 4 heads of 16 x 24, in float32.
    state = 3 * 160 * 4 + 4 * 16 * 24 * 4
    assert [facts.bytes_per_state for facts in pipeline.facts] == [3 * state, 0, 3 * state]


def test_attention_layers_alone_need_no_slot(model: Path) -> None:
    plan = replace(Pipeline(model, (0, 8), state_slots=1).plans[0], first_layer=3, last_layer=4, state_slots=0)
    assert TorchEngine(threads=1).load(plan, lambda done, total: None).groups == (CacheGroup.ATTENTION,)


def test_load_is_refused_by_field_when_slots_or_memory_are_missing(pipeline: Pipeline) -> None:
    for slots in (0, 2**44):
        with pytest.raises(EngineFault) as caught:
            pipeline.engines[0].load(replace(pipeline.plans[0], state_slots=slots), lambda done, total: None)
        assert (caught.value.fields["field"], caught.value.fields["value"]) == ("state_slots", str(slots))


def row(start: int = 0, length: int = 20, **changes: Any) -> RowWork:
    blocks = np.arange(-(-(start + length) // B), dtype=np.int32)
    values: dict[str, Any] = {"key": None, "start": start, "length": length, "blocks": blocks, "sampling": None}
    values |= {"prefix_hashes": np.zeros(0, np.uint64), "token_ids": np.arange(length, dtype=np.int32)}
    return RowWork(**(values | changes))


@pytest.mark.parametrize(
    ("rows", "field"),
    [
        ([row(state=StateWork(0)), row(state=None)], "rows[1].state"),
        ([row(state=StateWork(SLOTS))], "rows[0].state"),
        ([row(state=StateWork(-1))], "rows[0].state"),
        ([row(start=16, state=StateWork(0, restore=SLOTS))], "rows[0].state"),
        ([row(state=StateWork(0, snapshots=((16, SLOTS),)))], "rows[0].state"),
        ([row(state=StateWork(0, restore=1))], "rows[0].state.restore"),
        ([row(state=StateWork(0, snapshots=((17, 1),)))], "rows[0].state.snapshots"),
        ([row(state=StateWork(0, snapshots=((32, 1),)))], "rows[0].state.snapshots"),
        ([row(start=16, state=StateWork(0, snapshots=((16, 1),)))], "rows[0].state.snapshots"),
        ([row(length=40, state=StateWork(0, snapshots=((32, 1), (16, 2))))], "rows[0].state.snapshots"),
        ([row(state=StateWork(0)), row(state=StateWork(0))], "state"),
        ([row(state=StateWork(0, snapshots=((16, 0),)))], "state"),
        ([row(state=StateWork(0, snapshots=((16, 1),))), row(start=16, state=StateWork(2, restore=1))], "state"),
        ([row(start=16, state=StateWork(2, restore=2))], "state"),
    ],
)
def test_wave_is_refused_by_field_when_its_states_break_the_plan(
    pipeline: Pipeline, rows: list[RowWork], field: str
) -> None:
    with pytest.raises(EngineFault) as caught:
        pipeline.engines[0].run(replace(pipeline.work(0, []), rows=tuple(rows)), None)
    assert caught.value.fields["field"] == field


def test_installed_kernels_are_left_aside_when_the_tensors_are_on_the_cpu(
    pipeline: Pipeline, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers puts them in place of its functions for every device; on the CPU they would fail."""
    expected = tiny_models.unsplit_logits(model, prompt(50))
    for name in ("causal_conv1d_fn", "torch_chunk_gated_delta_rule"):
        original = inspect.unwrap(getattr(gated_delta, name))

        def kernel(*_: Any, **__: Any) -> None:
            raise AssertionError("a CUDA kernel was called")

        kernel.__wrapped__ = original  # type: ignore[attr-defined]
        monkeypatch.setattr(gated_delta, name, kernel)
    result = pipeline.prefill(pipeline.sequence("a", prompt(50)))
    assert np.abs(np.frombuffer(result.logits, "<f4") - expected.numpy()).max() <= 1e-4


def test_states_follow_the_models_dtype_but_for_the_delta_rule(model: Path) -> None:
    engine = TorchEngine(dtype="bfloat16", threads=1)
    facts = engine.load(replace(Pipeline(model, (0, 8), state_slots=1).plans[0]), lambda done, total: None)
    inputs, delta = engine.states.tensors(0)
    assert (inputs.dtype, delta.dtype) == (torch.bfloat16, torch.float32)
    assert facts.bytes_per_state == 6 * (3 * 160 * 2 + 4 * 16 * 24 * 4)
