"""What a controller must know of a model folder before a TensorRT-LLM stage serves it.

Owns the refusal by name of what this adapter does not serve. Reads the configuration alone, with neither torch nor
TensorRT-LLM: a daemon registers before it loads. The load looks again, at what the manager really made
(`compat.manager_kind`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wavepp_proto.errors import EngineFault
from wavepp_proto.terms import ModelFacts
from wavepp_stage.engine.torch.facts import fingerprint, read_config

_DENSE = frozenset({"full_attention", "attention"})
_RECURRENT_KEYS = ("hybrid_override_pattern", "mamba_d_state", "mamba_num_heads", "ssm_state_size",
                   "linear_num_key_heads", "linear_attn_config", "attn_layer_period")  # fmt: skip
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def model_facts(path: str) -> ModelFacts:
    """Raises EngineFault naming the field when the folder is no model, or one that is not served."""
    folder = Path(path).expanduser()
    config = read_config(folder)
    refuse_unserved(config)
    sizes = [positive(config, key) for key in ("num_hidden_layers", "vocab_size", "max_position_embeddings")]
    return ModelFacts(
        name=path,
        fingerprint=fingerprint(folder),
        layers=sizes[0],
        vocabulary=sizes[1],
        window=sizes[2],
        path=str(folder.resolve()),
        recurrent_layers=(),
    )


def refuse_unserved(config: Mapping[str, Any]) -> None:
    """Raises EngineFault where a layer's reuse is not that of dense attention."""
    kinds = config.get("layer_types")
    others = sorted({str(kind) for kind in kinds} - _DENSE) if isinstance(kinds, list | tuple) else []
    if others:
        raise _refusal("layer_types", others, "every layer must attend to the whole prefix")
    for key in _RECURRENT_KEYS:
        if config.get(key):
            raise _refusal(key, config[key], "recurrent states are reusable at snapshots only, which it does not take")
    window = config.get("sliding_window")
    slides = config.get("use_sliding_window", config.get("model_type") == "mistral")
    if slides and window is not None and window < config.get("max_position_embeddings", 0):
        raise _refusal("sliding_window", window, "every layer must attend to the whole prefix")


def _refusal(field: str, value: object, why: str) -> EngineFault:
    return EngineFault(f"the trtllm engine does not serve {field} = {value}: {why}", field=field, value=str(value))


def positive(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise EngineFault(f"config.json has no usable {key}", field=key, value=repr(value))
    return value


def host_block_bytes(config: Mapping[str, Any], layers: int, ranks: int, block_tokens: int) -> int:
    """About what one block of `layers` layers takes, to size a host tier in bytes; the manager rounds for itself."""
    heads = int(config.get("num_key_value_heads") or positive(config, "num_attention_heads"))
    width = config.get("head_dim") or positive(config, "hidden_size") // positive(config, "num_attention_heads")
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    own = -(-heads // ranks)
    return 2 * layers * own * int(width) * _DTYPE_BYTES.get(dtype, 2) * block_tokens
