"""Tiny random models, one folder per family, as a user's model folder would look.

Owns their shapes: small enough for a second on one core, and unfriendly on purpose (five layers,
grouped heads, a dense layer among experts, several shards; a hybrid of eight layers). Used by tests and
benches of the torch engine; the folders live in a temporary directory of the test session.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)
from transformers.utils import logging

_LOGGING: Any = logging
_LOGGING.disable_progress_bar()
_FACTORY: Any = AutoModelForCausalLM  # its classmethods carry no types
LAYERS = 5
HYBRID_LAYERS = 8
"""Of qwen3_next: layers 3 and 7 attend, the others are recurrent."""
VOCABULARY = 512
WINDOW = 2048
_COMMON: dict[str, Any] = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": WINDOW,
    # Wide enough that logits of different prompts differ visibly.
    "initializer_range": 0.08,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _moe(tied: bool) -> PretrainedConfig:
    experts: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    experts |= {"head_dim": 16, "mlp_only_layers": [1]}
    return Qwen3MoeConfig(**_COMMON, **experts, tie_word_embeddings=tied)


def _hybrid(tied: bool) -> PretrainedConfig:
    experts: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    experts |= {"shared_expert_intermediate_size": 32, "mlp_only_layers": [1]}
    recurrence: dict[str, Any] = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    recurrence |= {"linear_key_head_dim": 16, "linear_value_head_dim": 24, "linear_conv_kernel_dim": 4}
    common = _COMMON | {"num_hidden_layers": HYBRID_LAYERS, "head_dim": 24}
    return Qwen3NextConfig(**common, **experts, **recurrence, tie_word_embeddings=tied)


def layers_of(family: str) -> int:
    return HYBRID_LAYERS if family == "qwen3_next" else LAYERS


FAMILIES: dict[str, Callable[[bool], PretrainedConfig]] = {
    "llama": lambda tied: LlamaConfig(**_COMMON, tie_word_embeddings=tied),
    "mistral": lambda tied: MistralConfig(**_COMMON, sliding_window=None, tie_word_embeddings=tied),
    "qwen2": lambda tied: Qwen2Config(**_COMMON, tie_word_embeddings=tied),
    "qwen3": lambda tied: Qwen3Config(**_COMMON, head_dim=24, tie_word_embeddings=tied),
    "qwen3_moe": _moe,
    "qwen3_next": _hybrid,
}


def build(family: str, root: Path, *, tied: bool = False, sharded: bool = False, seed: int = 0) -> Path:
    """The folder of a family's random model below `root`, made at the first call (safe across processes)."""
    name = f"{family}-{'tied' if tied else 'untied'}{'-sharded' if sharded else ''}-{seed}"
    return save_random(FAMILIES[family](tied), root / name, shard="200KB" if sharded else "1GB", seed=seed)


def save_random(config: PretrainedConfig, folder: Path, *, shard: str = "1GB", seed: int = 0) -> Path:
    """A random float32 model of `config`, saved as `folder`; returns the folder."""
    if not folder.exists():
        staging = folder.with_name(f".{folder.name}.{os.getpid()}")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = _FACTORY.from_config(config, dtype=torch.float32)
            _remember_long(model)
        model.save_pretrained(staging, max_shard_size=shard)
        try:
            staging.rename(folder)
        except OSError:
            if not folder.exists():  # otherwise another process of the session was first
                raise
    return folder


def _remember_long(model: torch.nn.Module) -> None:
    """Slow decays: a random recurrence forgets within a few tokens, and a lost state would not show."""
    for name, parameter in model.named_parameters():
        if name.endswith(".A_log"):
            parameter.data.uniform_(0.0005, 0.05).log_()


@functools.cache
def unsplit(folder: Path) -> Any:
    """The whole model, by transformers alone: what every answer is compared with."""
    return _FACTORY.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def unsplit_logits(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """Last-position logits of the unsplit model, float32 [vocabulary]."""
    logits: torch.Tensor = unsplit(folder)(torch.tensor([token_ids]), logits_to_keep=1).logits
    return logits[0, -1].float()
