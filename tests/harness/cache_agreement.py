"""A stage's cache and its model (cache_model.py) say the same: counts, holds, and what is where."""

from __future__ import annotations

from tests.harness.cache_model import CacheModel
from tests.harness.stage_core import B, hashes
from wavepp_stage.core.block_cache import BlockCache


def agree(cache: BlockCache, model: CacheModel) -> None:
    """Assert it, after the cache has checked itself."""
    cache.check()
    capacity = cache.capacity()
    assert capacity.escrowed_blocks == model.escrowed
    assert capacity.evictable_blocks == model.evictable
    assert capacity.free_blocks == model.free
    assert capacity.host_free_blocks == model.host_free
    assert capacity.recurrent_evictable == model.evictable_states
    assert capacity.recurrent_escrowed == model.escrowed_states
    assert capacity.recurrent_free == model.free_states
    states = {
        state.key: (state.phase, state.endpoint, state.owned_blocks, state.owned_states) for state in cache.inventory()
    }
    assert states == {
        name: (hold.phase, hold.leased * B, hold.private, hold.slots) for name, hold in model.holds.items()
    }
    tree = cache._store.tree
    shown = {
        int(tree._short[node]): (
            bool(tree.device.block[node] >= 0),
            bool(cache._store.states._slot[node] >= 0),
        )
        for node in tree._alive.nonzero()[0]
    }
    assert shown == {
        int(hashes(list(prefix)).shorts[-1]): (node.device, node.snapshot is not None)
        for prefix, node in model.nodes.items()
    }
