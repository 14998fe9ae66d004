"""Runs one batch through this rank's layers.

Owns how requests become tensors: positions from each request's cursor and chunk size, pages from the
cache manager's table. Moves no cursor, commits nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from ..._fake import knobs
from ..._fake.band import Band
from ..._fake.paged_attention import AttentionMetadata, Row
from ...llmapi.llm_args import TorchLlmArgs
from ...mapping import Mapping
from ..distributed.communicator import init_pp_comm
from .resource_manager import ResourceManager, ResourceManagerType
from .scheduler import ScheduledRequests


class PyTorchModelEngine:
    def __init__(self, *, model_path: str, llm_args: TorchLlmArgs, mapping: Mapping, dist: Any = None) -> None:
        if mapping.has_pp():
            init_pp_comm(mapping)
        self.mapping = mapping
        self.llm_args = llm_args
        self.max_num_tokens = llm_args.max_num_tokens
        self.model = Band(model_path, mapping)
        self.max_seq_len = llm_args.max_seq_len or int(self.model.config.max_position_embeddings)

    def forward(
        self,
        batch: ScheduledRequests,
        resource_manager: ResourceManager,
        new_tensors_device: Any = None,
        cache_indirection_buffer: Any = None,
    ) -> dict[str, torch.Tensor]:
        return self._forward(batch, resource_manager)

    @torch.inference_mode()
    def _forward(self, batch: ScheduledRequests, resource_manager: ResourceManager) -> dict[str, torch.Tensor]:
        """`logits` [rows, vocabulary], of the last token of each row; without meaning on other ranks than the last."""
        knobs.slow_down()
        if knobs.strikes("FAIL_FORWARD"):
            raise RuntimeError("injected: forward")
        manager = resource_manager.get_resource_manager(ResourceManagerType.KV_CACHE_MANAGER)
        manager.owner.check("forward")
        ids: list[int] = []
        positions: list[int] = []
        rows: list[Row] = []
        for request in batch.context_requests:
            begin, size = request.context_current_position, request.context_chunk_size
            end = begin + size
            if size < 1 or (not request.is_last_context_chunk and end % manager.tokens_per_block):
                raise ValueError(f"chunk [{begin}, {end}) of a prompt of {request.prompt_len} tokens")
            if request.py_seq_slot is None:
                raise RuntimeError("prepare_resources was not called for this request")
            cache = manager.kv_cache_map[request.py_request_id]
            if not cache.is_active or cache.capacity < end:
                raise RuntimeError(f"the cache of request {request.py_request_id} has no room for position {end - 1}")
            rows.append(Row(slice(len(ids), len(ids) + size), begin, end))
            ids.extend(request.get_tokens(0)[begin:end])
            positions.extend(range(begin, end))
        assert len(ids) <= self.max_num_tokens, f"total_num_tokens ({len(ids)}) should be <= {self.max_num_tokens}"
        names = [request.py_request_id for request in batch.context_requests]
        table = torch.empty((1, len(names), 2, manager.max_blocks_per_seq), dtype=torch.int32)
        manager.copy_batch_block_offsets(table, names, 1, len(names), len(names))
        metadata = AttentionMetadata(tuple(rows), table, manager.get_page_memory(), manager.tokens_per_block,
                                     manager.layer_offsets, self.model.tp)  # fmt: skip
        logits = self.model(torch.tensor(ids), torch.tensor(positions), metadata)
        return {"logits": logits}


if knobs.is_rc26():

    def _forward_rc26(
        self: PyTorchModelEngine,
        scheduled_requests: ScheduledRequests,
        resource_manager: ResourceManager,
        new_tensors_device: Any = None,
        cache_indirection_buffer: Any = None,
    ) -> dict[str, torch.Tensor]:
        return self._forward(scheduled_requests, resource_manager)

    PyTorchModelEngine.forward = _forward_rc26  # type: ignore[assignment, method-assign]
