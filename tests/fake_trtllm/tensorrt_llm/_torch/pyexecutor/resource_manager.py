"""What a batch needs beside the model: sequence slots, the cache, in one list of managers."""

from __future__ import annotations

import enum
from typing import Any

from ..._fake import knobs
from .llm_request import LlmRequest
from .scheduler import ScheduledRequests


class ResourceManagerType(enum.Enum):
    KV_CACHE_MANAGER = "KV_CACHE_MANAGER"
    SEQ_SLOT_MANAGER = "SEQ_SLOT_MANAGER"


class BaseResourceManager:
    def prepare_resources(self, scheduled_batch: ScheduledRequests) -> None:
        """Before a forward."""

    def free_resources(self, request: LlmRequest) -> None:
        """The request is over."""

    def shutdown(self) -> None:
        """Give everything back."""


class SlotManager:
    """Small numbers for living requests."""

    def __init__(self, max_num_requests: int) -> None:
        self._free = list(range(max_num_requests - 1, -1, -1))
        self.slot_mapping: dict[int, int] = {}

    def add_slot(self, request_id: int) -> int:
        if not self._free:
            raise ValueError("no free sequence slot")
        self.slot_mapping[request_id] = self._free.pop()
        return self.slot_mapping[request_id]

    def remove_slot(self, request_id: int) -> None:
        if request_id in self.slot_mapping:
            self._free.append(self.slot_mapping.pop(request_id))


class SeqSlotManager(BaseResourceManager):
    def __init__(self, max_num_sequences: int) -> None:
        self.slot_manager = SlotManager(max_num_sequences)

    def prepare_resources(self, scheduled_batch: ScheduledRequests) -> None:
        for request in scheduled_batch.all_requests():
            if request.py_seq_slot is None:
                request.py_seq_slot = self.slot_manager.add_slot(request.py_request_id)
            request.py_batch_idx = request.py_seq_slot

    def free_resources(self, request: LlmRequest) -> None:
        self.slot_manager.remove_slot(request.py_request_id)
        request.py_seq_slot = None


class ResourceManager:
    def __init__(self, resource_managers: dict[ResourceManagerType, BaseResourceManager]) -> None:
        self.resource_managers = resource_managers

    def get_resource_manager(self, name: ResourceManagerType) -> Any:
        return self.resource_managers.get(name)

    def prepare_resources(self, scheduled_batch: ScheduledRequests) -> None:
        if knobs.strikes("FAIL_PREPARE"):
            raise RuntimeError("injected: prepare_resources")
        for manager in self.resource_managers.values():
            manager.prepare_resources(scheduled_batch)

    def free_resources(self, request: LlmRequest) -> None:
        for manager in reversed(self.resource_managers.values()):
            manager.free_resources(request)

    def shutdown(self) -> None:
        for manager in reversed(self.resource_managers.values()):
            manager.shutdown()
