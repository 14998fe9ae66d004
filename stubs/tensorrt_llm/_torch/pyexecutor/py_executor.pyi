from typing import Any

from tensorrt_llm._torch.pyexecutor.kv_cache.kv_cache_manager_v2 import KVCacheManagerV2
from tensorrt_llm._torch.pyexecutor.model_engine import PyTorchModelEngine
from tensorrt_llm._torch.pyexecutor.resource_manager import ResourceManager

class PyExecutor:
    model_engine: PyTorchModelEngine
    resource_manager: ResourceManager
    kv_cache_manager: KVCacheManagerV2
    execution_stream: Any
    def start_worker(self) -> None: ...
