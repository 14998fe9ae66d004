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
    """Blocks of the device pool: free + cached + held + quarantined is the pool."""

    free: int = 0
    cached: int = 0
    held: int = 0
    quarantined: int = 0
    escrowed: int = 0
    """Promised and not taken: a count, on top of the four."""
    evicted: int = 0
    """Cached blocks dropped to make room, since the pool was made."""
    leases: int = 0
    """Requests that hold a prefix and do not run yet."""
    escrows: int = 0
    """Requests that are promised room."""


def take_census(cache: BlockCache) -> Census:
    free, cached, quarantined = cache._pool.free, cache.cached_blocks, cache.quarantined_blocks
    holds = cache._holds.values()
    return Census(
        free=free,
        cached=cached,
        held=cache.pool_blocks - free - cached - quarantined,
        quarantined=quarantined,
        escrowed=cache._escrowed,
        evicted=cache._tree.evicted,
        leases=sum(hold.phase is not Phase.OWNED for hold in holds),
        escrows=sum(hold.escrow > 0 for hold in holds),
    )
