"""What a user configures. Unknown fields are refused, as pydantic does in the original.

Owns fields and their defaults, those that the stand-in heeds and those that must be off.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .._utils import mpi_rank
from ..mapping import Mapping


@dataclass(kw_only=True)
class BlockReuseConfig:
    policy: str = "all_reusable"


@dataclass(kw_only=True)
class KvCacheConfig:
    enable_block_reuse: bool = True
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True
    max_tokens: int | None = None
    max_gpu_total_bytes: int | None = None
    free_gpu_memory_fraction: float | None = 0.9
    host_cache_size: int | None = None
    """Bytes; None makes a host tier as large as the device's."""
    tokens_per_block: int = 32
    event_buffer_max_size: int = 0
    kv_cache_event_hash_algo: str = "auto"
    use_kv_cache_manager_v2: bool | str = "auto"
    max_util_for_resume: float = 0.97
    block_reuse_config: BlockReuseConfig = field(default_factory=BlockReuseConfig)


@dataclass(kw_only=True)
class ParallelConfig:
    tp_size: int
    pp_size: int
    pp_partition: list[int] | None

    @property
    def world_size(self) -> int:
        return self.tp_size * self.pp_size

    def to_mapping(self) -> Mapping:
        rank = mpi_rank() if self.world_size > 1 else 0
        return Mapping(
            self.world_size, rank, tp_size=self.tp_size, pp_size=self.pp_size, pp_partition=self.pp_partition
        )


@dataclass(kw_only=True)
class TorchLlmArgs:
    model: str
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    pp_partition: list[int] | None = None
    dtype: str = "auto"
    max_batch_size: int = 2048
    max_num_tokens: int = 8192
    max_seq_len: int | None = None
    max_beam_width: int = 1
    kv_cache_config: KvCacheConfig = field(default_factory=KvCacheConfig)
    enable_chunked_prefill: bool = False
    disable_overlap_scheduler: bool = False
    cuda_graph_config: Any = "default"
    torch_compile_config: Any = None
    speculative_config: Any = None
    cache_transceiver_config: Any = None
    orchestrator_type: str | None = None
    backend: str = "pytorch"

    @property
    def parallel_config(self) -> ParallelConfig:
        return ParallelConfig(
            tp_size=self.tensor_parallel_size, pp_size=self.pipeline_parallel_size, pp_partition=self.pp_partition
        )
