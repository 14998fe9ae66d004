"""What a controller must know of a model folder before a TensorRT-LLM stage serves it.

Reads the configuration alone, with neither torch nor TensorRT-LLM: a daemon registers before it loads. What is not
served, `served.py` refuses.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wavepp_proto.errors import EngineFault
from wavepp_proto.terms import ModelFacts
from wavepp_stage.engine.torch.facts import fingerprint, read_config

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def model_facts(path: str) -> ModelFacts:
    """Raises EngineFault naming the field when the folder is no model."""
    folder = Path(path).expanduser()
    config = read_config(folder)
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


def positive(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or value < 1:
        raise EngineFault(f"config.json has no usable {key}", field=key, value=repr(value))
    return value


def host_block_bytes(config: Mapping[str, Any], layers: int, ranks: int, block_tokens: int, dtype: str) -> int:
    """About what one block of `layers` layers takes, to size a host tier in bytes; the manager rounds for itself."""
    heads = int(config.get("num_key_value_heads") or positive(config, "num_attention_heads"))
    width = config.get("head_dim") or positive(config, "hidden_size") // positive(config, "num_attention_heads")
    own = -(-heads // ranks)
    return 2 * layers * own * int(width) * _DTYPE_BYTES.get(dtype, 2) * block_tokens
