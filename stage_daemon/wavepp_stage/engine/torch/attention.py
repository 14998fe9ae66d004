"""Attention over the paged cache, plugged into transformers' own attention modules.

Owns the only part of a forward that is per request: the linear layers, norms and rotary embedding
run in transformers' modules over all rows of a wave at once, then call `paged_attention`, which
stores the new keys and values and attends each row to its own sequence. Registered under
`ATTENTION` when this file is imported; called by nobody else.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface

from wavepp_stage.engine.torch.batch import Span, WaveBatch
from wavepp_stage.engine.torch.finiteness import Finiteness
from wavepp_stage.engine.torch.paged_cache import PagedCache
from wavepp_stage.engine.torch.recurrent_states import RecurrentStates

ATTENTION = "wavepp_paged"
TILE = 128
"""Query rows per kernel call without a flash kernel. Such a kernel computes masked keys too, so a chunk cut
into tiles, each seeing only the keys up to its own last row, saves a third of a first chunk's attention."""


class CausalMask:
    """Additive masks for at most TILE queries that are the LAST positions of n keys.

    One buffer serves every shape, by its lower right corner:

        [ 0 ... 0 | 0 -inf -inf ]      rows: the last queries
        [ 0 ... 0 | 0   0  -inf ]      columns: the last keys
        [ 0 ... 0 | 0   0    0  ]
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._buffer = torch.empty(0, 0, dtype=dtype, device=device)

    def view(self, queries: int, keys: int) -> Tensor:
        """Shape [queries, keys], 1 <= queries <= min(TILE, keys)."""
        if keys > self._buffer.shape[-1]:
            self._buffer = self._build(max(keys, 2 * self._buffer.shape[-1], 2 * TILE))
        corner = self._buffer[TILE - queries :, self._buffer.shape[-1] - keys :]
        # A CUDA kernel may read several entries at once, from an address that must be a multiple of them.
        return corner.contiguous() if corner.is_cuda else corner

    def _build(self, width: int) -> Tensor:
        mask = self._buffer.new_zeros(TILE, width)
        mask[:, width - TILE :] = torch.full_like(mask[:, :TILE], float("-inf")).triu_(1)
        return mask


@dataclass(frozen=True, slots=True)
class WaveContext:
    """What attention and recurrent layers need beside the tensors; passed through the layers as a keyword."""

    batch: WaveBatch
    cache: PagedCache
    mask: CausalMask
    states: RecurrentStates
    finiteness: Finiteness


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    wave: WaveContext,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """`query` [1, heads, tokens, d], `key` and `value` [1, kv_heads, tokens, d], all rows of the wave.

    Returns [1, tokens, heads, d]. `attention_mask` is unused: causality follows from the spans."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    cache = wave.cache
    wave.finiteness.note(key, value)
    cache.write(layer, wave.batch.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
    out = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
    for span in wave.batch.spans:
        rows = slice(span.begin, span.end)
        if span.start == 0:
            keys, values = key[:, :, rows], value[:, :, rows]
        else:
            past = cache.read(layer, span.table, span.keys)
            keys, values = (tensor.transpose(0, 1)[None] for tensor in past)
        _attend(query[:, :, rows], keys, values, out[:, rows], wave.mask, span, scaling)
    return out, None


def _attend(
    query: Tensor, keys: Tensor, values: Tensor, out: Tensor, mask: CausalMask, span: Span, scale: float | None
) -> None:
    """Causal attention of one row's queries to its keys, written to `out` [1, length, heads, d]."""
    attention = functools.partial(functional.scaled_dot_product_attention, scale=scale, enable_gqa=True)
    length = span.end - span.begin
    if _flash(query, keys, values):
        causal = causal_lower_right(length, span.keys)
        out.copy_(attention(query, keys, values, attn_mask=causal).transpose(1, 2))
        return
    for begin in range(0, length, TILE):
        end = min(begin + TILE, length)
        seen = span.start + end
        tile = query[:, :, begin:end], keys[:, :, :seen], values[:, :, :seen]
        out[:, begin:end] = attention(*tile, attn_mask=mask.view(end - begin, seen)).transpose(1, 2)


def _flash(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether a kernel serves these that skips masked keys by itself: of half precision, on the GPUs that it knows.
    Elsewhere torch would write out a mask of all queries and keys, and all scores, for each row."""
    return query.is_cuda and can_use_flash_attention(SDPAParams(query, keys, values, None, 0.0, False, True))


AttentionInterface.register(ATTENTION, paged_attention)
