"""Cache managers of the TensorRT-LLM stand-in, sized in blocks, and the usual way through one sequence.

Owns what tests of the stand-in's cache share. Imports the stand-in by its place in this tree, never as
`tensorrt_llm`: such tests say what the stand-in does, whether or not the real package is installed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tests.fake_trtllm.tensorrt_llm.runtime.kv_cache_manager_v2 import (
    AttentionLayerConfig,
    BufferConfig,
    CacheTierConfig,
    GpuCacheTierConfig,
    HostCacheTierConfig,
    KVCacheEventManager,
    KVCacheManager,
    KVCacheManagerConfig,
    LayerConfig,
    PageStatus,
    ReuseScope,
    SsmLayerConfig,
    _KVCache,
)

BLOCK = 4
"""Tokens."""
BYTES = 16
"""Of one page, of either kind."""
SCOPE = ReuseScope()


def make_manager(
    blocks: int,
    host: int = 0,
    *,
    attention: bool = True,
    recurrent: bool = False,
    partial: bool = False,
    most_used: float = 1.0,
    events: KVCacheEventManager | None = None,
) -> KVCacheManager:
    """`blocks` and `host` are pages of each kind of layer; `most_used` is max_util_for_resume."""
    layers: list[LayerConfig] = []
    if attention:
        layers.append(AttentionLayerConfig(0, [BufferConfig("key", BYTES // 2), BufferConfig("value", BYTES // 2)]))
    if recurrent:
        layers.append(SsmLayerConfig(1, [BufferConfig("state", BYTES)]))
    tiers: list[CacheTierConfig] = [GpuCacheTierConfig(blocks * BYTES * len(layers))]
    if host:
        tiers.append(HostCacheTierConfig(host * BYTES * len(layers)))
    config = KVCacheManagerConfig(BLOCK, tiers, layers, max_util_for_resume=most_used, enable_partial_reuse=partial)
    return KVCacheManager(config, events)


def claim(manager: KVCacheManager, tokens: Sequence[int], scope: ReuseScope = SCOPE) -> _KVCache:
    return manager.create_kv_cache(scope, tokens)


def compute(
    manager: KVCacheManager, tokens: Sequence[int], scope: ReuseScope = SCOPE, *, upto: int | None = None
) -> _KVCache:
    """An active sequence with room for `tokens`, of which [claimed, upto) are committed (all by default)."""
    cache = claim(manager, tokens[:-1], scope)
    assert cache.resume(0)
    assert cache.resize(len(tokens))
    end = len(tokens) if upto is None else upto
    cache.commit(tokens[cache.num_committed_tokens : end])
    return cache


def leave(manager: KVCacheManager, tokens: Sequence[int], scope: ReuseScope = SCOPE) -> None:
    """Make the full blocks of `tokens` reusable; nobody holds them."""
    compute(manager, tokens, scope).close()


def slots(cache: _KVCache, group: int = 0) -> list[int]:
    return list(cache.get_base_page_indices(group))


def write(manager: KVCacheManager, cache: _KVCache, value: int, group: int = 0) -> None:
    """Fill every page of an active sequence with a byte."""
    for slot in slots(cache, group):
        manager.group_memory(group)[slot] = value


def read(manager: KVCacheManager, cache: _KVCache, group: int = 0) -> list[int]:
    """The bytes that its pages are filled with."""
    pages = [manager.group_memory(group)[slot] for slot in slots(cache, group)]
    assert all(torch.equal(page, page[:1].expand_as(page)) for page in pages)
    return [int(page[0]) for page in pages]


def census(manager: KVCacheManager, level: int = 0, group: int = 0) -> dict[str, int]:
    """Pages of one level by state, and free ones."""
    pool = manager.storage.levels[level][group]
    counts = {status.name: sum(page.status is status for page in pool.pages) for status in PageStatus}
    return {**counts, "FREE": len(pool.free)}
