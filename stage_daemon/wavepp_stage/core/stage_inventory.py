"""What a stage lists when a controller asks what it has.

Owns the putting together only: holds and counts are the cache's, orders are the formation's. Called
by machine.py, under the shell's mutex; changes nothing.
"""

from __future__ import annotations

from wavepp_proto.terms import Capacity, Fence, Inventory, RoundOrdinal, WaveOrdinal
from wavepp_stage.core.announcements import Announcements
from wavepp_stage.core.cache_manager import CacheManager
from wavepp_stage.core.served_formation import ServedFormation

NO_CAPACITY = Capacity(0, 0, 0)
"""Of a stage that never joined."""


def list_inventory(
    fence: Fence, cache: CacheManager | None, announcements: Announcements, serving: ServedFormation | None
) -> Inventory:
    """Every hold, announcement and order of this stage; zeros before its first join."""
    return Inventory(
        fence,
        holds=cache.inventory() if cache else (),
        announced=announcements.keys(),
        last_round=serving.rounds.last if serving else RoundOrdinal(0),
        last_wave=serving.waves.retired if serving else WaveOrdinal(0),
        running_hash=serving.waves.running_hash if serving else b"",
        capacity=cache.capacity() if cache else NO_CAPACITY,
        pool_blocks=cache.pool_blocks if cache else 0,
        cached_blocks=cache.cached_blocks if cache else 0,
        quarantined_blocks=cache.quarantined_blocks if cache else 0,
        state_slots=cache.state_slots if cache else 0,
        cached_states=cache.cached_states if cache else 0,
        quarantined_states=cache.quarantined_states if cache else 0,
        host_pool_blocks=cache.host_pool_blocks if cache else 0,
        host_cached_blocks=cache.host_cached_blocks if cache else 0,
    )
