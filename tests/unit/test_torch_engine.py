"""One stage of the torch engine: what a wave computes, touches, and is refused for.

Exactness over drawn cases is in tests/property/test_torch_exact.py; here are its edges by name.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from tests.harness import tiny_models
from tests.harness.torch_pipeline import Chunk, Pipeline
from wavepp_proto.errors import EngineFault
from wavepp_proto.terms import RowResult, Sampling
from wavepp_stage.engine.base import RowWork
from wavepp_stage.engine.torch.engine import TorchEngine

B = 16
BOUNDS = (0, 2, 5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build("qwen3", tmp_path_factory.mktemp("models"))


@pytest.fixture
def pipeline(model: Path) -> Pipeline:
    return Pipeline(model, BOUNDS, block_tokens=B)


def prompt(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, tiny_models.VOCABULARY, length)]


def assert_exact(model: Path, token_ids: list[int], result: RowResult) -> None:
    expected = tiny_models.unsplit_logits(model, token_ids).numpy()
    found = np.frombuffer(result.logits, "<f4")
    assert np.abs(found - expected).max() <= 1e-4
    assert result.token_id == int(expected.argmax())


@pytest.mark.parametrize("length", [1, B - 1, B, B + 1, 2 * B, 63, 64, 65, 300])
def test_answer_is_exact_when_prompt_ends_near_a_block_or_chunk(pipeline: Pipeline, model: Path, length: int) -> None:
    sequence = pipeline.sequence("a", prompt(length))
    assert_exact(model, sequence.token_ids, pipeline.prefill(sequence, chunk=64))


@pytest.mark.parametrize("length", [B + 1, 2 * B, 2 * B + 1, 200])
def test_answer_is_exact_when_all_but_the_last_block_is_reused(pipeline: Pipeline, model: Path, length: int) -> None:
    donor = pipeline.sequence("a", prompt(length))
    first = pipeline.prefill(donor)
    again = pipeline.sequence("b", donor.token_ids, reuse=donor, reused_blocks=(length - 1) // B)
    result = pipeline.prefill(again)
    assert_exact(model, again.token_ids, result)
    assert result.token_id == first.token_id


def test_one_changed_token_shows_in_the_logits(model: Path) -> None:
    """The tolerance of 1e-4 means something: a wrong cache would be off by far more."""
    token_ids = prompt(300)
    other = [*token_ids[:20], (token_ids[20] + 1) % tiny_models.VOCABULARY, *token_ids[21:]]
    difference = tiny_models.unsplit_logits(model, token_ids) - tiny_models.unsplit_logits(model, other)
    assert difference.abs().max() > 2e-2


def test_every_projection_is_called_once_per_wave_and_layer(pipeline: Pipeline) -> None:
    calls: Counter[str] = Counter()

    def counter(name: str) -> Callable[..., None]:
        return lambda module, inputs, output: calls.update([f"{name}:{output.shape[1]}"])

    for engine in pipeline.engines:
        for layer in engine.band.layers:
            layer.self_attn.q_proj.register_forward_hook(counter("q"))
            layer.mlp.down_proj.register_forward_hook(counter("down"))
    sequences = [pipeline.sequence(str(number), prompt(40, number)) for number in range(4)]
    pipeline.run(*(Chunk(sequence, 30) for sequence in sequences))
    pipeline.run(*(Chunk(sequence, 10) for sequence in sequences))
    layers = tiny_models.LAYERS
    assert calls == {"q:120": layers, "q:40": layers, "down:120": layers, "down:40": layers}


def test_head_sees_only_the_last_position_of_final_rows(pipeline: Pipeline) -> None:
    seen: list[int] = []
    head = pipeline.engines[-1].band.model.lm_head
    head.register_forward_hook(lambda module, inputs, output: seen.append(output.shape[0]))
    one, two, three = (pipeline.sequence(str(number), prompt(20 + number, number)) for number in range(3))
    assert pipeline.run(Chunk(one, 10), Chunk(two, 10)) == ()
    assert [result.row for result in pipeline.run(Chunk(one, 10), Chunk(three, 5), Chunk(two, 11))] == [0, 2]
    assert seen == [2]


def addresses(pipeline: Pipeline) -> list[int]:
    return [
        tensor.data_ptr()
        for engine, plan in zip(pipeline.engines, pipeline.plans, strict=True)
        for layer in range(plan.first_layer, plan.last_layer)
        for tensor in engine.cache.tensors(layer)
    ]


def test_cache_is_one_tensor_per_layer_and_never_moves(pipeline: Pipeline) -> None:
    before = addresses(pipeline)
    keys, values = pipeline.engines[0].cache.tensors(0)
    assert keys.shape == values.shape == (128, B, 2, 24)
    for number in range(5):
        pipeline.prefill(pipeline.sequence(str(number), prompt(100, number)), chunk=40)
    assert addresses(pipeline) == before


def test_no_block_is_written_when_a_prefix_is_reused(pipeline: Pipeline) -> None:
    donor = pipeline.sequence("a", prompt(100))
    pipeline.prefill(donor)
    kept = {layer: pipeline.engines[0].cache.tensors(layer)[0].clone() for layer in range(2)}
    again = pipeline.sequence("b", donor.token_ids, reuse=donor, reused_blocks=6)
    pipeline.prefill(again)
    for layer, before in kept.items():
        after = pipeline.engines[0].cache.tensors(layer)[0]
        changed = (after != before).flatten(1).any(1).nonzero().flatten().tolist()
        assert changed == sorted(set(again.blocks) - set(donor.blocks))


def test_memory_stays_flat_over_many_waves(pipeline: Pipeline) -> None:
    process = psutil.Process()

    def reuse_often(times: int) -> None:
        for _ in range(times):
            free = list(pipeline.free)
            pipeline.prefill(pipeline.sequence("b", donor.token_ids, reuse=donor, reused_blocks=30), chunk=8)
            pipeline.free = free

    donor = pipeline.sequence("a", prompt(500))
    pipeline.prefill(donor)
    reuse_often(20)
    before = process.memory_info().rss
    reuse_often(200)
    # 600 waves; one leaked copy of the reused prefix a wave would be 600 x 460 KiB.
    assert process.memory_info().rss - before < 8 * 1024 * 1024


def test_void_row_flows_as_zeros_and_touches_nothing(pipeline: Pipeline, model: Path) -> None:
    live = pipeline.sequence("a", prompt(50))
    victim = pipeline.sequence("v", prompt(60, 1))
    pipeline.run(Chunk(victim, 20))
    first = pipeline.engines[0]
    before = first.cache.tensors(0)[0].clone()
    outcomes = pipeline.outcomes([Chunk(victim, 40, void=True), Chunk(live, 50), Chunk(victim, 40, void=True)])
    payload: Any = outcomes[0].payload
    assert payload.shape == (130, 64)
    assert not payload[:40].any()
    assert not payload[90:].any()
    assert payload[40:90].any(1).all()
    (result,) = outcomes[1].results
    assert result.row == 1
    assert_exact(model, live.token_ids, result)
    untouched = [block for block in range(128) if block not in live.blocks]
    assert torch.equal(first.cache.tensors(0)[0][untouched], before[untouched])


def test_wave_flows_when_every_row_is_void(pipeline: Pipeline) -> None:
    victim = pipeline.sequence("v", prompt(60))
    first, last = pipeline.outcomes([Chunk(victim, 7, void=True), Chunk(victim, 5, void=True)])
    payload: Any = first.payload
    assert payload.shape == (12, 64)
    assert not payload.any()
    assert last.payload is None
    assert last.results == ()


def row(**changes: Any) -> RowWork:
    values: dict[str, Any] = {
        "key": None, "start": 0, "length": 20, "blocks": np.array([3, 4], np.int32), "sampling": None,
        "prefix_hashes": np.zeros(0, np.uint64), "token_ids": np.arange(20, dtype=np.int32),
    }  # fmt: skip
    return RowWork(**(values | changes))


@pytest.mark.parametrize(
    ("rows", "field"),
    [
        ([], "tokens"),
        ([row(length=4097, blocks=np.zeros(257, np.int32))], "tokens"),
        ([row()] * 65, "rows"),
        ([row(), row(length=0)], "rows[1]"),
        ([row(start=-1)], "rows[0]"),
        ([row(blocks=np.array([3], np.int32))], "rows[0].blocks"),
        ([row(start=13)], "rows[0].blocks"),
        ([row(blocks=np.array([3, 4, 5], np.int32))], "rows[0].blocks"),
        ([row(blocks=np.array([3, 128], np.int32))], "rows[0].blocks"),
        ([row(blocks=np.array([-1, 3], np.int32))], "rows[0].blocks"),
        ([row(), row(token_ids=None)], "rows[1].token_ids"),
        ([row(token_ids=np.arange(19, dtype=np.int32))], "rows[0].token_ids"),
        ([row(token_ids=np.arange(500, 520, dtype=np.int32))], "token_ids"),
        ([row(token_ids=np.arange(-1, 19, dtype=np.int32))], "token_ids"),
    ],
)
def test_wave_is_refused_by_field_when_it_breaks_the_plan(pipeline: Pipeline, rows: list[RowWork], field: str) -> None:
    wave = replace(pipeline.work(0, []), rows=tuple(rows))
    with pytest.raises(EngineFault) as caught:
        pipeline.engines[0].run(wave, None)
    assert caught.value.fields["field"] == field


@pytest.mark.parametrize("payload", [None, torch.zeros(19, 64), torch.zeros(20, 63)])
def test_payload_is_refused_when_it_does_not_fit(pipeline: Pipeline, payload: torch.Tensor | None) -> None:
    wave = replace(pipeline.work(1, []), rows=(row(token_ids=None),))
    with pytest.raises(EngineFault, match="payload does not fit"):
        pipeline.engines[1].run(wave, payload)


def test_payload_survives_encode_and_decode_bit_for_bit(model: Path) -> None:
    engine = TorchEngine(dtype="bfloat16", threads=1)
    engine.load(Pipeline(model, (0, 5)).plans[0], lambda done, total: None)
    payload = torch.randn(7, 64).to(torch.bfloat16)
    data = engine.encode(payload)
    assert len(data) == 7 * 64 * 2
    assert torch.equal(engine.decode(data, 7), payload)
    assert engine.encode(engine.receive_buffer(0)) == b""
    with pytest.raises(ValueError, match="7 rows"):
        engine.decode(data[:-1], 7)


def test_cached_blocks_survive_when_the_same_plan_is_loaded_again(pipeline: Pipeline, model: Path) -> None:
    donor = pipeline.sequence("a", prompt(100))
    pipeline.prefill(donor)
    before = addresses(pipeline)
    for engine, plan in zip(pipeline.engines, pipeline.plans, strict=True):
        engine.load(replace(plan, wave_tokens=64), lambda done, total: None)
    assert addresses(pipeline) == before
    again = pipeline.sequence("b", donor.token_ids, reuse=donor, reused_blocks=6)
    assert_exact(model, again.token_ids, pipeline.prefill(again))
    with pytest.raises(EngineFault, match="tokens outside the plan"):
        pipeline.prefill(pipeline.sequence("c", prompt(65)))


def test_another_band_replaces_weights_and_pool(pipeline: Pipeline) -> None:
    engine = pipeline.engines[0]
    facts = engine.load(replace(pipeline.plans[0], last_layer=4, pool_blocks=10), lambda done, total: None)
    assert facts.loaded_layers == (0, 1, 2, 3)
    assert engine.cache.tensors(3)[0].shape[0] == 10
    assert facts.bytes_per_block == 4 * 2 * B * 2 * 24 * 4
    assert (facts.hidden, facts.device) == (64, "cpu")


def test_engine_refuses_work_when_closed(pipeline: Pipeline) -> None:
    engine = pipeline.engines[0]
    engine.close()
    engine.close()
    with pytest.raises(EngineFault, match="not loaded"):
        engine.run(pipeline.work(0, [Chunk(pipeline.sequence("a", prompt(3)), 3)]), None)


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "meta", "abacus"])
def test_device_is_refused_by_name_when_torch_cannot_use_it(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EngineFault) as caught:
        TorchEngine(device=device)
    assert caught.value.fields["value"] == device


def test_pool_is_refused_by_field_when_memory_is_short(pipeline: Pipeline) -> None:
    with pytest.raises(EngineFault) as caught:
        pipeline.engines[0].load(replace(pipeline.plans[0], pool_blocks=2**44), lambda done, total: None)
    assert caught.value.fields["field"] == "pool_blocks"


def test_sampling_is_reported_as_asked(pipeline: Pipeline, model: Path) -> None:
    token_ids = prompt(33)
    logits = tiny_models.unsplit_logits(model, token_ids)
    sampling = Sampling(top_logprobs=4)
    result = pipeline.prefill(pipeline.sequence("a", token_ids, sampling=sampling))
    assert result.logits == b""
    expected = torch.log_softmax(logits, -1).topk(4)
    assert [best.token_id for best in result.top_logprobs] == expected.indices.tolist()
    for best, value in zip(result.top_logprobs, expected.values.tolist(), strict=True):
        assert math.isclose(best.logprob, value, abs_tol=1e-4)
