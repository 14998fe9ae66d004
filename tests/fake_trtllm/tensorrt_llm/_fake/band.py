"""A Hugging Face model of which one rank runs its layers only.

Owns the split: everything outside the band is dropped after loading. Between stages two tensors
travel, `hidden` and `residual`, whose sum is the stream; each alone is wrong, and the sum is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from .._torch.distributed import communicator
from ..mapping import Mapping
from .paged_attention import ATTENTION, AttentionMetadata
from .tensor_parallel import tensor_parallel

_FACTORY: Any = AutoModelForCausalLM
_LOGGING: Any = logging
_LOGGING.disable_progress_bar()


@dataclass(frozen=True)
class PretrainedConfig:
    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    max_position_embeddings: int
    torch_dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class ModelConfig:
    pretrained_config: PretrainedConfig


class Band(nn.Module):
    def __init__(self, folder: str, mapping: Mapping) -> None:
        super().__init__()
        self.mapping = mapping
        model = _FACTORY.from_pretrained(folder, dtype=torch.float32, attn_implementation=ATTENTION).eval()
        self.config: Any = model.config
        layers: Any = model.model.layers
        config = self.config
        self.model_config = ModelConfig(
            PretrainedConfig(config.hidden_size, len(layers), config.vocab_size, config.max_position_embeddings)
        )
        self.numbers = mapping.pp_layers(len(layers))
        self.layers = nn.ModuleList([layers[number] for number in self.numbers])
        self.rotary = model.model.rotary_emb
        self.embedding = model.get_input_embeddings() if mapping.is_first_pp_rank() else None
        self.norm = model.model.norm if mapping.is_last_pp_rank() else None
        self.lm_head = model.lm_head if mapping.is_last_pp_rank() else None
        self.tp = tensor_parallel(mapping)
        self.requires_grad_(False)

    @property
    def kv_heads(self) -> int:
        return int(self.config.num_key_value_heads)

    @property
    def head_dim(self) -> int:
        return int(getattr(self.config, "head_dim", None) or self.config.hidden_size // self.config.num_attention_heads)

    def forward(self, input_ids: Tensor, position_ids: Tensor, attn_metadata: AttentionMetadata) -> Tensor:
        """[tokens] ids to [rows, vocabulary] on the last rank; a placeholder of that shape on the others."""
        hidden = self._receive(input_ids)[None]
        positions = position_ids[None]
        rotary = self.rotary(hidden, position_ids=positions)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=None, position_ids=positions, position_embeddings=rotary,
                           attn_metadata=attn_metadata)  # fmt: skip
        if self.norm is None or self.lm_head is None:
            self._send(hidden[0])
            return torch.full((len(attn_metadata.rows), self.config.vocab_size), float("nan"))
        lasts = torch.tensor([row.rows.stop - 1 for row in attn_metadata.rows])
        logits: Tensor = self.lm_head(self.norm(hidden[0, lasts]))
        return logits

    def _receive(self, input_ids: Tensor) -> Tensor:
        if self.embedding is not None:
            embedded: Tensor = self.embedding(input_ids)
            return embedded
        hidden = torch.full((len(input_ids), self.config.hidden_size), float("nan"))
        residual = torch.full_like(hidden, float("nan"))
        communicator.pp_recv(hidden)
        communicator.pp_recv(residual)
        return hidden + residual

    def _send(self, stream: Tensor) -> None:
        # Cutting the mantissa in two keeps both parts representable: their sum is the stream to the last bit.
        hidden = stream.bfloat16().float()
        communicator.pp_send(hidden)
        communicator.pp_send(stream - hidden)
