"""Model folders as they are found in the wild: what transformers loads from each is what a pipeline answers with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from tests.harness import tiny_models
from tests.harness.torch_pipeline import Pipeline
from wavepp_proto.errors import EngineFault
from wavepp_stage.engine.torch.facts import INDEX_NAME, SINGLE_FILE, model_facts, stored_tensors

LAYERS = 2
HEAD, EMBEDDING, UP = "lm_head.weight", "model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"
PROMPT = list(range(3, 43))
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def original(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.3, tie_word_embeddings=request.param,
    )  # fmt: skip
    return tiny_models.save_random(config, tmp_path_factory.mktemp("folders") / "model")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


def is_tied(folder: Path) -> bool:
    return bool(json.loads((folder / "config.json").read_text())["tie_word_embeddings"])


def configure(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({key: one for key, one in config.items() if one is not None}))


def change(folder: Path, edit: Callable[[Tensors], Tensors]) -> None:
    save_file(edit(load_file(folder / SINGLE_FILE)), folder / SINGLE_FILE, metadata={"format": "pt"})


def shard(folder: Path, into: Callable[[str], tuple[int, ...]], mapped: dict[str, int] | None = None) -> None:
    """Replace the single file by shards: each tensor in the shards that `into` names, differing between them where
    there are several; the index names the last one, or what `mapped` says."""
    tensors = load_file(folder / SINGLE_FILE)
    (folder / SINGLE_FILE).unlink()
    weight_map = {name: f"part-{(mapped or {}).get(name, max(into(name)))}.safetensors" for name in tensors}
    for number in {one for name in tensors for one in into(name)}:
        held = {name: tensor * (1 + number / 8) for name, tensor in tensors.items() if number in into(name)}
        save_file(held, folder / f"part-{number}.safetensors", metadata={"format": "pt"})
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def by_layer(name: str) -> tuple[int, ...]:
    return (1,) if ".layers.1." in name else (0,)


def in_two(name: str) -> tuple[int, ...]:
    return (0, 1) if name == UP else by_layer(name)


def two_heads(tensors: Tensors) -> Tensors:
    return tensors | {HEAD: torch.randn(64, 32, generator=torch.Generator().manual_seed(7))}


def head_alone(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name != EMBEDDING} | {HEAD: tensors[EMBEDDING].clone()}


def mixed(tensors: Tensors) -> Tensors:
    kinds = (torch.float16, torch.bfloat16, torch.float32)
    return {name: tensor.to(kinds[at % 3]) for at, (name, tensor) in enumerate(tensors.items())}


def without_prefix(tensors: Tensors) -> Tensors:
    """As a folder of the model without its head names them."""
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def stale_index(folder: Path) -> None:
    kept = load_file(folder / SINGLE_FILE)
    shard(folder, by_layer)
    save_file({name: tensor * 0.5 for name, tensor in kept.items()}, folder / SINGLE_FILE, metadata={"format": "pt"})


def index_of_absent_shards(folder: Path) -> None:
    stale_index(folder)
    for part in folder.glob("part-*"):
        part.unlink()


VARIANTS: dict[str, Callable[[Path], object]] = {
    "as saved": lambda folder: None,
    "sharded": lambda folder: shard(folder, by_layer),
    "in two shards, the index names the last": lambda folder: shard(folder, in_two),
    "single file beside a stale index": stale_index,
    "single file beside an index of absent shards": index_of_absent_shards,
    "a head that differs from the embedding": lambda folder: change(folder, two_heads),
    "mixed dtypes": lambda folder: change(folder, mixed),
    "tensors of no layer": lambda folder: change(folder, lambda held: held | {"mtp.layers.0.weight": torch.ones(2)}),
    "no prefix": lambda folder: change(folder, without_prefix),
    "integers that no parameter takes": lambda folder: change(
        folder,
        lambda held: held | {
            "model.layers.9.mlp.up_proj.weight": torch.ones(2, dtype=torch.int8),
            "model.layers.1.self_attn.mask": torch.ones(2, dtype=torch.bool),
            "step": torch.tensor(7),
        },
    ),
    "dtype": lambda folder: configure(folder, dtype="bfloat16"),
    "torch_dtype": lambda folder: configure(folder, dtype=None, torch_dtype="float16"),
    "no head_dim": lambda folder: configure(folder, head_dim=None),
    "rope_theta apart": lambda folder: configure(folder, rope_parameters=None, rope_theta=500.0),
    "rope_scaling linear": lambda folder: configure(
        folder, rope_parameters=None, rope_theta=1e4, rope_scaling={"type": "linear", "factor": 4.0}
    ),
    "rope llama3": lambda folder: configure(
        folder,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "rope yarn": lambda folder: configure(
        folder,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32
        },
    ),
}  # fmt: skip


def largest_difference(folder: Path) -> float:
    """Between a pipeline of two stages and transformers' own load of the folder; float32 logits."""
    pipeline = Pipeline(folder, (0, 1, LAYERS), block_tokens=8, pool_blocks=16, wave_tokens=64)
    logits = pipeline.prefill(pipeline.sequence("p", PROMPT)).logits
    assert logits is not None
    wanted = tiny_models.unsplit_logits(folder, PROMPT)
    return float((torch.frombuffer(bytearray(logits), dtype=torch.float32) - wanted).abs().max())


@pytest.mark.parametrize("name", VARIANTS)
def test_folder_answers_as_transformers_loads_it(folder: Path, name: str) -> None:
    VARIANTS[name](folder)
    model_facts(str(folder))
    assert largest_difference(folder) < 1e-4


def test_either_tied_tensor_serves_for_both(folder: Path) -> None:
    """transformers ties in both directions: the one that is stored counts."""
    change(folder, head_alone)
    if is_tied(folder):
        assert largest_difference(folder) < 1e-4
    else:
        with pytest.raises(EngineFault, match=rf"lacks 1 tensors of this stage, first {EMBEDDING}"):
            largest_difference(folder)


def test_tensor_is_refused_when_index_and_transformers_differ_on_its_shard(folder: Path) -> None:
    shard(folder, in_two, {UP: 0})
    with pytest.raises(EngineFault, match=rf"{UP} lies in part-0.safetensors, .* and in part-1.safetensors"):
        model_facts(str(folder))


def test_tensor_is_named_with_its_shard_when_the_shard_lacks_it(folder: Path) -> None:
    shard(folder, by_layer, {UP: 0})
    with pytest.raises(EngineFault, match=rf"part-0.safetensors lacks 1 tensors that {INDEX_NAME} .* first {UP}"):
        stored_tensors(folder)


@pytest.mark.parametrize(
    ("name", "dtype", "told"),
    [(UP, torch.int8, "I8"), (EMBEDDING, torch.uint8, "U8"), (UP, torch.complex64, "C64")],
)
def test_parameter_of_no_floating_dtype_is_named_with_its_file_when_a_daemon_starts(
    folder: Path, name: str, dtype: torch.dtype, told: str
) -> None:
    shard(folder, by_layer)
    file = folder / f"part-{by_layer(name)[0]}.safetensors"
    held = load_file(file)
    save_file(held | {name: held[name].to(dtype)}, file, metadata={"format": "pt"})
    with pytest.raises(EngineFault) as caught:
        model_facts(str(folder))
    said = f"{name} in {file.name} is stored as {told}: the torch engine serves floating weights alone"
    assert caught.value.message == said
    assert (caught.value.fields["field"], caught.value.fields["value"]) == (name, told)


def test_parameter_of_a_dtype_that_is_not_known_is_named_with_its_file(folder: Path) -> None:
    content = (folder / SINGLE_FILE).read_bytes()
    at = content.index(f'"{UP}"'.encode())
    (folder / SINGLE_FILE).write_bytes(content[:at] + content[at:].replace(b'"F32"', b'"Q32"', 1)[: len(content) - at])
    with pytest.raises(EngineFault) as caught:
        model_facts(str(folder))
    assert caught.value.message.startswith(f"{UP} in {SINGLE_FILE} is stored as Q32")


def test_bias_of_integers_matters_to_the_load_of_a_model_that_has_one(folder: Path) -> None:
    """Whether a model has biases its modules tell, which a daemon's start does not build."""
    sizes = {"q": 32, "k": 16, "v": 16, "o": 32}
    biases = {
        f"model.layers.{layer}.self_attn.{part}_proj.bias": torch.zeros(size)
        for layer in range(LAYERS)
        for part, size in sizes.items()
    }
    bad = "model.layers.1.self_attn.k_proj.bias"
    change(folder, lambda held: held | biases | {bad: torch.zeros(16, dtype=torch.int8)})
    model_facts(str(folder))
    assert largest_difference(folder) < 1e-4
    configure(folder, attention_bias=True)
    with pytest.raises(EngineFault) as caught:
        largest_difference(folder)
    assert caught.value.message.startswith(f"{bad} in {SINGLE_FILE} is stored as I8: ")


@pytest.mark.parametrize("value", ["../elsewhere.safetensors", 7, None])
def test_index_is_refused_when_it_leads_out_of_the_folder(folder: Path, value: object) -> None:
    shard(folder, by_layer)
    index = json.loads((folder / INDEX_NAME).read_text())
    index["weight_map"][UP] = value
    (folder / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(EngineFault) as caught:
        model_facts(str(folder))
    assert caught.value.fields["field"] == "weight_map"
