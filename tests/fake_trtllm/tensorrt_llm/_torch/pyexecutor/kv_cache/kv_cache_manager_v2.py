"""The newer version's cache manager: a claim can be capped, and touches no cursor."""

from __future__ import annotations

from ...._fake.cache_manager import CacheManagerBase
from ...._fake.owner import owned
from ...._utils import mpi_rank
from ....runtime.kv_cache_manager_v2._storage import StorageStatistics
from ..llm_request import LlmRequest


class KVCacheManagerV2(CacheManagerBase):
    def _serves_events(self) -> bool:
        return mpi_rank() == 0

    @owned
    def prepare_context_cache(self, req: LlmRequest, reuse_limit: int | None = None) -> int | None:
        """Claim at most `reuse_limit` tokens at the first chunk, and resume: tokens claimed, None for not now."""
        cache = self.kv_cache_map.get(req.py_request_id)
        if cache is None:
            assert req.is_first_context_chunk, "KV cache missing for a later chunk"
            cache = self._claim(req, reuse_limit)
            if cache is None:
                return None
            if not self.enable_block_reuse:
                cache.stop_committing()
        if not self._resume_and_restore(req.py_request_id, cache):
            return None
        return cache.num_committed_tokens

    def probe_context_reuse(self, req: LlmRequest) -> int | None:
        return self.probe_prefix_match_length(req.get_tokens(0)[:-1], req.lora_task_id, req.cache_salt)

    @owned
    def _get_storage_statistics(self, cache_level: int) -> list[StorageStatistics]:
        return self.impl.storage.statistics(cache_level)
