"""The executor: here only what others take out of it.

Owns the warm-up, a forward of a dummy request that really sends and receives. A started loop takes
the cache for itself: whoever wants to drive the parts must keep `start_worker` from being run.
"""

from __future__ import annotations

from typing import Any

from .llm_request import LlmRequest, SamplingConfig
from .model_engine import PyTorchModelEngine
from .resource_manager import ResourceManager, ResourceManagerType
from .scheduler import ScheduledRequests

_WARM_UP_ID = (1 << 64) - 1
_WARM_UP_TOKENS = 32


class PyExecutor:
    def __init__(
        self,
        resource_manager: ResourceManager,
        scheduler: Any,
        model_engine: PyTorchModelEngine,
        sampler: Any = None,
        dist: Any = None,
        start_worker: bool = True,
        execution_stream: Any = None,
    ) -> None:
        self.resource_manager = resource_manager
        self.scheduler = scheduler
        self.model_engine = model_engine
        self.sampler = sampler
        self.dist = dist
        self.execution_stream = execution_stream
        self.kv_cache_manager: Any = resource_manager.get_resource_manager(ResourceManagerType.KV_CACHE_MANAGER)
        self._warm_up()
        if start_worker:
            self.start_worker()

    def _warm_up(self) -> None:
        manager = self.kv_cache_manager
        size = min(_WARM_UP_TOKENS, self.model_engine.max_num_tokens, manager.max_seq_len)
        request = LlmRequest(request_id=_WARM_UP_ID, max_new_tokens=1, input_tokens=[1] * size,
                             sampling_config=SamplingConfig(1), is_streaming=False)  # fmt: skip
        request.is_dummy_request = True
        cache = manager._create_kv_cache(request.py_request_id, None, None, is_dummy=True)
        cache.stop_committing()
        if not manager._resume_and_restore(request.py_request_id, cache) or not cache.resize(size):
            raise RuntimeError("the pool is too small for the warm-up")
        batch = ScheduledRequests()
        batch.append_context_request(request)
        self.resource_manager.prepare_resources(batch)
        self.model_engine._forward(batch, self.resource_manager)
        self.resource_manager.free_resources(request)

    def start_worker(self) -> None:
        self.kv_cache_manager.owner.take_for_loop()

    def shutdown(self) -> None:
        self.resource_manager.shutdown()
