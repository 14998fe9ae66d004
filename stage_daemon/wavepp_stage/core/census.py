"""How full a stage's cache is, as counts for operators.

Owns the counts that metrics show. Taken under the shell's mutex, so it walks the holds (at most one a
lane) and nothing else: about 20 us with 128 of them. `inventory` is the list behind these counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from wavepp_stage.core.holds import Phase

if TYPE_CHECKING:
    from wavepp_stage.core.block_cache import BlockCache


@dataclass(frozen=True, slots=True)
class Census:
    """Blocks of the device pool: free + cached + held + quarantined is the pool. Likewise for the other pools."""

    free: int = 0
    cached: int = 0
    held: int = 0
    quarantined: int = 0
    escrowed: int = 0
    """Promised and not taken: a count, on top of the four."""
    evicted: int = 0
    """Cached blocks that are gone from both tiers, since the pool was made."""
    leases: int = 0
    """Requests that hold a prefix and do not run yet."""
    escrows: int = 0
    """Requests that are promised room."""
    backed_free: int = 0
    backed_offload: int = 0
    backed_evict: int = 0
    """What backs the escrows: free blocks, blocks to off-load, blocks to evict."""
    offloaded: int = 0
    """Blocks moved to the host tier, since the pool was made."""
    onboarded: int = 0
    """Blocks brought back from it."""
    host_free: int = 0
    host_cached: int = 0
    host_held: int = 0
    """Host blocks of prefixes that somebody holds."""
    states_free: int = 0
    states_cached: int = 0
    states_held: int = 0
    """Working states, snapshots somebody starts from, and snapshots not published yet."""
    states_quarantined: int = 0
    states_escrowed: int = 0
    states_evicted: int = 0
    """Snapshots dropped to make room, since the slots were made."""


def take_census(cache: BlockCache) -> Census:
    store, ledger = cache._store, cache._ledger
    holds, escrowed = ledger.holds.values(), ledger.escrowed
    tree, states = store.tree, store.states
    free, cached, quarantined, escrowed = (
        store.pool.free,
        tree.device.cached,
        store.pool.quarantined,
        cache._ledger.escrowed,
    )
    backed_free = min(free, escrowed)
    backed_offload = min(tree.free_host_blocks, escrowed - backed_free)
    return Census(
        free=free,
        cached=cached,
        held=cache.pool_blocks - free - cached - quarantined,
        quarantined=quarantined,
        escrowed=escrowed,
        evicted=store.dropped,
        leases=sum(hold.phase is not Phase.OWNED for hold in holds),
        escrows=sum(hold.escrow > 0 for hold in holds),
        backed_free=backed_free,
        backed_offload=backed_offload,
        backed_evict=escrowed - backed_free - backed_offload,
        offloaded=store.offloaded,
        onboarded=store.onboarded,
        host_free=tree.free_host_blocks,
        host_cached=tree.host.cached,
        host_held=tree.host_blocks - tree.free_host_blocks - tree.host.cached,
        states_free=states.free,
        states_cached=states.cached,
        states_held=states.size - states.free - states.cached - states.quarantined,
        states_quarantined=states.quarantined,
        states_escrowed=ledger.escrowed_states,
        states_evicted=states.evicted,
    )
