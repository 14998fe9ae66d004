"""What a controller must know of a model folder before a TensorRT-LLM stage serves it.

Reads the configuration alone, with neither torch nor TensorRT-LLM: a daemon registers before it loads. What is not
served, `served.py` refuses.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wavepp_proto import __version__
from wavepp_proto.terms import ModelFacts, Numerics
from wavepp_stage.engine.torch.facts import fingerprint, is_regular, positive, read_config, read_json

AUTO = "auto"
"""The dtype that the model's configuration tells."""
PARTS = 2
"""An activation row is [hidden | residual]."""
QUANTIZATION_NAME = "hf_quant_config.json"
_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def model_facts(path: str) -> ModelFacts:
    """Raises EngineFault naming the field when the folder is no model."""
    folder = Path(path).expanduser()
    config = read_config(folder)
    sizes = [positive(config, key) for key in ("num_hidden_layers", "vocab_size", "max_position_embeddings")]
    return ModelFacts(
        name=path,
        fingerprint=fingerprint(folder, config),
        layers=sizes[0],
        vocabulary=sizes[1],
        window=sizes[2],
        path=str(folder.resolve()),
        recurrent_layers=(),
    )


def told_dtype(config: Mapping[str, Any], dtype: str) -> str:
    """What `dtype` comes to: `auto` is what the configuration tells, as far as it tells any."""
    told = config.get("dtype") or config.get("torch_dtype") or AUTO if dtype == AUTO else dtype
    return str(told).removeprefix("torch.")


def numerics(path: str, dtype: str, version: str) -> Numerics:
    """What a stage of the model folder at `path` computes with; `version` is the package's. Raises EngineFault naming
    the field."""
    folder = Path(path).expanduser()
    config = read_config(folder)
    return Numerics(
        dtype=told_dtype(config, dtype),
        hidden=PARTS * positive(config, "hidden_size"),
        quantization=_quantization(folder, config),
        packages=f"wavepp {__version__}, tensorrt_llm {version}",
    )


def _quantization(folder: Path, config: Mapping[str, Any]) -> str:
    """Digest of what the folder tells of it, in either place where TensorRT-LLM looks; empty for plain tensors."""
    file = folder / QUANTIZATION_NAME
    apart = read_json(file) if is_regular(file) else None
    told = [one for one in (config.get("quantization_config"), apart) if one]
    if not told:
        return ""
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def host_block_bytes(config: Mapping[str, Any], layers: int, ranks: int, block_tokens: int, dtype: str) -> int:
    """About what one block of `layers` layers takes, to size a host tier in bytes; the manager rounds for itself."""
    heads = int(config.get("num_key_value_heads") or positive(config, "num_attention_heads"))
    width = config.get("head_dim") or positive(config, "hidden_size") // positive(config, "num_attention_heads")
    own = -(-heads // ranks)
    return 2 * layers * own * int(width) * _DTYPE_BYTES.get(dtype, 2) * block_tokens
