"""Facts and fingerprint of a model folder: equal for copies, different for anything that answers differently."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.harness import tiny_models
from wavepp_proto import __version__
from wavepp_proto.errors import EngineFault
from wavepp_proto.terms import CacheGroup, Numerics
from wavepp_stage.engine.base import EnginePlan
from wavepp_stage.engine.torch.facts import load_config, model_facts, read_header
from wavepp_stage.engine.torch.model import build_band, numerics


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build("llama", tmp_path_factory.mktemp("models"), sharded=True)


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "elsewhere"))


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes, indent=7))


def fingerprint(folder: Path) -> str:
    return model_facts(str(folder)).fingerprint


def test_facts_are_those_of_the_configuration(model: Path) -> None:
    facts = model_facts(str(model))
    assert (facts.layers, facts.vocabulary, facts.window) == (5, 512, 2048)
    assert facts.name == facts.path == str(model)


HYBRID: dict[str, Any] = {"model_type": "qwen3_next", "num_hidden_layers": 8}
QWEN2: dict[str, Any] = {"model_type": "qwen2"}
LINEAR, FULL = "linear_attention", "full_attention"


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, ()),
        (HYBRID | {"layer_types": [LINEAR, FULL] * 4}, (0, 2, 4, 6)),
        (HYBRID, (0, 1, 2, 4, 5, 6)),
        (HYBRID | {"full_attention_interval": 3}, (0, 1, 3, 4, 6, 7)),
        ({"sliding_window": 256}, ()),
        ({"model_type": "mistral", "sliding_window": 2048}, ()),
        ({"use_sliding_window": False, "sliding_window": 256}, ()),
        ({"use_sliding_window": True, "sliding_window": 256}, ()),  # Llama's layers have no window
        (QWEN2 | {"use_sliding_window": True, "sliding_window": 256, "max_window_layers": 5}, ()),
    ],
)
def test_recurrent_layers_are_those_of_the_configuration(
    copy: Path, changes: dict[str, Any], layers: tuple[int, ...]
) -> None:
    edit_config(copy, **changes)
    facts = model_facts(str(copy))
    assert facts.recurrent_layers == layers


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model_type": "kimi_linear"}, "model_type"),
        ({"model_type": None}, "model_type"),
        ({"layer_types": [FULL] * 4 + ["sliding_attention"]}, "layer_types"),
        ({"layer_types": [FULL] * 4 + [LINEAR]}, "layer_types"),  # of a family whose recurrence is not known
        ({"layer_types": [FULL] * 4}, "layer_types"),
        ({"layer_types": "full_attention"}, "layer_types"),
        (HYBRID | {"layer_types": [LINEAR, "chunked_attention"] * 4}, "layer_types"),
        (HYBRID | {"full_attention_interval": 0}, "full_attention_interval"),
        ({"model_type": "mistral", "sliding_window": 256}, "sliding_window"),
        ({"model_type": "mistral", "max_position_embeddings": 8192}, "sliding_window"),  # 4,096 unless told
        (QWEN2 | {"use_sliding_window": True, "sliding_window": 256, "max_window_layers": 3}, "layer_types"),
    ],
)
def test_folder_is_refused_by_field_when_a_layer_is_of_another_kind(
    copy: Path, changes: dict[str, Any], field: str
) -> None:
    edit_config(copy, **changes)
    with pytest.raises(EngineFault) as caught:
        model_facts(str(copy))
    assert caught.value.fields["field"] == field


def test_groups_of_a_band_follow_from_its_layers(model: Path) -> None:
    hybrid = tiny_models.build("qwen3_next", model.parent)
    assert model_facts(str(hybrid)).recurrent_layers == (0, 1, 2, 4, 5, 6)
    assert model_facts(str(hybrid)).groups_of(0, 3) == (CacheGroup.RECURRENT,)


def test_fingerprint_is_equal_when_the_folder_is_a_copy(model: Path, copy: Path) -> None:
    edit_config(copy, _name_or_path="/somewhere/else", transformers_version="9.9")
    assert fingerprint(copy) == fingerprint(model)


@pytest.mark.parametrize(
    "change",
    [
        {"torch_dtype": "bfloat16", "dtype": None},
        {"rope_theta": 10000, "rope_parameters": None},
        {"rope_scaling": {"type": "default", "rope_theta": 1e4}, "rope_parameters": None},
        {"head_dim": None},
        {"attention_bias": None, "mlp_bias": None, "use_cache": None},
        {"architectures": None, "initializer_range": 0.5, "some_null": None},
    ],
    ids=lambda change: ",".join(change),
)
def test_fingerprint_is_equal_when_one_configuration_is_spelt_otherwise(
    model: Path, copy: Path, change: dict[str, Any]
) -> None:
    config = json.loads((copy / "config.json").read_text()) | change
    (copy / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    assert fingerprint(copy) == fingerprint(model)


def test_window_is_stretched_when_yarn_tells_what_was_trained(copy: Path) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    edit_config(copy, rope_parameters=yarn | {"original_max_position_embeddings": 2048})
    assert model_facts(str(copy)).window == 8192
    edit_config(copy, rope_parameters=yarn | {"original_max_position_embeddings": 512})
    assert model_facts(str(copy)).window == 2048


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"rope_parameters": {"rope_type": "ntk-magic", "rope_theta": 1e4}}, "rope_type"),
        ({"rope_scaling": {"type": "ntk-magic", "factor": 2.0}, "rope_parameters": None}, "rope_type"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "model"),  # no factor
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": -1.0}}, "factor"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "q"}}, "rope_theta"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_hidden_layers": "5"}, "num_hidden_layers"),
        ({"hidden_size": -64}, "hidden_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),  # reading it took 30 s
        ({"num_hidden_layers": 4097}, "num_hidden_layers"),
        ({"hidden_size": (1 << 20) + 1}, "hidden_size"),
        ({"num_attention_heads": (1 << 16) + 1}, "num_attention_heads"),
        ({"num_key_value_heads": (1 << 16) + 1}, "num_key_value_heads"),
        ({"vocab_size": (1 << 24) + 1}, "vocab_size"),
        ({"max_position_embeddings": (1 << 26) + 1}, "max_position_embeddings"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"quantization_config": [1]}, "quantization_config"),
        ({"id2label": ["a"]}, "id2label"),
        ({"dtype": [1]}, "dtype"),
        ({"torch_dtype": "x"}, "torch_dtype"),
    ],
)
def test_malformed_configuration_is_one_typed_error_when_a_daemon_starts(
    copy: Path, change: dict[str, Any], field: str
) -> None:
    edit_config(copy, **change)
    with pytest.raises(EngineFault) as caught:
        model_facts(str(copy))
    assert caught.value.fields["field"] == field, caught.value
    assert "\n" not in str(caught.value)
    assert "has no attribute" not in str(caught.value), "it quotes Python"


_VALUE = st.none() | st.booleans() | st.integers(-2, 5000) | st.floats(allow_nan=True) | st.text(max_size=4)
_JSON = st.recursive(
    _VALUE, lambda one: st.lists(one, max_size=3) | st.dictionaries(st.text(max_size=8), one), max_leaves=4
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_configuration_leads_to_an_untyped_error(copy: Path, data: st.DataObject) -> None:
    whole = json.loads((copy / "config.json").read_text())
    key = data.draw(st.sampled_from(sorted(whole)))
    changed = copy.parent / "changed"
    shutil.rmtree(changed, ignore_errors=True)
    shutil.copytree(copy, changed)
    edit_config(changed, **{key: data.draw(_JSON)})
    with suppress(EngineFault):
        model_facts(str(changed))
        numerics(str(changed), "auto")
        plan = EnginePlan(str(changed), 0, 1, 0, 1, block_tokens=16, pool_blocks=4, wave_tokens=64, lanes=4)
        build_band(load_config(str(changed)), plan, torch.float32)


def test_fingerprint_differs_when_the_configuration_does(model: Path, copy: Path) -> None:
    edit_config(copy, rms_norm_eps=1e-5)
    assert fingerprint(copy) != fingerprint(model)


def test_fingerprint_differs_when_a_weight_does(model: Path, copy: Path) -> None:
    """A fine-tune has the same names, shapes and sizes."""
    shard = sorted(copy.glob("*.safetensors"))[1]
    tensors = load_file(shard)
    name = max(tensors, key=lambda one: tensors[one].numel())
    tensors[name] = tensors[name] * 1.01
    save_file(tensors, shard)
    assert fingerprint(copy) != fingerprint(model)


def test_folder_is_refused_when_a_shard_is_missing(copy: Path) -> None:
    shard = sorted(copy.glob("*.safetensors"))[0]
    shard.unlink()
    with pytest.raises(EngineFault, match=shard.name):
        fingerprint(copy)


@pytest.mark.parametrize("content", [b"", b"{}", struct.pack("<Q", 2**60), struct.pack("<Q", 2) + b"[]"])
def test_folder_is_refused_when_a_file_is_damaged(copy: Path, content: bytes) -> None:
    sorted(copy.glob("*.safetensors"))[0].write_bytes(content)
    with pytest.raises(EngineFault, match="safetensors"):
        fingerprint(copy)


@pytest.mark.parametrize("field", ["num_hidden_layers", "vocab_size", "max_position_embeddings"])
def test_folder_is_refused_by_field_when_the_configuration_lacks_it(copy: Path, field: str) -> None:
    edit_config(copy, **{field: None})
    with pytest.raises(EngineFault) as caught:
        model_facts(str(copy))
    assert caught.value.fields["field"] == field


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "model-00001-of-00003.safetensors"])
def test_file_that_git_lfs_did_not_fetch_is_named(copy: Path, name: str) -> None:
    target = copy / name
    if not target.exists():
        target = sorted(copy.glob("*.safetensors"))[0]
    target.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    with pytest.raises(EngineFault, match=rf"{target.name} is a git-lfs pointer.*git lfs pull"):
        model_facts(str(copy))


def test_truncated_shard_is_named_with_the_first_tensor_it_lacks(copy: Path) -> None:
    shard = sorted(copy.glob("*.safetensors"))[1]
    last = max(read_header(shard), key=lambda tensor: tensor.end)
    shard.write_bytes(shard.read_bytes()[:-4])
    with pytest.raises(EngineFault, match=rf"{shard.name} is truncated: 1 of its \d+ tensors .* first {last.name}"):
        model_facts(str(copy))


DEEP = b"[" * 100_000
NESTED = b'{"a":' * 65 + b"1" + b"}" * 65


@pytest.mark.parametrize("content", [b"", b"[]", b"not json", DEEP, NESTED])
def test_folder_is_refused_when_the_configuration_is_damaged(copy: Path, content: bytes) -> None:
    (copy / "config.json").write_bytes(content)
    with pytest.raises(EngineFault, match=r"config\.json"):
        model_facts(str(copy))


def test_nesting_is_bounded_where_the_configuration_is_a_model_otherwise(model: Path, copy: Path) -> None:
    """What the parser takes, later code that walks it did not."""
    edit_config(copy, deep=_nested(63))
    assert fingerprint(copy) != fingerprint(model)
    edit_config(copy, deep=_nested(64))
    with pytest.raises(EngineFault) as caught:
        model_facts(str(copy))
    assert caught.value.message == "config.json nests its JSON deeper than 64 levels"


def _nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize("name", ["config.json", INDEX, "model.safetensors", "shard"])
def test_file_is_named_when_it_is_no_regular_file(copy: Path, name: str) -> None:
    """A pipe without a writer is read for ever."""
    target = sorted(copy.glob("*.safetensors"))[0] if name == "shard" else copy / name
    target.unlink(missing_ok=True)
    os.mkfifo(target)
    with pytest.raises(EngineFault) as caught:
        model_facts(str(copy))
    assert caught.value.message == f"{target.name} of the model is no regular file"
    assert caught.value.fields["value"] == str(target)


@pytest.mark.parametrize("content", [b"[1]", b"{}", b'{"weight_map": [1]}', b'{"weight_map": "a"}'])
def test_index_without_a_weight_map_is_one_typed_error(copy: Path, content: bytes) -> None:
    (copy / INDEX).write_bytes(content)
    with pytest.raises(EngineFault) as caught:
        model_facts(str(copy))
    assert caught.value.message == f"{INDEX} has no weight_map, which names the file of each tensor"


@pytest.mark.parametrize(
    ("header", "why"),
    [
        (b"[]", "has a damaged safetensors header: it is no JSON object"),
        (b'{"t": []}', "has a damaged safetensors header: t lacks dtype, shape or two data_offsets"),
        (b'{"t": {"dtype": "F32", "shape": 1, "data_offsets": [0, 0]}}', "t lacks dtype, shape or two data_offsets"),
        (b'{"t": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}', "t lacks dtype, shape or two data_offsets"),
        (DEEP, "nests its JSON deeper than 64 levels"),
    ],
    ids=["list", "entry", "shape", "offsets", "deep"],
)
def test_damaged_header_says_what_is_wrong_with_it(copy: Path, header: bytes, why: str) -> None:
    shard = sorted(copy.glob("*.safetensors"))[0]
    shard.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(EngineFault) as caught:
        model_facts(str(copy))
    assert caught.value.message.startswith(shard.name)
    assert caught.value.message.endswith(why)


def test_facts_need_no_torch() -> None:
    code = "import sys, wavepp_stage.engine.torch.facts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize(("setting", "dtype"), [("float32", "float32"), ("float16", "float16"), ("auto", "bfloat16")])
def test_record_tells_the_dtype_that_a_setting_comes_to(copy: Path, setting: str, dtype: str) -> None:
    """`auto` on one host and `bfloat16` on another are alike; what differs is refused before anything is loaded."""
    edit_config(copy, dtype="bfloat16", torch_dtype="bfloat16")
    torch_version, transformers_version = (version(name).partition("+")[0] for name in ("torch", "transformers"))
    packages = f"wavepp {__version__}, torch {torch_version}, transformers {transformers_version}"
    assert numerics(str(copy), setting) == Numerics(dtype, 64, "", packages)
