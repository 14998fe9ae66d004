"""The executor's cache manager, both versions in one: rows of the page table, requests, events, statistics.

Owns everything that the two versions share; the modules that the package exports add what differs.
Capacity is agreed on with all ranks when a manager is built, as are the host tier and the outcome.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch

from .._torch.distributed.communicator import Distributed, ReduceOp
from .._torch.pyexecutor.llm_request import LlmRequest
from .._torch.pyexecutor.resource_manager import BaseResourceManager
from .._torch.pyexecutor.scheduler import ScheduledRequests
from ..llmapi.llm_args import KvCacheConfig
from ..mapping import Mapping
from ..runtime.kv_cache_manager_v2 import (
    BAD_PAGE_INDEX,
    GPU_LEVEL,
    KVCacheEvent,
    KVCacheManager,
    ReuseScope,
    _KVCache,
)
from . import knobs
from .cache_plan import FLOAT_BYTES, agree, make_event_manager
from .owner import Owner, owned
from .rows import IndexMapper


@dataclass(frozen=True)
class KvCacheStats:
    max_num_blocks: int
    free_num_blocks: int
    used_num_blocks: int
    tokens_per_block: int


class CacheManagerBase(BaseResourceManager):
    def __init__(
        self,
        kv_cache_config: KvCacheConfig,
        kv_cache_type: Any = None,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        tokens_per_block: int,
        max_seq_len: int,
        max_batch_size: int,
        mapping: Mapping,
        dtype: Any = None,
        max_num_tokens: int = 8192,
        execution_stream: Any = None,
        num_reserved_index_slots: int = 1,
    ) -> None:
        if kv_cache_config.max_tokens is None:
            raise AssertionError(
                "Quota not set. Check kv_cache_config.max_tokens or kv_cache_config.max_gpu_total_bytes"
            )
        if kv_cache_config.block_reuse_config.policy != "all_reusable":
            raise NotImplementedError("only the policy that commits after every chunk is part of this stand-in")
        self.mapping = mapping
        self.pp_layers = mapping.pp_layers(num_layers)
        self.num_local_layers = len(self.pp_layers)
        self.layer_offsets = {layer: offset for offset, layer in enumerate(self.pp_layers)}
        self.num_kv_heads = -(-num_kv_heads // mapping.tp_size)
        self.head_dim = head_dim
        self.tokens_per_block = tokens_per_block
        self.kv_factor = 2
        self.num_extra_kv_tokens = knobs.number("EXTRA_KV_TOKENS") or 0
        self.enable_block_reuse = kv_cache_config.enable_block_reuse
        self.event_manager = make_event_manager(kv_cache_config, max_seq_len) if self._serves_events() else None
        config = agree(kv_cache_config, mapping, tokens_per_block, self.num_local_layers,
                       2 * self.num_kv_heads * head_dim * FLOAT_BYTES)  # fmt: skip
        self.impl = KVCacheManager(config, self.event_manager)
        Distributed.get(mapping).allreduce(0, ReduceOp.MAX)  # the outcome: nobody could not use its host tier
        blocks = self.impl.storage.statistics(GPU_LEVEL)[0].total
        if self.event_manager is not None:
            self.event_manager.set_layer_group_window_sizes({0: max_seq_len})
            self.event_manager.add_created_event([pools[0].total for pools in self.impl.storage.levels], [0])
        self.max_seq_len = min(max_seq_len, blocks * tokens_per_block)
        self.max_blocks_per_seq = -(-(self.max_seq_len + self.num_extra_kv_tokens + 1) // tokens_per_block)
        self.kv_cache_map: dict[int, _KVCache] = {}
        rows = knobs.number("ROWS") or max_batch_size * mapping.pp_size + num_reserved_index_slots
        self.index_mapper = IndexMapper(rows)
        self._early_freed: set[int] = set()
        # Pools, rows, key or value, blocks. Only keys' numbers are kept; values follow from them.
        self.host_kv_cache_block_offsets = torch.full((1, rows, 2, self.max_blocks_per_seq), BAD_PAGE_INDEX,
                                                      dtype=torch.int32)  # fmt: skip

    # --- building --------------------------------------------------------------------------------

    def _serves_events(self) -> bool:
        raise NotImplementedError

    @property
    def owner(self) -> Owner:
        return self.impl.owner

    def get_cache_bytes_per_token(self) -> int:
        return self.num_local_layers * self.kv_factor * self.num_kv_heads * self.head_dim * FLOAT_BYTES

    # --- requests --------------------------------------------------------------------------------

    def _create_kv_cache(
        self,
        request_id: int,
        lora_task_id: int | None,
        input_tokens: list[int] | None,
        *,
        cache_salt: str | None = None,
        is_dummy: bool = False,
        enable_request_stats: bool = False,
        expected_prompt_length: int | None = None,
    ) -> _KVCache | None:
        """A suspended cache with a row of the page table; None when no row is free."""
        assert request_id not in self.kv_cache_map, f"KV cache for request {request_id} already exists"
        if self.index_mapper.num_free_slots() == 0:
            return None
        scope = ReuseScope(lora_id=lora_task_id, salt=self._derive_reuse_salt(cache_salt))
        cache = self.impl.create_kv_cache(scope, input_tokens, id=request_id)
        self.kv_cache_map[request_id] = cache
        self.index_mapper.add_new_sequence(request_id)
        return cache

    def _resume_and_restore(self, req_id: int, kv_cache: _KVCache) -> bool:
        """Active, its row filled; False if the device is too full."""
        if kv_cache.is_active:
            return True
        if not kv_cache.resume(0):
            return False
        row = self.index_mapper.get_index(req_id)
        kv_cache.set_base_page_index_buf(0, 0, memoryview(self._row(row)))
        return True

    def _row(self, row: int) -> Any:
        return self.host_kv_cache_block_offsets[0, row, 0].numpy()

    def _claim(self, req: LlmRequest, limit: int | None) -> _KVCache | None:
        """The cache of a request at its first chunk, made from at most `limit` of its tokens and never the last."""
        tokens = req.get_tokens(0)[:-1] if self.enable_block_reuse else None
        if tokens is not None and limit is not None:
            tokens = tokens[:limit]
        return self._create_kv_cache(
            req.py_request_id, req.lora_task_id, tokens, cache_salt=req.cache_salt, is_dummy=req.is_dummy_request
        )

    @owned
    def resize_context(self, req: LlmRequest, num_tokens: int) -> bool:
        cache = self.kv_cache_map.get(req.py_request_id)
        if cache is None:
            return False
        target = req.context_current_position + num_tokens + self.num_extra_kv_tokens
        if cache.resize(max(cache.capacity, target)):
            return True
        if req.is_first_context_chunk:
            cache.suspend()
        return False

    @owned
    def update_context_resources(self, scheduled_batch: ScheduledRequests) -> None:
        """After a forward, cursors moved: what is computed becomes reusable."""
        for request in scheduled_batch.context_requests:
            cache = self.kv_cache_map.get(request.py_request_id)
            if cache is None or not cache.is_active:
                continue
            if not self.enable_block_reuse or request.is_dummy_request:
                cache.resize(None, request.context_current_position)
                continue
            committed = cache.num_committed_tokens
            cache.commit(request.get_tokens(0)[committed : request.context_current_position])
            if request.context_remaining_length == 0:
                cache.stop_committing()

    @owned
    def free_resources(self, request: LlmRequest, pin_on_release: bool = False) -> None:
        cache = self.kv_cache_map.pop(request.py_request_id, None)
        if cache is None:
            return
        cache.close()
        if request.py_request_id in self._early_freed:
            self._early_freed.discard(request.py_request_id)
        else:
            self.index_mapper.remove_sequence(request.py_request_id)

    @owned
    def release_index_slot(self, request_id: int) -> None:
        """The row goes early; the cache stays."""
        self.kv_cache_map[request_id].set_base_page_index_buf(0, 0, None)
        self.index_mapper.remove_sequence(request_id)
        self._early_freed.add(request_id)

    # --- reading ---------------------------------------------------------------------------------

    @staticmethod
    def _derive_reuse_salt(cache_salt: str | None) -> int | None:
        if cache_salt is None:
            return None
        return int.from_bytes(hashlib.sha256(cache_salt.encode()).digest()[:8], "little")

    @owned
    def probe_prefix_match_length(
        self, input_tokens: list[int], lora_task_id: int | None = None, cache_salt: str | None = None
    ) -> int:
        if not self.enable_block_reuse or not input_tokens:
            return 0
        return self.impl.probe_reuse(ReuseScope(lora_task_id, self._derive_reuse_salt(cache_salt)), input_tokens)

    @owned
    def copy_batch_block_offsets(
        self,
        dst_tensor: torch.Tensor,
        request_ids: list[int],
        beam_width: int,
        num_contexts: int,
        num_seqs: int,
        max_blocks: int | None = None,
    ) -> None:
        """int32 [pools, sequences, key or value, blocks]: numbers of pages of one layer's K or V, from the rows."""
        assert beam_width == 1
        assert len(request_ids) == num_seqs
        scale = self.kv_factor * self.num_local_layers
        for index, request_id in enumerate(request_ids):
            row = self.host_kv_cache_block_offsets[0, self.index_mapper.get_index(request_id), 0]
            valid = row != BAD_PAGE_INDEX
            for offset in range(self.kv_factor):
                dst_tensor[0, index, offset] = torch.where(valid, row * scale + offset, row)

    def get_page_memory(self) -> torch.Tensor:
        """float32 [pages, tokens_per_block, heads, head_dim] of the whole device pool. Layer number l of this rank
        begins 2 * l pages after the number in the page table."""
        memory = self.impl.group_memory(0).view(torch.float32)
        return memory.view(-1, self.tokens_per_block, self.num_kv_heads, self.head_dim)

    @owned
    def get_kv_cache_stats(self) -> KvCacheStats:
        (entry,) = self.impl.storage.statistics(GPU_LEVEL)
        return KvCacheStats(entry.total, entry.available, entry.unavailable, self.tokens_per_block)

    @owned
    def flush_iteration_events(self) -> None:
        if self.event_manager is not None:
            self.event_manager.flush_iteration_events()

    @owned
    def get_latest_events(self, timeout_ms: float | None = 0) -> list[KVCacheEvent]:
        return [] if self.event_manager is None else self.event_manager.get_latest_events(timeout_ms)

    def get_needed_resource_to_completion(self, request: LlmRequest) -> int:
        return 0

    # --- the end ---------------------------------------------------------------------------------

    @owned
    def reset_reuse_state(self) -> None:
        self.impl.clear_reusable_blocks()

    @owned
    def shutdown(self) -> None:
        for cache in self.kv_cache_map.values():
            cache.close()
        self.kv_cache_map.clear()
        self.impl.shutdown()
