"""Plain data between the compatibility module and the rest of the adapter.

Owns no behaviour and names nothing of TensorRT-LLM, so that everything above `compat.py` can be read, typed and
tested without it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExecutorArgs:
    """What an executor is made for; every stage says the same but for its environment."""

    model: str
    dtype: str
    ranks: int
    layers_per_stage: tuple[int, ...]
    lanes: int
    wave_tokens: int
    window: int
    block_tokens: int
    pool_blocks: int
    host_bytes: int
    events: int


@dataclass(frozen=True, slots=True)
class Room:
    """Blocks of one tier."""

    total: int
    free: int
    evictable: int

    @property
    def available(self) -> int:
        return self.free + self.evictable


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """One thing that happened to blocks."""

    number: int
    """Consecutive: a gap means that the buffer overflowed."""
    stored: tuple[tuple[str, int], ...] = ()
    """(key, tier) of blocks that became resident, parents first."""
    removed: tuple[str, ...] = ()
    """Keys of blocks that are gone from every tier."""
    moved: tuple[str, int] | None = None
    """(key, tier) of a block that changed its tier."""
