"""Which stored tensors each stage reads, and what it refuses to read.

A stage reads its band, the first one the embedding, the last one norm and head, and nothing else.
"""

from __future__ import annotations

import json
import shutil
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.harness import tiny_models
from tests.harness.torch_pipeline import Pipeline
from wavepp_proto.errors import EngineFault
from wavepp_stage.engine.base import EnginePlan
from wavepp_stage.engine.torch.engine import TorchEngine


def bounds_of(family: str) -> tuple[int, ...]:
    return (0, 1, 2, tiny_models.layers_of(family))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def stored_names(folder: Path) -> set[str]:
    return {name for file in folder.glob("*.safetensors") for name in load_file(file)}


def plan_of(model: Path, **changes: Any) -> EnginePlan:
    values: dict[str, Any] = {"stage": 0, "stages": 1, "first_layer": 0, "last_layer": tiny_models.LAYERS}
    values |= changes
    return EnginePlan(str(model), block_tokens=16, pool_blocks=8, wave_tokens=64, lanes=4, state_slots=2, **values)


def load(model: Path, **changes: Any) -> TorchEngine:
    engine = TorchEngine(threads=1)
    engine.load(plan_of(model, **changes), lambda done, total: None)
    return engine


@pytest.mark.parametrize("family", sorted(tiny_models.FAMILIES))
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_each_stage_reads_its_own_tensors_alone(root: Path, family: str, sharded: bool, tied: bool) -> None:
    model = tiny_models.build(family, root, tied=tied, sharded=sharded)
    stored = stored_names(model)
    bounds = bounds_of(family)
    for stage, (first, last) in enumerate(pairwise(bounds)):
        wanted = tuple(f"model.layers.{layer}." for layer in range(first, last))
        if stage == 0:
            wanted += ("model.embed_tokens.",)
        if stage == len(bounds) - 2:
            wanted += ("model.norm.", "model.embed_tokens." if tied else "lm_head.")
        engine = load(model, stage=stage, stages=len(bounds) - 1, first_layer=first, last_layer=last)
        assert engine.tensor_names == tuple(sorted(name for name in stored if name.startswith(wanted)))


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_all_stages_together_read_every_tensor_once(root: Path, family: str) -> None:
    model = tiny_models.build(family, root, sharded=True)
    read = [
        name for engine in Pipeline(model, bounds_of(family), state_slots=1).engines for name in engine.tensor_names
    ]
    assert sorted(read) == sorted(stored_names(model))


def test_stored_head_counts_when_the_configuration_ties_it(root: Path, tmp_path: Path) -> None:
    """transformers#42612: two stored tensors that differ are not tied, whatever the configuration says."""
    model = tmp_path / "both"
    shutil.copytree(tiny_models.build("llama", root, tied=True), model)
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"] = torch.zeros_like(tensors["model.embed_tokens.weight"])
    save_file(tensors, model / "model.safetensors")
    last = load(model, stage=1, stages=2, first_layer=1)
    assert "lm_head.weight" in last.tensor_names
    assert "model.embed_tokens.weight" not in last.tensor_names
    assert not last.band.model.lm_head.weight.any()


def test_no_parameter_exists_outside_the_band(root: Path) -> None:
    model = tiny_models.build("llama", root)
    engine = load(model, stage=1, stages=3, first_layer=2, last_layer=3)
    assert {name.split(".")[2] for name in engine.band.model.state_dict()} == {"2"}
    assert not any(parameter.requires_grad for parameter in engine.band.model.parameters())


def test_progress_ends_at_total_when_loading(root: Path) -> None:
    seen: list[tuple[int, int]] = []
    engine = TorchEngine(threads=1)
    engine.load(plan_of(tiny_models.build("qwen3_moe", root)), lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (len(engine.tensor_names), len(engine.tensor_names))


def test_missing_tensor_is_named(root: Path, tmp_path: Path) -> None:
    model = tmp_path / "gap"
    shutil.copytree(tiny_models.build("llama", root), model)
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(EngineFault, match=r"lacks 1 tensors .* model\.layers\.3\.mlp\.up_proj\.weight"):
        load(model)
    load(model, stages=2, last_layer=3)  # the other stage does not miss it


def test_missing_expert_is_named(root: Path, tmp_path: Path) -> None:
    model = tmp_path / "expert"
    shutil.copytree(tiny_models.build("qwen3_moe", root), model)
    tensors = load_file(model / "model.safetensors")
    del tensors["model.layers.2.mlp.experts.4.down_proj.weight"]
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(EngineFault) as caught:
        load(model)
    assert caught.value.fields["field"] == "model.layers.2.mlp.experts.down_proj"


def test_tensors_of_no_layer_are_left_aside(root: Path, tmp_path: Path) -> None:
    """A published Qwen3-Next folder holds a multi-token prediction head, which prefill does not run."""
    model = tmp_path / "mtp"
    shutil.copytree(tiny_models.build("qwen3_next", root), model)
    tensors = load_file(model / "model.safetensors")
    tensors["mtp.layers.0.self_attn.q_proj.weight"] = torch.zeros(4, 4)
    save_file(tensors, model / "model.safetensors")
    engine = load(model, last_layer=tiny_models.HYBRID_LAYERS)
    assert set(engine.tensor_names) == tensors.keys() - {"mtp.layers.0.self_attn.q_proj.weight"}


def test_installed_transformers_is_named_when_it_lacks_recurrent_layers(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_models.build("qwen3_next", root)
    monkeypatch.setitem(sys.modules, "wavepp_stage.engine.torch.gated_delta", None)
    with pytest.raises(EngineFault) as caught:
        load(model)
    assert caught.value.fields["field"] == "transformers"
    load(model, first_layer=3, last_layer=4)  # a band of attention layers does not need them


CHANGES: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "model_type"),
    ("mistral", {"sliding_window": 256}, "sliding_window"),
    ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 256}, "sliding_window"),
    ("qwen2", {"layer_types": ["full_attention"] * 4 + ["sliding_attention"]}, "layer_types"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type"),
    ("qwen3_next", {"layer_types": ["linear_attention", "sliding_attention"] * 4}, "layer_types"),
    ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
]


@pytest.mark.parametrize(("family", "change", "field"), CHANGES)
def test_model_is_refused_by_field_when_not_served(
    root: Path, tmp_path: Path, family: str, change: dict[str, Any], field: str
) -> None:
    model = tmp_path / "changed"
    shutil.copytree(tiny_models.build(family, root), model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(EngineFault) as caught:
        load(model)
    assert caught.value.fields["field"] == field


def test_model_is_served_when_its_sliding_window_is_never_reached(root: Path, tmp_path: Path) -> None:
    model = tmp_path / "wide"
    shutil.copytree(tiny_models.build("mistral", root), model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"sliding_window": tiny_models.WINDOW}))
    assert len(load(model).band.layers) == tiny_models.LAYERS


@pytest.mark.parametrize(("first", "last"), [(0, 6), (3, 3), (-1, 2), (4, 2)])
def test_band_is_refused_when_outside_the_model(root: Path, first: int, last: int) -> None:
    with pytest.raises(EngineFault, match="band outside the model"):
        load(tiny_models.build("llama", root), first_layer=first, last_layer=last)


def test_folder_is_named_when_it_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(EngineFault) as caught:
        load(tmp_path / "nothing")
    assert caught.value.fields["value"] == str(tmp_path / "nothing")


def test_dtype_is_the_models_own_when_auto(root: Path, tmp_path: Path) -> None:
    model = tmp_path / "bf16"
    shutil.copytree(tiny_models.build("llama", root), model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    for setting, dtype in (("auto", torch.bfloat16), ("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        engine = TorchEngine(dtype=setting, threads=1)
        engine.load(plan_of(model), lambda done, total: None)
        assert engine.receive_buffer(1).dtype is dtype
        assert {parameter.dtype for parameter in engine.band.model.parameters()} == {dtype}
        assert engine.cache.tensors(0)[0].dtype is dtype


def test_dtype_is_refused_when_unknown(root: Path) -> None:
    with pytest.raises(EngineFault) as caught:
        TorchEngine(dtype="int3", threads=1).load(plan_of(tiny_models.build("llama", root)), lambda done, total: None)
    assert caught.value.fields["value"] == "int3"
