"""A row that computes NaN or infinity: void by itself, named by its origin, and without a trace in what others read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.harness import tiny_models
from tests.harness.torch_pipeline import Chunk, Pipeline, Sequence
from wavepp_proto.errors import NonFinite
from wavepp_proto.terms import RowResult, Sampling
from wavepp_stage.engine.base import WaveOutcome

B = 16
BAD = 7
"""The token that a test spoils; no sound prompt has it."""
BOUNDS = {"qwen3": (0, 2, 5), "qwen3_moe": (0, 2, 5), "qwen3_next": (0, 2, 5, 8)}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def pipeline_of(root: Path, family: str, dtype: str = "float32") -> Pipeline:
    slots = 8 if family == "qwen3_next" else 0
    return Pipeline(tiny_models.build(family, root), BOUNDS[family], block_tokens=B, state_slots=slots, dtype=dtype)


def prompt(length: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(BAD + 1, tiny_models.VOCABULARY, length)]


def spoil_embedding(pipeline: Pipeline, value: float = float("nan")) -> None:
    with torch.no_grad():
        pipeline.engines[0].band.model.get_input_embeddings().weight[BAD, 3] = value


def fault(outcome: WaveOutcome, row: int) -> NonFinite:
    error = outcome.faults[row]
    assert isinstance(error, NonFinite)
    return error


def assert_exact(pipeline: Pipeline, sequence: Sequence, result: RowResult) -> None:
    expected = tiny_models.unsplit_logits(pipeline.model, sequence.token_ids).numpy()
    assert np.abs(np.frombuffer(result.logits, "<f4") - expected).max() <= 1e-4
    assert result.token_id == int(expected.argmax())


def all_finite(pipeline: Pipeline) -> bool:
    stored: list[torch.Tensor] = []
    for engine in pipeline.engines:
        stored += engine.cache.pools
        for layer in engine.states.layers:
            stored += engine.states.tensors(layer)
    return all(bool(tensor.isfinite().all()) for tensor in stored)


def waves_with_void(pipeline: Pipeline, chunks: list[Chunk]) -> list[WaveOutcome]:
    """One wave through all stages as daemons run it: what is void on one is void on the next."""
    made: list[WaveOutcome] = []
    payload: Any = None
    for stage, engine in enumerate(pipeline.engines):
        made.append(engine.run(pipeline.work(stage, chunks), payload))
        payload = made[-1].payload
        void = made[-1].faults.keys()
        chunks = [Chunk(c.sequence, c.length, c.void or i in void, c.snapshots) for i, c in enumerate(chunks)]
    return made


@pytest.mark.parametrize("family", sorted(BOUNDS))
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_neighbours_are_exact_and_nothing_is_left_when_a_row_of_the_wave_is_not_finite(
    root: Path, family: str, value: float
) -> None:
    """The bad row stands between two sound ones, its bad token behind 90 sound ones of the same tile."""
    pipeline = pipeline_of(root, family)
    spoil_embedding(pipeline, value)
    before, after = pipeline.sequence("before", prompt(70, 1)), pipeline.sequence("after", prompt(50, 2))
    bad = pipeline.sequence("bad", [*prompt(90, 3), BAD, *prompt(9, 4)])
    outcomes = waves_with_void(pipeline, [Chunk(one, len(one.token_ids)) for one in (before, bad, after)])
    assert [sorted(outcome.faults) for outcome in outcomes] == [[1], *[[]] * (len(outcomes) - 1)]
    assert fault(outcomes[0], 1).message == "embeddings or received activations of stage 0 are not finite"
    assert fault(outcomes[0], 1).fields == {"stage": "0", "row": "1"}
    payload: Any = outcomes[0].payload
    assert bool(payload.isfinite().all())
    assert not payload[70:170].any()
    assert all_finite(pipeline)
    assert [result.row for result in outcomes[-1].results] == [0, 2]
    for sequence, result in zip((before, after), outcomes[-1].results, strict=True):
        assert_exact(pipeline, sequence, result)


def test_blocks_and_slots_of_a_bad_row_are_exact_when_others_get_them(root: Path) -> None:
    """What a bad row wrote is given to the next prompt, last block half full, as a daemon would do."""
    pipeline = pipeline_of(root, "qwen3_next")
    spoil_embedding(pipeline)
    bad = pipeline.sequence("bad", [BAD, *prompt(99, 1)])
    waves_with_void(pipeline, [Chunk(bad, 100)])
    innocent = pipeline.sequence("innocent", prompt(90, 2))
    innocent.blocks[:6], innocent.slot = bad.blocks[:6], bad.slot
    assert_exact(pipeline, innocent, pipeline.prefill(innocent, chunk=40))


Spoil = Callable[[Pipeline], torch.Tensor]
ORIGINS: list[tuple[str, Spoil, int, str, int | None]] = [
    ("k_proj", lambda p: p.engines[1].band.model.model.layers[3].self_attn.k_proj.weight, 1, "keys or values", 3),
    ("v_proj", lambda p: p.engines[0].band.model.model.layers[1].self_attn.v_proj.weight, 0, "keys or values", 1),
    ("down_proj", lambda p: p.engines[0].band.model.model.layers[0].mlp.down_proj.weight, 0, "keys or values", 1),
    ("last mlp", lambda p: p.engines[0].band.model.model.layers[1].mlp.down_proj.weight, 0, "activations", 1),
    ("norm", lambda p: p.engines[1].band.model.model.norm.weight, 1, "logits", None),
]


@pytest.mark.parametrize(
    ("tensor", "stage", "what", "layer"), [one[1:] for one in ORIGINS], ids=[o[0] for o in ORIGINS]
)
def test_stage_and_layer_are_named_where_the_first_value_is_not_finite(
    root: Path, tensor: Spoil, stage: int, what: str, layer: int | None
) -> None:
    pipeline = pipeline_of(root, "qwen3")
    with torch.no_grad():
        tensor(pipeline).view(-1)[0] = float("nan")
    outcomes = waves_with_void(pipeline, [Chunk(pipeline.sequence("a", prompt(20, 1)), 20)])
    assert [len(outcome.faults) for outcome in outcomes] == [int(at == stage) for at in range(2)]
    error = fault(outcomes[stage], 0)
    where = f"stage {stage}" if layer is None else f"layer {layer} of stage {stage}"
    assert error.message == f"{what} of {where} are not finite"
    assert error.fields.get("layer") == (None if layer is None else str(layer))
    assert outcomes[-1].results == ()
    assert all_finite(pipeline)


def test_recurrent_state_is_void_with_its_snapshot_when_it_is_not_finite(root: Path) -> None:
    pipeline = pipeline_of(root, "qwen3_next")
    with torch.no_grad():
        pipeline.engines[1].band.model.model.layers[2].linear_attn.in_proj_qkvz.weight.view(-1)[0] = float("inf")
    sequence = pipeline.sequence("a", prompt(40, 1))
    outcomes = waves_with_void(pipeline, [Chunk(sequence, 40, snapshots=((32, pipeline.free_slots.pop()),))])
    assert fault(outcomes[1], 0).message == "recurrent states of layer 2 of stage 1 are not finite"
    assert all_finite(pipeline)


def test_drawn_rows_are_answered_when_a_neighbours_logits_are_not_finite(root: Path) -> None:
    """torch.multinomial raises for everybody: it is never asked about such a row."""
    pipeline = pipeline_of(root, "qwen3")
    spoil_embedding(pipeline)
    drawn = Sampling(temperature=0.7, seed=3, top_logprobs=4, full_logits=True)
    sound = pipeline.sequence("sound", prompt(30, 1), sampling=drawn)
    bad = pipeline.sequence("bad", [BAD], sampling=drawn)
    alone = pipeline_of(root, "qwen3")
    expected = alone.prefill(alone.sequence("sound", prompt(30, 1), sampling=drawn))
    outcome = waves_with_void(pipeline, [Chunk(bad, 1), Chunk(sound, 30)])[-1]
    (result,) = outcome.results
    assert (result.row, result.token_id) == (1, expected.token_id)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_row_is_answered_when_only_the_sum_of_what_it_computed_overflows(
    root: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """A doubtful sum is looked at exactly; large finite numbers are no fault."""
    pipeline = pipeline_of(root, "qwen3", dtype)
    expected = pipeline.prefill(pipeline.sequence("a", prompt(30, 1)))
    monkeypatch.setattr("wavepp_stage.engine.torch.finiteness.Finiteness.doubtful", lambda self: True)
    assert pipeline.prefill(pipeline.sequence("b", prompt(30, 1))) == expected
