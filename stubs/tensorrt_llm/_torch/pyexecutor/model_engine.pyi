from typing import Any

from tensorrt_llm._torch.pyexecutor.resource_manager import ResourceManager
from tensorrt_llm._torch.pyexecutor.scheduler import ScheduledRequests

class PyTorchModelEngine:
    model: Any
    # Named `scheduled_requests` in older code: given by position.
    def forward(self, batch: ScheduledRequests, resource_manager: ResourceManager, /) -> dict[str, Any]: ...
