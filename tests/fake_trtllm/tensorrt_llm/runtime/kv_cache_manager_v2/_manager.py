"""The manager of one rank's cache: pools, tree, sequences.

Owns how a tier's bytes become slots, and which layer lies where in a slot. `create_kv_cache` claims
exactly what the tokens given match; nothing here decides what is run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..._fake import knobs
from ..._fake.owner import Owner, owned
from ._common import GPU_LEVEL, CacheTier, LogicError, ReuseScope, Tokens, block_key, root_key
from ._config import AttentionLayerConfig, KVCacheManagerConfig, LayerConfig, SsmLayerConfig
from ._event_manager import KVCacheEventManager
from ._sequence import _KVCache
from ._storage import Storage, StorageStatistics
from ._tree import Match, RadixTree


class KVCacheManager:
    def __init__(self, config: KVCacheManagerConfig, event_manager: KVCacheEventManager | None = None) -> None:
        self.owner = Owner()
        self._config = config
        for layer in config.layers:
            if isinstance(layer, AttentionLayerConfig) and layer.sliding_window_size is not None:
                raise NotImplementedError("sliding windows: not part of this stand-in")
        attention = [layer for layer in config.layers if isinstance(layer, AttentionLayerConfig)]
        recurrent = [layer for layer in config.layers if isinstance(layer, SsmLayerConfig)]
        self.attention_group = 0 if attention else None
        self.recurrent_group = (1 if attention else 0) if recurrent else None
        self._groups: list[list[LayerConfig]] = [[*group] for group in (attention, recurrent) if group]
        sizes = [sum(buffer.size for layer in group for buffer in layer.buffers) for group in self._groups]
        shares = config.initial_pool_ratio or [1 / len(sizes)] * len(sizes)
        slots = [
            [int(tier.quota * share) // size for size, share in zip(sizes, shares, strict=True)]
            for tier in config.cache_tiers
        ]
        self.storage = Storage(slots, sizes)
        self.event_manager = event_manager
        self.tree = RadixTree(
            self.storage, config.tokens_per_block, self.attention_group, self.recurrent_group, event_manager
        )
        self._living: set[_KVCache] = set()

    # --- sequences -------------------------------------------------------------------------------

    @owned
    def create_kv_cache(
        self,
        reuse_scope: ReuseScope | None = None,
        input_tokens: Tokens | None = None,
        id: Any = None,
        custom_priority_callback: Callable[[int, Any], int] | None = None,
        expected_prompt_length: int | None = None,
        text_only: bool | None = None,
        enable_request_stats: bool = False,
    ) -> _KVCache:
        """A suspended sequence that holds the longest match of exactly these tokens."""
        match = self._match(reuse_scope, input_tokens) if input_tokens is not None else None
        made = _KVCache(self, reuse_scope or ReuseScope(), match, id, custom_priority_callback,
                        expected_prompt_length, text_only, enable_request_stats)  # fmt: skip
        self._living.add(made)
        return made

    def _match(self, scope: ReuseScope | None, tokens: Tokens) -> Match:
        return self.tree.match(scope or ReuseScope(), tokens, self._config.enable_partial_reuse)

    @owned
    def probe_reuse(self, reuse_scope: ReuseScope | None = None, input_tokens: Tokens | None = None) -> int:
        """Tokens that could be reused now; nothing is held."""
        return self._match(reuse_scope, input_tokens if input_tokens is not None else ()).num_tokens

    def closed(self, sequence: _KVCache) -> None:
        self._living.discard(sequence)

    def refuses_resume(self) -> bool:
        utilization = self.storage.utilization(GPU_LEVEL)
        return knobs.strikes("REFUSE_RESUME") or utilization > self._config.max_util_for_resume

    def _check_nobody(self, call: str) -> None:
        if self._living:
            raise LogicError(f"{call} with {len(self._living)} KV cache(s) still open")

    @owned
    def clear_reusable_blocks(self) -> None:
        self._check_nobody("clear_reusable_blocks()")
        self.tree.clear()

    @owned
    def shutdown(self) -> None:
        self._check_nobody("shutdown()")
        self.tree.clear()

    # --- memory ----------------------------------------------------------------------------------

    def group_memory(self, group: int) -> torch.Tensor:
        """uint8 [slots, bytes per slot] of the device level: all layers of the group beside each other."""
        return self.storage.levels[GPU_LEVEL][group].memory

    def get_layer_group_id(self, layer_id: int) -> int:
        return next(
            index for index, group in enumerate(self._groups) if any(layer.layer_id == layer_id for layer in group)
        )

    # --- facts -----------------------------------------------------------------------------------

    @property
    def tokens_per_block(self) -> int:
        return self._config.tokens_per_block

    @property
    def layer_grouping(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(layer.layer_id for layer in group) for group in self._groups)

    @property
    def cache_tier_list(self) -> tuple[CacheTier, ...]:
        return tuple(tier.tier for tier in self._config.cache_tiers)

    @property
    def enable_partial_match(self) -> bool:
        return self._config.enable_partial_reuse

    @property
    def allow_seq_rebasing(self) -> bool:
        return True

    def get_quota(self, cache_level: int) -> int:
        return self._config.cache_tiers[cache_level].quota

    if knobs.is_rc26():

        @owned
        def get_storage_statistics(self, cache_level: int) -> list[StorageStatistics]:
            return self.storage.statistics(cache_level)


def sequence_to_blockchain_keys(
    tokens_per_block: int, reuse_scope: ReuseScope, tokens: Sequence[int]
) -> Iterator[tuple[list[int], bytes]]:
    """The namespace's own key, with no tokens; then (tokens, key) of every block, the shorter last one included."""
    key = root_key(reuse_scope)
    yield [], key
    for start in range(0, len(tokens), tokens_per_block):
        block = [int(token) for token in tokens[start : start + tokens_per_block]]
        key = block_key(key, block)
        yield block, key
