"""Attention over the pages that the page table names: a wrong page is a wrong answer.

Owns the one function that transformers' attention modules call, and what it needs to know of the
batch. New keys and values go to the pages first; then every row reads all of its own back, from
position 0 to the end of its chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor
from transformers import AttentionInterface

ATTENTION = "fake_trtllm_paged"


@dataclass(frozen=True)
class Row:
    rows: slice
    """Of the batch."""
    start: int
    end: int
    """Positions [start, end) of its prompt."""


@dataclass(frozen=True)
class AttentionMetadata:
    """Of one forward."""

    rows: tuple[Row, ...]
    table: Tensor
    """int32 [pools, rows, key or value, blocks]."""
    pages: Tensor
    """float32 [pages, tokens_per_block, heads, head_dim]."""
    tokens_per_block: int
    layer_offsets: dict[int, int]
    tp: TensorParallel


class TensorParallel:
    """Splits heads over the ranks of a stage; alone, does nothing."""

    def mine(self, heads: Tensor) -> Tensor:
        """[1, heads, tokens, d]: this rank's heads."""
        return heads

    def all(self, heads: Tensor) -> Tensor:
        """[1, tokens, heads, d]: every rank's, in order."""
        return heads


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attn_metadata: AttentionMetadata,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """All tensors [1, heads, tokens, d], all rows of the batch; returns [1, tokens, heads, d]."""
    layer: Any = module.layer_idx
    tp = attn_metadata.tp
    query, key, value = tp.mine(query), tp.mine(key), tp.mine(value)
    out = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
    for index, row in enumerate(attn_metadata.rows):
        keys, values = (
            _write_and_read(attn_metadata, index, row, layer, offset, new[0, :, row.rows].transpose(0, 1))
            for offset, new in enumerate((key, value))
        )
        mask = torch.ones(row.end - row.start, row.end, dtype=torch.bool).tril(row.start)
        attended = functional.scaled_dot_product_attention(
            query[:, :, row.rows], keys, values, attn_mask=mask, scale=scaling, enable_gqa=True
        )
        out[:, row.rows] = attended.transpose(1, 2)
    return tp.all(out), None


def _write_and_read(batch: AttentionMetadata, index: int, row: Row, layer: int, offset: int, new: Tensor) -> Tensor:
    """Store `new` [length, heads, d] at the row's positions; read all positions, [1, heads, end, d]."""
    size = batch.tokens_per_block
    numbers = batch.table[0, index, offset, : -(-row.end // size)].long() + 2 * batch.layer_offsets[layer]
    if int(numbers.min()) < 0:
        raise RuntimeError("the page table has no page for a position that is to be computed")
    where = torch.arange(row.start, row.end)
    batch.pages[numbers[where // size], where % size] = new
    everything = batch.pages[numbers].flatten(0, 1)[: row.end]
    return everything.transpose(0, 1)[None]


AttentionInterface.register(ATTENTION, paged_attention)
