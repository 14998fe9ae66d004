"""What a manager is built from: tiers with byte quotas, layers with buffers.

Owns plain data only. One attention layer group (full attention) and one recurrent group are known;
sliding windows are refused by the manager.
"""

from __future__ import annotations

from dataclasses import dataclass

from ._common import CacheTier


@dataclass(slots=True)
class GpuCacheTierConfig:
    quota: int

    @property
    def tier(self) -> CacheTier:
        return CacheTier.GPU_MEM


@dataclass(slots=True)
class HostCacheTierConfig:
    quota: int

    @property
    def tier(self) -> CacheTier:
        return CacheTier.HOST_MEM


@dataclass(slots=True)
class DiskCacheTierConfig:
    quota: int
    path: str

    @property
    def tier(self) -> CacheTier:
        return CacheTier.DISK


CacheTierConfig = GpuCacheTierConfig | HostCacheTierConfig | DiskCacheTierConfig


@dataclass(slots=True)
class BufferConfig:
    role: str
    size: int
    """Bytes per block."""
    tokens_per_block_override: int | None = None


@dataclass(slots=True)
class AttentionLayerConfig:
    layer_id: int
    buffers: list[BufferConfig]
    sliding_window_size: int | None = None
    num_sink_tokens: int | None = None


@dataclass(slots=True)
class SsmLayerConfig:
    layer_id: int
    buffers: list[BufferConfig]


LayerConfig = AttentionLayerConfig | SsmLayerConfig


@dataclass(slots=True)
class KVCacheManagerConfig:
    tokens_per_block: int
    cache_tiers: list[CacheTierConfig]
    layers: list[LayerConfig]
    max_util_for_resume: float = 0.97
    enable_partial_reuse: bool = True
    reuse_match_backoff: int = 0
    initial_pool_ratio: list[float] | None = None
    """Share of each tier's bytes per layer group; equal shares by default."""
    commit_min_snapshot: bool = False
    enable_stats: bool = True
    text_only: bool = False
