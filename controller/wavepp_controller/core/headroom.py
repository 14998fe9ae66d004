"""Blocks of every pool that escrows leave alone, when nobody chose a number (DESIGN.md, limits).

Owns the rule. What is left alone keeps cached prefixes alive beside the requests at work: two rings' worth
of waves may be written before anything cached must go. Does not own the setting (`config.floor_blocks`);
`formation` writes the result into every join plan.
"""

from __future__ import annotations

RING_WAVES_PER_STAGE = 2
"""The ring holds 2P waves (DESIGN.md)."""
MOST_OF_POOL = 4
"""Never more than one part in so many: small pools must stay usable."""


def headroom_blocks(stages: int, wave_tokens: int, block_tokens: int, smallest_pool: int) -> int:
    """min(2 * P * M tokens in blocks, a quarter of the smallest pool); `smallest_pool` in blocks, over all daemons."""
    ring = RING_WAVES_PER_STAGE * stages * wave_tokens // block_tokens
    return min(ring, smallest_pool // MOST_OF_POOL)
