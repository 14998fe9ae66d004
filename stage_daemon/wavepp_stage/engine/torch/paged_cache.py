"""The paged key/value cache of one stage: memory, and the arithmetic from blocks to rows of it.

Per layer K and V are one tensor [blocks, B, kv_heads, head_dim], allocated at load and never again.
Which block holds what is the cache manager's business; this file only writes and reads the slots
that a wave names. A slot is `block * B + offset`: a row of the flat view [blocks * B, ...].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class PagedCache:
    """Keys and values of the attention layers of one band, addressed by global layer number."""

    def __init__(
        self,
        layers: Sequence[int],
        *,
        blocks: int,
        block_tokens: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers = tuple(layers)
        self.blocks = blocks
        self.block_tokens = block_tokens
        shape = (blocks, block_tokens, kv_heads, head_dim)

        def pool() -> Tensor:
            # Filled, not only reserved: memory that is missing fails the load, not a wave.
            return torch.empty(shape, dtype=dtype, device=device).zero_()

        self._keys = {layer: pool() for layer in layers}
        self._values = {layer: pool() for layer in layers}

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers of the band, K and V."""
        return sum(pool[0].numel() * pool.element_size() for pool in self.pools)

    @property
    def pools(self) -> list[Tensor]:
        """All storage, [blocks, B, kv_heads, head_dim] each: K of every layer, then V of every layer."""
        return [*self._keys.values(), *self._values.values()]

    def tensors(self, layer: int) -> tuple[Tensor, Tensor]:
        """(K, V) of one layer, [blocks, B, kv_heads, head_dim]; the storage itself."""
        return self._keys[layer], self._values[layer]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store new rows. `slots` int64 [tokens]; `keys`, `values` [tokens, kv_heads, head_dim]."""
        self._keys[layer].flatten(0, 1).index_copy_(0, slots, keys)
        self._values[layer].flatten(0, 1).index_copy_(0, slots, values)

    def rows(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """What lies in these slots: K, V [tokens, kv_heads, head_dim], copied."""
        keys, values = self._keys[layer].flatten(0, 1), self._values[layer].flatten(0, 1)
        return keys.index_select(0, slots), values.index_select(0, slots)

    def clear(self, slots: Tensor) -> None:
        """Zero these slots in every layer."""
        for pool in self.pools:
            pool.flatten(0, 1).index_fill_(0, slots, 0)

    def read(self, layer: int, table: BlockRun | Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """First `tokens` positions of the sequence whose blocks are `table`: K, V [tokens, kv_heads, head_dim].

        A run of consecutive blocks is read in place; scattered blocks (int64 [n]) are gathered."""
        keys, values = self._keys[layer], self._values[layer]
        if isinstance(table, BlockRun):
            keys, values = keys[table.first : table.end], values[table.first : table.end]
        else:
            keys, values = keys.index_select(0, table), values.index_select(0, table)
        return keys.flatten(0, 1)[:tokens], values.flatten(0, 1)[:tokens]


class BlockRun:
    """Consecutive blocks [first, end)."""

    __slots__ = ("end", "first")

    def __init__(self, first: int, end: int) -> None:
        self.first = first
        self.end = end
