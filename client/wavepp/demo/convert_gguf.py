"""Writes a GGUF file of a Llama-style model as a plain Hugging Face folder in bfloat16.

Runs as a process of its own (`python -m wavepp.demo.convert_gguf FILE FOLDER`), started by `smollm2.py`,
and prints one line a step. Owns nothing of where the folder lies or whether it is complete.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

KEPT = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_parameters",
    "attention_bias", "mlp_bias", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip
"""What makes the model. The rest of a loaded configuration tells of the GGUF file, and that it was quantized."""


def convert(source: Path, target: Path) -> None:
    """Read `source` and write weights, configuration, tokenizer and chat template into the folder `target`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    quiet: Any = logging
    quiet.disable_progress_bar()
    models: Any = AutoModelForCausalLM
    tokenizers: Any = AutoTokenizer

    say("reading tokenizer and chat template")
    tokenizers.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)
    say("dequantizing weights")
    loaded = models.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    say("writing weights as bfloat16")
    rebuild(loaded).save_pretrained(target)


def rebuild(loaded: Any) -> Any:
    """The same model without its past: a model loaded from GGUF refuses to be saved."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**{name: getattr(loaded.config, name) for name in KEPT})
    with torch.device("meta"):
        clean: Any = LlamaForCausalLM(config)
    clean.load_state_dict(loaded.state_dict(), assign=True)
    clean.tie_weights()
    return clean.to(torch.bfloat16)


def say(step: str) -> None:
    print(step, flush=True)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
