"""Which models the trtllm engine takes, and how they may be cut.

Owns every refusal that configuration alone decides: what could never load is told when a daemon starts, not by a join
that is tried over and over. Reads config.json, with neither torch nor TensorRT-LLM. Called by a daemon's start and
before every load; what the manager really made is looked at behind that (`load.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wavepp_proto.errors import EngineFault
from wavepp_stage.engine.torch.facts import positive, read_config


@dataclass(frozen=True, slots=True)
class Family:
    architecture: str
    """By which TensorRT-LLM chooses its class."""
    window: int | None = None
    """Sliding window of a configuration that names none, in tokens."""
    switched: bool = False
    """Whether `use_sliding_window`, off unless it is set, decides if there is one."""


SERVED: Mapping[str, Family] = {
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM", window=4096),
    "mixtral": Family("MixtralForCausalLM"),
    "qwen2": Family("Qwen2ForCausalLM", window=4096, switched=True),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", window=4096, switched=True),
    "qwen3": Family("Qwen3ForCausalLM", window=4096, switched=True),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", window=4096, switched=True),
}
"""By model_type: decoders whose every layer keeps keys and values of the whole prefix for each head, and hands hidden
states and residual on. Whatever else has a rule of reuse, a cache or an activation of its own (windows, recurrent
states, latent or sparse attention, encoders) is not here, and a family is added when somebody has looked at it."""
_ANYWHERE = Family("")
_WINDOWS = ("attention_chunk_size", "attention_window_size", "interleaved_sliding_window", "sliding_window_size",
            "window_size")  # fmt: skip
"""Under what other names configurations tell how far a layer looks back, in tokens."""
_DENSE = frozenset({"full_attention", "attention"})
_WHOLE = "every layer must attend to the whole prefix"


def served_config(model: str, ranks: int, block_tokens: int) -> dict[str, Any]:
    """config.json of the folder `model`. Raises EngineFault naming field, value and limit where this engine cannot
    serve it at all, or not in blocks of `block_tokens` over `ranks` daemons a stage."""
    config = read_config(Path(model).expanduser())
    _refuse_windows(config)
    _refuse_family(config)
    _refuse_split(config, ranks)
    if block_tokens & (block_tokens - 1):
        raise EngineFault(f"TensorRT-LLM has no blocks of {block_tokens} tokens", field="block_tokens",
                          value=block_tokens, limit="a power of two")  # fmt: skip
    return config


def _refuse_windows(config: Mapping[str, Any]) -> None:
    """Before the family, whose name would not say what is wrong. A window as long as the model's is none."""
    nested = config.get("text_config")
    parts = [("", config), ("text_config.", nested)] if isinstance(nested, dict) else [("", config)]
    for prefix, part in parts:
        positions = part.get("max_position_embeddings")
        for field, window in _windows(part):
            wide = isinstance(window, int) and isinstance(positions, int) and window >= positions
            if window is not None and not wide:
                raise _refusal(prefix + field, window, _WHOLE, positions)
        told = part.get("layer_types") or []
        kinds = {str(kind) for kind in (told if isinstance(told, list) else [told])}
        if not kinds <= _DENSE:
            raise _refusal(f"{prefix}layer_types", ", ".join(sorted(kinds - _DENSE)), _WHOLE, "full_attention")


def _windows(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """(field, tokens) of each that has an effect; None where there is none."""
    family = SERVED.get(str(config.get("model_type")), _ANYWHERE)
    if not family.switched or config.get("use_sliding_window"):
        yield "sliding_window", config.get("sliding_window", family.window)
    yield from ((field, config.get(field)) for field in _WINDOWS)


def _refuse_family(config: Mapping[str, Any]) -> None:
    kind = str(config.get("model_type"))
    if kind not in SERVED:
        raise _refusal("model_type", kind, "it takes decoders with full attention alone", ", ".join(SERVED))
    names, wanted = config.get("architectures"), SERVED[kind].architecture
    if names != [wanted]:
        raise _refusal("architectures", names, f"a {kind} model must be the plain one", wanted)


def _refuse_split(config: Mapping[str, Any], ranks: int) -> None:
    fields = ("num_attention_heads", "num_key_value_heads")
    for field in fields if config.get(fields[1]) is not None else fields[:1]:
        heads = positive(config, field)
        if heads % ranks:
            raise EngineFault(f"{field} = {heads} cannot be split over {ranks} ranks", field="ranks", value=ranks,
                              limit=f"a divisor of {heads}")  # fmt: skip


def _refusal(field: str, value: object, why: str, limit: object) -> EngineFault:
    return EngineFault(
        f"the trtllm engine does not serve {field} = {value}: {why}", field=field, value=str(value), limit=str(limit)
    )
