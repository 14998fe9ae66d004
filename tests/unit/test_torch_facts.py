"""Facts and fingerprint of a model folder: equal for copies, different for anything that answers differently."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.harness import tiny_models
from wavepp_proto import __version__
from wavepp_proto.errors import EngineFault
from wavepp_proto.terms import CacheGroup, Numerics
from wavepp_stage.engine.torch.facts import fingerprint, model_facts
from wavepp_stage.engine.torch.model import numerics


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build("llama", tmp_path_factory.mktemp("models"), sharded=True)


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "elsewhere"))


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes, indent=7))


def test_facts_are_those_of_the_configuration(model: Path) -> None:
    facts = model_facts(str(model))
    assert (facts.layers, facts.vocabulary, facts.window) == (5, 512, 2048)
    assert facts.name == facts.path == str(model)


HYBRID: dict[str, Any] = {"model_type": "qwen3_next", "num_hidden_layers": 8}
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
        ({"use_sliding_window": True, "sliding_window": 256}, "sliding_window"),
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


@pytest.mark.parametrize("content", [b"", b"[]", b"not json"])
def test_folder_is_refused_when_the_configuration_is_damaged(copy: Path, content: bytes) -> None:
    (copy / "config.json").write_bytes(content)
    with pytest.raises(EngineFault, match=r"config\.json"):
        model_facts(str(copy))


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
