"""Which models are served, and which kind of cache each of their layers needs, from the configuration alone.

Owns the rule from config.json to layer kinds, and the refusal by name of every kind that no cache group
serves. Needs no torch: a daemon's start-up (`facts.py`) and the load (`model.py`) apply the same rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wavepp_proto.errors import EngineFault

ATTENTION = "full_attention"
RECURRENT = "linear_attention"
RECURRENT_MODEL_TYPES = frozenset({"qwen3_next"})
"""Whose linear attention layers `gated_delta` carries on from a stored state."""
MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3", "qwen3_moe"}) | RECURRENT_MODEL_TYPES
"""Rotary positions; every other layer attends densely, with one cache entry per token."""
_FULL_ATTENTION_INTERVAL = 4
"""What Qwen3-Next means where its configuration names neither layer types nor an interval."""


_SLIDES_EVERYWHERE = frozenset({"mistral", "qwen3_moe"})
"""Families whose layers all slide where a window is set; qwen2 and qwen3 name those that do, the others ignore it."""


def refuse(field: str, value: object, why: str) -> EngineFault:
    return EngineFault(f"the torch engine does not serve {field} = {value}: {why}", field=field, value=str(value))


def check_model_type(config: Mapping[str, Any]) -> str:
    """The family. Raises EngineFault naming `model_type` for one that is not served."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        raise refuse("model_type", model_type, f"it serves {', '.join(sorted(MODEL_TYPES))}")
    return model_type


def layer_kinds(config: Mapping[str, Any]) -> tuple[str, ...]:
    """ATTENTION or RECURRENT per layer, in layer order; `config` is transformers' reading, defaults filled in.

    Raises EngineFault naming `model_type`, `layer_types` or `sliding_window` where a layer is of another kind."""
    model_type = check_model_type(config)
    layers: int = config["num_hidden_layers"]
    _check_window(config)
    kinds = config.get("layer_types")
    if kinds is None:
        return _default_kinds(config, layers)
    if not isinstance(kinds, list | tuple) or len(kinds) != layers:
        raise refuse("layer_types", kinds, f"it must name {layers} layers")
    served = {ATTENTION}
    if model_type in RECURRENT_MODEL_TYPES:
        served.add(RECURRENT)
    if others := sorted({str(kind) for kind in kinds} - served):
        raise refuse("layer_types", others, f"it serves {', '.join(sorted(served))} in a {model_type}")
    return tuple(kinds)


def recurrent_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Global numbers of the layers with recurrent state, ascending. Raises as `layer_kinds` does."""
    return tuple(layer for layer, kind in enumerate(layer_kinds(config)) if kind == RECURRENT)


def _default_kinds(config: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    if config.get("model_type") not in RECURRENT_MODEL_TYPES:
        return (ATTENTION,) * layers
    interval = config.get("full_attention_interval", _FULL_ATTENTION_INTERVAL)
    if not isinstance(interval, int) or interval < 1:
        raise refuse("full_attention_interval", interval, "it must be a positive number of layers")
    return tuple(RECURRENT if (layer + 1) % interval else ATTENTION for layer in range(layers))


def _check_window(config: Mapping[str, Any]) -> None:
    window, positions = config.get("sliding_window"), config["max_position_embeddings"]
    if config["model_type"] not in _SLIDES_EVERYWHERE or config.get("use_sliding_window") is False or window is None:
        return
    if not isinstance(window, int) or window < positions:
        raise refuse("sliding_window", window, "every layer must attend to the whole prefix")
