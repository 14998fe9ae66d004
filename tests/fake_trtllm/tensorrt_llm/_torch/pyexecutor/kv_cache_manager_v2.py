"""Where the older version has its cache manager. It knows no limit to a claim: a caller cuts the tokens itself."""

from __future__ import annotations

from ..._fake import knobs
from ..._fake.cache_manager import CacheManagerBase
from ..._fake.owner import owned
from ..._utils import mpi_rank
from .llm_request import LlmRequest

if not knobs.is_rc26():
    raise ModuleNotFoundError(f"No module named {__name__!r}", name=__name__)


class KVCacheManagerV2(CacheManagerBase):
    def _serves_events(self) -> bool:
        return mpi_rank() == 0

    @owned
    def prepare_context(self, req: LlmRequest) -> bool:
        """Claim at the first chunk, whatever matches; sets the cursors; resumes."""
        cache = self.kv_cache_map.get(req.py_request_id)
        if cache is None:
            assert req.is_first_context_chunk, "KV cache missing for a later chunk"
            cache = self._claim(req, None)
            if cache is None:
                return False
        if req.is_first_context_chunk:
            if self.enable_block_reuse:
                req.context_current_position = cache.num_committed_tokens
                req.set_prepopulated_prompt_len(cache.num_committed_tokens, self.tokens_per_block)
            else:
                cache.stop_committing()
        return self._resume_and_restore(req.py_request_id, cache)
