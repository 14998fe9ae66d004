"""The engine adapter on the stand-in: what a wave computes, what a void row leaves alone, what is refused."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tests.harness import tiny_models
from tests.harness.installed_package import STAND_IN, installed
from tests.harness.stage_core import key
from tests.harness.trtllm_alone import AloneStage, B, Prompted, assert_exact, prompt, stand_in
from wavepp_proto.errors import EngineFault, NonFinite
from wavepp_proto.terms import CacheGroup, Sampling
from wavepp_stage.core.work import CopyDirection, CopyLot
from wavepp_stage.engine.base import EnginePlan, RowWork
from wavepp_stage.engine.torch.sampler import sample_rows
from wavepp_stage.engine.trtllm import compat
from wavepp_stage.engine.trtllm.engine import TrtllmEngine, _Live, _not_finite
from wavepp_stage.engine.trtllm.facts import model_facts
from wavepp_stage.engine.trtllm.load import check_dtype, device_of

ROW = RowWork(key("a"), 0, 4, np.zeros(0, np.int32), np.zeros(0, np.uint64), None, None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build("qwen3", tmp_path_factory.mktemp("models"))


@pytest.fixture(params=["newer", "rc26"])
def stage(request: pytest.FixtureRequest, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AloneStage]:
    with stand_in(monkeypatch, request.param):
        made = AloneStage(model)
        yield made
        made.engine.close()


# --- waves ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, B - 1, B, B + 1, 3 * B, 100])
def test_answer_is_exact_when_a_prompt_ends_near_a_block(stage: AloneStage, length: int) -> None:
    assert stage.prefill("a", prompt(length)) == 0
    assert stage.prefill("b", prompt(length)) == (length - 1) // B * B


def test_answers_are_exact_when_final_rows_stand_before_others(stage: AloneStage, model: Path) -> None:
    """The batch puts final chunks last, whatever the order of the wave's rows."""
    one, two, three = (stage.admit(str(number), prompt(70 + number, number)) for number in range(3))
    stage.advance((one, 2 * B), (two, 4 * B))
    outcome = stage.advance((two, 7), (one, B), (three, 72))
    assert [result.row for result in outcome.results] == [2, 0] or {result.row for result in outcome.results} == {0, 2}
    by_row = {result.row: result for result in outcome.results}
    assert_exact(model, two.tokens, by_row[0])
    assert_exact(model, three.tokens, by_row[2])
    assert_exact(model, one.tokens, stage.finish(one))


def test_other_rows_are_exact_and_its_own_sequence_untouched_when_a_row_is_void(stage: AloneStage, model: Path) -> None:
    live, void = stage.admit("live", prompt(60, 1)), stage.admit("void", prompt(60, 2))
    stage.advance((live, 2 * B), (void, 2 * B))
    request = stage.desk.requests[void.key]
    before = request.context_current_position
    outcome = stage.run(stage.row(void, B, void=True), stage.row(live, 28))
    assert request.context_current_position == before
    (result,) = outcome.results
    assert_exact(model, live.tokens, result)


def test_row_is_void_and_none_of_it_is_committed_when_it_computes_nan(stage: AloneStage, model: Path) -> None:
    """The bad token stands in the third block: an equal prefix computed later is exact, and finds nothing to reuse."""
    spoilt, start = 3, [token for token in prompt(90, 1) if token != 3]
    weight = stage.desk.executor.model_engine.model.embedding.weight
    sound = weight[spoilt].clone()
    bad, beside = stage.admit("bad", [*start[:70], spoilt]), stage.admit("beside", prompt(40, 2))
    weight[spoilt, 0] = float("nan")
    outcome = stage.run(stage.row(bad, 71), stage.row(beside, 40))
    error = outcome.faults[0]
    assert isinstance(error, NonFinite)
    assert (error.message, error.fields) == ("logits of stage 0 are not finite", {"stage": "0", "row": "0"})
    (result,) = outcome.results
    assert result.row == 1
    assert_exact(model, beside.tokens, result)
    stage.cache.discard(bad.key)
    stage.cache.publish(bad.key, 71)
    stage.release("bad")
    weight[spoilt] = sound
    assert stage.prefill("innocent", [*start[:70], spoilt, 5]) == 0
    assert not stage.engine.fenced


@pytest.mark.parametrize(("part", "what"), [("source", "received activations"), ("target", "activations")])
def test_row_is_named_when_its_payload_is_not_finite(part: str, what: str) -> None:
    plan = EnginePlan("m", 1, 3, 2, 4, B, 8, 64, 8)
    rows = [_Live(index, replace(ROW, length=4), 4 * index, Mock()) for index in range(3)]
    payloads = {"source": torch.zeros(12, 8), "target": torch.zeros(12, 8)}
    payloads[part][7, 5] = -torch.inf
    found = _not_finite(plan, rows, payloads["source"], payloads["target"], None)
    assert {index: error.message for index, error in found.items()} == {1: f"{what} of stage 1 are not finite"}


def test_nothing_runs_when_every_row_is_void(stage: AloneStage, monkeypatch: pytest.MonkeyPatch) -> None:
    row = stage.row(stage.admit("a", prompt(40)), B, void=True)
    monkeypatch.setattr(compat, "forward", None)
    outcome = stage.run(row)
    assert (outcome.payload, outcome.results, outcome.faults) == (None, (), {})


def test_first_token_is_drawn_as_the_torch_engine_draws_when_a_temperature_is_asked(
    stage: AloneStage, model: Path
) -> None:
    sampling = Sampling(temperature=0.8, seed=11, top_logprobs=3)
    asked = stage.admit("a", prompt(40))
    asked.sampling = sampling
    result = stage.finish(asked)
    logits = tiny_models.unsplit_logits(model, asked.tokens)[None]
    (expected,) = sample_rows(logits, [(0, sampling)])
    assert result.token_id == expected.token_id
    assert [pair.token_id for pair in result.top_logprobs] == [pair.token_id for pair in expected.top_logprobs]


@pytest.mark.parametrize(
    ("start", "length", "field"),
    [(B, B, "rows[0]"), (0, 0, "rows[0]"), (0, 41, "rows[0]"), (0, 5, "rows[0]")],
    ids=["gap", "empty", "beyond the prompt", "not on a block"],
)
def test_wave_is_refused_and_the_engine_fenced_when_a_chunk_does_not_continue(
    stage: AloneStage, start: int, length: int, field: str
) -> None:
    row = replace(stage.row(stage.admit("a", prompt(40)), B), start=start, length=length)
    with pytest.raises(EngineFault) as caught:
        stage.run(row, replace(row, length=B, void=True))
    assert caught.value.fields["field"] == field
    assert stage.engine.fenced


def test_wave_is_refused_when_its_sequence_was_released(stage: AloneStage) -> None:
    row = stage.row(stage.admit("a", prompt(40)), B)
    stage.release("a")
    with pytest.raises(EngineFault, match="not here"):
        stage.run(row)


# --- fences -----------------------------------------------------------------------------------------------


def test_nothing_runs_until_the_next_load_when_a_forward_failed(
    stage: AloneStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = stage.admit("a", prompt(60))
    stage.advance((running, B))
    monkeypatch.setenv("FAKE_TRTLLM_FAIL_FORWARD", "all")
    with pytest.raises(RuntimeError, match="injected"):
        stage.run(stage.row(running, B))
    monkeypatch.delenv("FAKE_TRTLLM_FAIL_FORWARD")
    with pytest.raises(EngineFault, match="injected"):
        stage.run(stage.row(running, B))
    assert stage.lease("b", prompt(8)).shortfall.blocks == 1
    stage.cache.end_formation(1)
    stage.cache.executor_stopped(1)
    stage.load()
    assert not stage.engine.fenced
    assert stage.shown() == 0
    assert stage.prefill("again", prompt(60)) == 0


def test_failed_load_is_told_and_the_next_one_serves(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with stand_in(monkeypatch):
        stage = AloneStage(model)
        monkeypatch.setenv("FAKE_TRTLLM_FAIL_LOAD", "all")
        with pytest.raises(EngineFault, match="did not load"):
            stage.load()
        assert stage.engine.desk is None
        assert stage.engine.fenced
        assert stage.cache.capacity().free_blocks == 32
        monkeypatch.delenv("FAKE_TRTLLM_FAIL_LOAD")
        stage.load()
        assert stage.prefill("a", prompt(30)) == 0


# --- loading ----------------------------------------------------------------------------------------------


def test_facts_say_what_the_manager_made(stage: AloneStage) -> None:
    facts = stage.engine.load(stage.plan, lambda done, total: None)
    assert facts.loaded_layers == tuple(range(tiny_models.LAYERS))
    assert (facts.groups, facts.hidden) == ((CacheGroup.ATTENTION,), 2 * 64)
    assert facts.bytes_per_block == tiny_models.LAYERS * 2 * 2 * 24 * 4 * B
    assert stage.cache.pool_blocks >= stage.plan.pool_blocks


def test_load_is_refused_by_name_when_the_manager_uses_another_block_size(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stand_in(monkeypatch, force_tokens_per_block=64), pytest.raises(EngineFault) as caught:
        AloneStage(model)
    fields = caught.value.fields
    assert (fields["field"], fields["value"], fields["limit"]) == ("block_tokens", "64", str(B))


def test_load_is_refused_by_name_when_the_manager_keeps_room_beyond_the_prompt(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stand_in(monkeypatch, extra_kv_tokens=1), pytest.raises(EngineFault) as caught:
        AloneStage(model)
    fields = caught.value.fields
    assert (fields["field"], fields["value"], fields["limit"]) == ("num_extra_kv_tokens", "1", "0")


def test_load_is_refused_when_several_stages_have_no_group(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with stand_in(monkeypatch):
        engine = TrtllmEngine(device="cpu")
        with pytest.raises(EngineFault) as caught:
            engine.load(EnginePlan(str(model), 0, 2, 0, 2, B, 32, 256, 8), lambda done, total: None)
    assert caught.value.fields["field"] == "group"


def test_engine_lists_every_miss_when_the_package_has_no_names(tmp_path: Path) -> None:
    (tmp_path / "tensorrt_llm").mkdir()
    (tmp_path / "tensorrt_llm" / "__init__.py").write_text("__version__ = '1.3.0rc26'\n")
    with installed(tmp_path), pytest.raises(EngineFault) as caught:
        TrtllmEngine(device="cpu")
    assert caught.value.fields["field"] == "tensorrt_llm"
    assert int(caught.value.fields["value"]) > 30
    assert "create_py_executor" in caught.value.message
    assert "sequence_to_blockchain_keys" in caught.value.message


def test_load_is_refused_by_name_when_the_model_is_not_served(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"attention_chunk_size": 64}))
    with stand_in(monkeypatch), pytest.raises(EngineFault) as caught:
        AloneStage(tmp_path)
    assert caught.value.fields == {"field": "attention_chunk_size", "value": "64", "limit": "2048"}


@pytest.mark.parametrize("name", ["int8", "float8", "torch.bfloat16", "", "double"])
def test_engine_is_refused_when_its_dtype_is_none_of_the_library_s(name: str) -> None:
    with installed(STAND_IN), pytest.raises(EngineFault) as caught:
        TrtllmEngine(device="cpu", dtype=name)
    assert caught.value.fields == {"field": "dtype", "value": name, "limit": "auto, float16, bfloat16, float32"}


def test_float32_is_refused_on_a_gpu() -> None:
    with pytest.raises(EngineFault) as caught:
        check_dtype("float32", torch.device("cuda:0"))
    assert caught.value.fields == {"field": "dtype", "value": "float32", "limit": "auto, float16, bfloat16"}


@pytest.mark.parametrize("name", ["meta", "mps", "xla", "cpu:3", "cuda:5", "cuda:1", "gpu", ""])
def test_engine_is_refused_when_its_device_is_not_its_one_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with installed(STAND_IN), pytest.raises(EngineFault) as caught:
        TrtllmEngine(device=name)
    assert caught.value.fields == {"field": "device", "value": name, "limit": "cuda:0"}


@pytest.mark.parametrize(("seen", "field"), [(0, "device"), (2, "CUDA_VISIBLE_DEVICES")])
def test_engine_is_refused_when_it_does_not_see_one_gpu(seen: int, field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: seen > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    with pytest.raises(EngineFault) as caught:
        device_of("cuda:0")
    assert caught.value.fields["field"] == field


def test_cuda_without_a_number_is_the_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert [device_of(name) for name in ("cuda", "cuda:0")] == [torch.device("cuda:0")] * 2


def test_facts_of_a_folder_are_those_of_the_torch_engine(model: Path) -> None:
    from wavepp_stage.engine.torch.facts import model_facts as torch_facts

    assert model_facts(str(model)) == torch_facts(str(model))


# --- payloads ----------------------------------------------------------------------------------------------


def test_payload_is_the_same_when_it_was_encoded(stage: AloneStage) -> None:
    payload = stage.engine.receive_buffer(3).copy_(torch.arange(3 * 128).view(3, 128))
    data = stage.engine.encode(payload)
    assert torch.equal(stage.engine.decode(data, 3), payload)
    with pytest.raises(ValueError, match="4 rows"):
        stage.engine.decode(data, 4)


def test_copy_is_refused_since_the_manager_moves_its_own_blocks() -> None:
    with installed(STAND_IN):
        engine = TrtllmEngine(device="cpu")
        with pytest.raises(EngineFault):
            engine.copy(CopyLot(1, CopyDirection.OFFLOAD, np.zeros(1, np.int32), np.zeros(1, np.int32)))


def test_engine_is_not_loaded_before_a_join(monkeypatch: pytest.MonkeyPatch) -> None:
    with stand_in(monkeypatch):
        engine = TrtllmEngine(device="cpu")
        assert (engine.desk, engine.fenced) == (None, "")
        engine.close()
        engine.close()
        with pytest.raises(EngineFault, match="no join"):
            engine.receive_buffer(1)


def test_unpublished_prompt_is_given_back_when_it_never_ran(stage: AloneStage) -> None:
    stage.admit("a", prompt(40))
    stage.release("a")
    assert isinstance(stage.admit("a2", prompt(40)), Prompted)
    assert stage.cache.cached_blocks == 0


def test_weights_of_a_closed_load_are_gone_although_a_hold_outlives_it(stage: AloneStage) -> None:
    stage.admit("a", prompt(40))
    executor = weakref.ref(stage.desk.executor)
    stage.load()
    assert executor() is None
    stage.cache.end_formation(1)
    stage.cache.executor_stopped(1)
    assert stage.prefill("b", prompt(40)) == 0
