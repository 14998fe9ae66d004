"""Which models the trtllm engine takes, from their configuration alone, and what its daemons must agree on to load."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore  # where torch keeps its type

from tests.harness import tiny_models
from tests.harness.plain_store import PlainStore
from wavepp_proto import __version__
from wavepp_proto.errors import EngineFault
from wavepp_proto.terms import Numerics
from wavepp_stage.engine.base import EnginePlan, StageGroup
from wavepp_stage.engine.trtllm.facts import numerics
from wavepp_stage.engine.trtllm.group import Meeting, compare_terms, tell_terms
from wavepp_stage.engine.trtllm.served import SERVED, served_config
from wavepp_stage.runtime.engines import equip
from wavepp_stage.runtime.settings import StageSettings

POSITIONS = 2048
SHAPE: dict[str, Any] = {"num_hidden_layers": 5, "vocab_size": 512, "max_position_embeddings": POSITIONS,
                         "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}  # fmt: skip


def config_of(kind: str, **changed: Any) -> dict[str, Any]:
    architecture = SERVED[kind].architecture if kind in SERVED else f"{kind}ForCausalLM"
    window = {"sliding_window": None} if kind == "mistral" else {}
    return SHAPE | {"model_type": kind, "architectures": [architecture]} | window | changed


def fields_of(folder: Path, config: dict[str, Any], ranks: int = 1, block_tokens: int = 64) -> dict[str, str]:
    """What is wrong with it; empty where it is served."""
    (folder / "config.json").write_text(json.dumps(config))
    try:
        assert served_config(str(folder), ranks, block_tokens) == config
    except EngineFault as error:
        return error.fields
    return {}


@pytest.mark.parametrize("kind", SERVED)
def test_family_is_served_when_it_is_plain(tmp_path: Path, kind: str) -> None:
    assert fields_of(tmp_path, config_of(kind)) == {}


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe"])
def test_folder_is_served_as_transformers_writes_it(tmp_path: Path, family: str) -> None:
    folder = tiny_models.build(family, tmp_path)
    assert served_config(str(folder), 2, 16)["model_type"] == family


@pytest.mark.parametrize(
    "kind",
    ["mamba2", "falcon_mamba", "rwkv", "recurrent_gemma", "lfm2", "minimax_text_01", "nemotron_h", "qwen3_next",
     "jamba", "gemma2", "gemma3", "gpt_oss", "phi3", "cohere2", "llama4", "deepseek_v3", "deepseek_v32", "bert", "t5",
     "gpt2", "no_such_type"],
)  # fmt: skip
def test_other_family_is_refused_by_name(tmp_path: Path, kind: str) -> None:
    assert fields_of(tmp_path, config_of(kind)) == {
        "field": "model_type",
        "value": kind,
        "limit": "llama, mistral, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe",
    }


@pytest.mark.parametrize("value", [None, ["llama"], {}])
def test_model_is_refused_when_it_names_no_family(tmp_path: Path, value: object) -> None:
    assert fields_of(tmp_path, config_of("llama", model_type=value))["field"] == "model_type"


@pytest.mark.parametrize("names", [None, [], ["LlamaForSequenceClassification"], ["LlamaForCausalLM", "Other"], "x"])
def test_model_is_refused_when_its_class_is_not_the_family_s(tmp_path: Path, names: object) -> None:
    found = fields_of(tmp_path, config_of("llama", architectures=names))
    assert found == {"field": "architectures", "value": str(names), "limit": "LlamaForCausalLM"}


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss", "phi3", "cohere2", "mistral", "mixtral", "llama"])
@pytest.mark.parametrize("window", [128, POSITIONS - 1, 0, "128"])
def test_window_is_refused_by_name_whatever_the_family(tmp_path: Path, kind: str, window: object) -> None:
    found = fields_of(tmp_path, config_of(kind, sliding_window=window))
    assert found == {"field": "sliding_window", "value": str(window), "limit": str(POSITIONS)}


@pytest.mark.parametrize("key", ["attention_chunk_size", "attention_window_size", "interleaved_sliding_window",
                                 "sliding_window_size", "window_size"])  # fmt: skip
def test_window_is_refused_by_name_whatever_its_key(tmp_path: Path, key: str) -> None:
    found = fields_of(tmp_path, config_of("llama", **{key: 128}))
    assert found == {"field": key, "value": "128", "limit": str(POSITIONS)}


@pytest.mark.parametrize("window", [POSITIONS, POSITIONS + 1])
def test_window_is_none_when_no_prompt_is_longer(tmp_path: Path, window: int) -> None:
    assert fields_of(tmp_path, config_of("mistral", sliding_window=window)) == {}
    assert fields_of(tmp_path, config_of("qwen2", sliding_window=window, use_sliding_window=True)) == {}


def test_window_counts_only_when_it_is_switched_on_where_there_is_a_switch(tmp_path: Path) -> None:
    assert fields_of(tmp_path, config_of("qwen2", sliding_window=128)) == {}
    assert fields_of(tmp_path, config_of("qwen2", sliding_window=128, use_sliding_window=False)) == {}
    on = config_of("qwen2", sliding_window=128, use_sliding_window=True, max_window_layers=3)
    assert fields_of(tmp_path, on)["field"] == "sliding_window"
    no_switch = config_of("mistral", sliding_window=128, use_sliding_window=False)
    assert fields_of(tmp_path, no_switch)["field"] == "sliding_window"


@pytest.mark.parametrize(("kind", "changed"), [("mistral", {}), ("qwen3", {"use_sliding_window": True})])
def test_window_is_the_family_s_when_none_is_told(tmp_path: Path, kind: str, changed: dict[str, object]) -> None:
    config = config_of(kind, max_position_embeddings=8192, **changed)
    config.pop("sliding_window", None)
    assert fields_of(tmp_path, config) == {"field": "sliding_window", "value": "4096", "limit": "8192"}


@pytest.mark.parametrize(
    ("kinds", "value"),
    [
        (["full_attention", "sliding_attention"], "sliding_attention"),
        (["linear_attention", "full_attention", "chunked_attention"], "chunked_attention, linear_attention"),
        ("sliding_attention", "sliding_attention"),
        ([{"kind": "full"}], "{'kind': 'full'}"),
    ],
)
def test_layers_are_refused_by_kind(tmp_path: Path, kinds: object, value: str) -> None:
    found = fields_of(tmp_path, config_of("qwen3", layer_types=kinds))
    assert found == {"field": "layer_types", "value": value, "limit": "full_attention"}


def test_layers_are_served_when_all_attend_fully(tmp_path: Path) -> None:
    assert fields_of(tmp_path, config_of("qwen3", layer_types=["full_attention"] * 5)) == {}


def test_window_is_refused_by_name_when_it_is_a_nested_model_s(tmp_path: Path) -> None:
    config = {"model_type": "gemma3", "text_config": config_of("gemma3_text", sliding_window=512)}
    found = fields_of(tmp_path, config)
    assert found == {"field": "text_config.sliding_window", "value": "512", "limit": str(POSITIONS)}


@pytest.mark.parametrize(
    ("changed", "ranks", "message"),
    [
        ({}, 3, "num_attention_heads = 4 cannot be split over 3 ranks"),
        ({}, 4, "num_key_value_heads = 2 cannot be split over 4 ranks"),
        ({"num_key_value_heads": None}, 8, "num_attention_heads = 4 cannot be split over 8 ranks"),
    ],
)
def test_ranks_are_refused_when_heads_do_not_divide(
    tmp_path: Path, changed: dict[str, object], ranks: int, message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("llama", **changed)))
    with pytest.raises(EngineFault, match=message) as caught:
        served_config(str(tmp_path), ranks, 64)
    assert (caught.value.fields["field"], caught.value.fields["value"]) == ("ranks", str(ranks))


def test_ranks_are_served_when_heads_divide(tmp_path: Path) -> None:
    assert fields_of(tmp_path, config_of("llama"), ranks=2) == {}
    assert fields_of(tmp_path, config_of("llama", num_key_value_heads=None), ranks=4) == {}


@pytest.mark.parametrize("heads", [0, "4", None])
def test_model_is_refused_when_its_heads_are_no_number(tmp_path: Path, heads: object) -> None:
    assert fields_of(tmp_path, config_of("llama", num_attention_heads=heads))["field"] == "num_attention_heads"


def test_daemon_refuses_what_it_cannot_serve_before_it_looks_for_the_package(tmp_path: Path) -> None:
    """What could never load would else be tried at every join, and told to nobody who starts it."""
    (tmp_path / "config.json").write_text(json.dumps(config_of("gemma2", sliding_window=128)))
    settings = StageSettings(0, 1, str(tmp_path), "trtllm", device="cpu")
    with pytest.raises(EngineFault) as caught:
        equip(settings, "127.0.0.1")
    assert caught.value.fields["field"] == "sliding_window"


@pytest.mark.parametrize("block_tokens", [3, 24, 48, 100, 1000])
def test_block_size_is_refused_when_it_is_no_power_of_two(tmp_path: Path, block_tokens: int) -> None:
    found = fields_of(tmp_path, config_of("llama"), block_tokens=block_tokens)
    assert found == {"field": "block_tokens", "value": str(block_tokens), "limit": "a power of two"}


# --- what all must say alike --------------------------------------------------------------------------------


def places(*said: dict[str, str]) -> tuple[PlainStore, EnginePlan]:
    """A store in which each of two ranks of each stage has told its terms."""
    store = PlainStore()
    for place, terms in enumerate(said):
        tell_terms(store, place, terms)
    return store, EnginePlan("model", 0, len(said) // 2, 0, 1, 64, 32, 256, 8, ranks=2)


def test_load_goes_on_when_all_say_the_same() -> None:
    terms = {"dtype": "bfloat16", "tensorrt_llm": "1.4.0rc4"}
    store, plan = places(*[terms] * 4)
    compare_terms(store, plan, terms)


@pytest.mark.parametrize(("field", "value", "other"), [("dtype", "float16", "bfloat16"),
                                                       ("tensorrt_llm", "1.3.0rc26", "1.4.0rc4")])  # fmt: skip
def test_load_is_refused_on_every_place_when_one_says_otherwise(field: str, value: str, other: str) -> None:
    terms = {"dtype": "float16", "tensorrt_llm": "1.3.0rc26"}
    changed = terms | {field: other}
    store, plan = places(terms, terms, terms, changed)
    for own in (terms, changed):
        with pytest.raises(EngineFault) as caught:
            compare_terms(store, plan, own)
        assert caught.value.fields == {"field": field, "value": other, "limit": value}
        expected = f"all must load with one {field}: stage 0 rank 0 has {value}, stage 1 rank 1 {other}"
        assert caught.value.message == expected


def test_stages_do_not_load_together_when_one_was_given_another_dtype() -> None:
    """Before anything collective: no process group is left behind."""
    host = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = StageGroup(1, ((0, 3), (3, 5)), (32, 32), "1.1", f"127.0.0.1:{host.port}", timeout_s=60.0)

    def meet(stage: int) -> EngineFault:
        plan = EnginePlan("model", stage, 2, *group.bands[stage], 64, 32, 256, 8, group=group)
        with pytest.raises(EngineFault) as caught:
            Meeting(plan, "gloo", {"dtype": ("float16", "bfloat16")[stage]})
        return caught.value

    with ThreadPoolExecutor(2) as stages:
        faults = list(stages.map(meet, range(2)))
    assert [fault.fields for fault in faults] == [{"field": "dtype", "value": "bfloat16", "limit": "float16"}] * 2
    assert not dist.is_initialized()


def test_record_tells_dtype_width_and_package_of_a_stage(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("llama", torch_dtype="torch.float16")))
    told = Numerics("float16", 2 * 64, "", f"wavepp {__version__}, tensorrt_llm 1.3.0rc26")
    assert numerics(str(tmp_path), "auto", "1.3.0rc26") == told
    assert numerics(str(tmp_path), "bfloat16", "1.3.0rc26").dtype == "bfloat16"


@pytest.mark.parametrize("name", ["config.json", "hf_quant_config.json"])
def test_quantisation_is_told_wherever_a_folder_keeps_it(tmp_path: Path, name: str) -> None:
    """It may stand in a file that is in no fingerprint."""
    found = set()
    for algorithm in ("FP8", "NVFP4"):
        (tmp_path / "config.json").write_text(json.dumps(config_of("llama")))
        quantised = {"quantization_config": {"quant_algo": algorithm}}
        (tmp_path / name).write_text(json.dumps(config_of("llama") | quantised))
        found.add(numerics(str(tmp_path), "auto", "1").quantization)
    assert len(found) == 2
    assert "" not in found
