"""What one stage's cache is made of: pools, slots and groups, as a join plan fixes them.

Owns sizes only, which never change while a cache lives; only the floor may (block_cache.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from wavepp_proto.terms import CacheGroup


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Sizes of one stage's cache."""

    pool_blocks: int
    """Device blocks; on a stage without attention layers block numbers of 0 bytes each."""
    block_tokens: int
    floor_blocks: int = 0
    """Device blocks that escrows may never touch."""
    host_pool_blocks: int = 0
    """Blocks of the host tier; 0 = none."""
    state_slots: int = 0
    """Slots of the recurrent group: each holds a working state or a snapshot."""
    groups: tuple[CacheGroup, ...] = (CacheGroup.ATTENTION,)

    @property
    def attention(self) -> bool:
        return CacheGroup.ATTENTION in self.groups

    @property
    def recurrent(self) -> bool:
        return CacheGroup.RECURRENT in self.groups
