"""One rank of the TensorRT-LLM stand-in, driven as its adapter would drive it.

Owns the usual way of a prompt: claim, reserve, chunks, free. Imports the stand-in by its place in this
tree; only the newer of its two versions can be had that way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fake_trtllm.tensorrt_llm._torch.pyexecutor.kv_cache import kv_cache_manager_v2
from tests.fake_trtllm.tensorrt_llm._torch.pyexecutor.llm_request import LlmRequest, SamplingConfig
from tests.fake_trtllm.tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor
from tests.fake_trtllm.tensorrt_llm._torch.pyexecutor.py_executor_creator import create_py_executor
from tests.fake_trtllm.tensorrt_llm._torch.pyexecutor.scheduler import ScheduledRequests
from tests.fake_trtllm.tensorrt_llm.llmapi.llm_args import KvCacheConfig, TorchLlmArgs

BLOCK = 16
"""Tokens."""
Chunks = list[tuple[LlmRequest, int]]


def make_request(number: int, tokens: list[int]) -> LlmRequest:
    return LlmRequest(
        request_id=number, max_new_tokens=1, input_tokens=tokens, sampling_config=SamplingConfig(1), is_streaming=False
    )


def make_args(folder: Path, blocks: int = 32) -> TorchLlmArgs:
    cache = KvCacheConfig(
        max_tokens=blocks * BLOCK,
        tokens_per_block=BLOCK,
        host_cache_size=0,
        enable_partial_reuse=False,
        event_buffer_max_size=1000,
        use_kv_cache_manager_v2=True,
    )
    return TorchLlmArgs(
        model=str(folder),
        max_batch_size=4,
        max_num_tokens=128,
        max_seq_len=256,
        kv_cache_config=cache,
        enable_chunked_prefill=True,
        disable_overlap_scheduler=True,
        cuda_graph_config=None,
    )


@dataclass
class Rank:
    executor: PyExecutor
    numbers: Any = field(default_factory=lambda: count(1))

    @property
    def manager(self) -> kv_cache_manager_v2.KVCacheManagerV2:
        manager: kv_cache_manager_v2.KVCacheManagerV2 = self.executor.kv_cache_manager
        return manager

    def admit(self, tokens: list[int], limit: int) -> LlmRequest:
        """A request with room for its whole prompt that begins behind at most `limit` cached tokens."""
        request = make_request(next(self.numbers), tokens)
        claimed = self.manager.prepare_context_cache(request, reuse_limit=limit)
        assert claimed is not None
        request.set_prepopulated_prompt_len(claimed, BLOCK)
        assert self.manager.kv_cache_map[request.py_request_id].resize(len(tokens))
        return request

    def batch(self, chunks: Chunks) -> ScheduledRequests:
        batch = ScheduledRequests()
        for request, size in chunks:
            request.context_chunk_size = size
            batch.append_context_request(request)
        self.executor.resource_manager.prepare_resources(batch)
        return batch

    def run(self, chunks: Chunks, *, commit: bool = True) -> torch.Tensor:
        """Logits of each row's last token, [rows, vocabulary]."""
        batch = self.batch(chunks)
        logits = self.executor.model_engine.forward(batch, self.executor.resource_manager)["logits"]
        if commit:
            for request, _ in chunks:
                request.move_to_next_context_chunk()
            self.manager.update_context_resources(batch)
        return logits

    def free(self, request: LlmRequest) -> None:
        self.executor.resource_manager.free_resources(request)

    def prefill(self, tokens: list[int], sizes: list[int]) -> torch.Tensor:
        """A whole prompt without reuse; logits of its last token."""
        request = self.admit(tokens, 0)
        for size in sizes:
            logits = self.run([(request, size)])
        self.free(request)
        return logits[0]

    def close(self) -> None:
        """Nothing is held, and every slot is accounted for."""
        (entry,) = self.manager.impl.storage.statistics(0)
        assert entry.available == entry.total
        self.manager.impl.storage.check()
        self.manager.shutdown()


def make_rank(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, loop: bool = False, mpi_rank: int = 0, blocks: int = 32
) -> Rank:
    """A pipeline of one; `loop`: with the executor's own loop."""
    monkeypatch.setenv("TLLM_DISABLE_MPI", "1")
    monkeypatch.setattr(kv_cache_manager_v2, "mpi_rank", lambda: mpi_rank)
    with monkeypatch.context() as patch:
        if not loop:
            patch.setattr(PyExecutor, "start_worker", lambda executor: None)
        return Rank(create_py_executor(make_args(folder, blocks), checkpoint_dir=str(folder)))
