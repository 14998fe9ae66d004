"""How large a rank's cache is, agreed on with all others, and whether it tells of its blocks.

Owns the collectives of the capacity and of the host tier. Called when a cache manager is built.
"""

from __future__ import annotations

import math

from .._torch.distributed.communicator import Distributed, ReduceOp
from ..llmapi.llm_args import KvCacheConfig
from ..mapping import Mapping
from ..runtime.kv_cache_hash import get_effective_kv_cache_event_hash_algo
from ..runtime.kv_cache_manager_v2 import (
    AttentionLayerConfig,
    BufferConfig,
    CacheTierConfig,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheEventManager,
    KVCacheManagerConfig,
)
from . import knobs

FLOAT_BYTES = 4


def make_event_manager(config: KvCacheConfig, window: int) -> KVCacheEventManager | None:
    if config.event_buffer_max_size <= 0:
        return None
    algorithm = get_effective_kv_cache_event_hash_algo(config.kv_cache_event_hash_algo, use_kv_cache_manager_v2=True)
    return KVCacheEventManager(config.event_buffer_max_size, window_size=window, hash_algo=algorithm)


def agree(
    config: KvCacheConfig, mapping: Mapping, tokens_per_block: int, layers: int, layer_token_bytes: int
) -> KVCacheManagerConfig:
    """Every rank's pool holds as many tokens as the smallest one. `layer_token_bytes`: key and value of one layer."""
    distributed = Distributed.get(mapping)
    token_bytes = layers * layer_token_bytes
    wanted = config.max_tokens or 0
    if (blocks := knobs.number("POOL_BLOCKS")) is not None:
        wanted = blocks * tokens_per_block
    quota = math.ceil(distributed.allreduce(wanted, ReduceOp.MIN) * token_bytes / config.max_util_for_resume)
    host = config.host_cache_size
    if (blocks := knobs.number("HOST_BLOCKS")) is not None:
        host = blocks * tokens_per_block * token_bytes
    if host is None:
        host = distributed.allreduce(quota, ReduceOp.MIN)
    tiers: list[CacheTierConfig] = [GpuCacheTierConfig(quota)]
    if host > 0:
        tiers.append(HostCacheTierConfig(host))
    size = tokens_per_block * layer_token_bytes // 2
    buffers = [BufferConfig("key", size), BufferConfig("value", size)]
    return KVCacheManagerConfig(
        tokens_per_block,
        tiers,
        [AttentionLayerConfig(offset, buffers) for offset in range(layers)],
        config.max_util_for_resume,
        config.enable_partial_reuse,
    )
