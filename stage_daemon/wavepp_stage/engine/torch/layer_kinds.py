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


def refuse(field: str, value: object, why: str) -> EngineFault:
    return EngineFault(f"the torch engine does not serve {field} = {value}: {why}", field=field, value=str(value))


def layer_kinds(config: Mapping[str, Any]) -> tuple[str, ...]:
    """ATTENTION or RECURRENT per layer, in layer order.

    Raises EngineFault naming `model_type`, `layer_types` or `sliding_window` where a layer is of another kind."""
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        raise refuse("model_type", model_type, f"it serves {', '.join(sorted(MODEL_TYPES))}")
    layers: int = config["num_hidden_layers"]
    kinds = config.get("layer_types")
    if kinds is None:
        _check_window(config)
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
    """A model that names no layer types slides in every layer, or in none."""
    window = config.get("sliding_window")
    # The families that have the switch leave it off; Mistral has none and slides wherever a window is set.
    used = config.get("use_sliding_window", config.get("model_type") == "mistral")
    if used and window is not None and window < config.get("max_position_embeddings", 0):
        raise refuse("sliding_window", window, "every layer must attend to the whole prefix")
