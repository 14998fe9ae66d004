"""The paged cache of the emulated engine: what a protocol bug cannot pass unseen.

Owns cells and canary tags of one stage and the checks of what a row reads. Knows no time and no wave.
Called by `emulated.py` on the executor thread.

    block of one stage    | state ^ salt | state ^ salt | ...      B cells, one per token
    tag of that block     short hash of the chain up to it once full; POISON until then

The salt differs by stage, so a block of one stage is never right on another.
"""

from __future__ import annotations

import numpy as np

from wavepp_stage.core.work import RowWork
from wavepp_stage.engine.emulated_model import Words, splitmix_one

POISON = 0xDEADBEEFFEEDFACE
"""Tag of a block that was never written, or is not full."""
WORD_BYTES = 8


class RowRefused(Exception):
    """This row read or was told something wrong; its wave goes on without it."""


class CanaryCache:
    """`pool_blocks` blocks of `block_tokens` cells, all allocated at once, every tag poisoned."""

    def __init__(self, pool_blocks: int, block_tokens: int, stage: int) -> None:
        self.block_tokens = block_tokens
        self._cells: Words = np.zeros((pool_blocks, block_tokens), np.uint64)
        self._tags: Words = np.full(pool_blocks, POISON, np.uint64)
        self._salt = splitmix_one(stage + 1)

    def check_table(self, row: RowWork) -> None:
        size, end = self.block_tokens, row.start + row.length
        if row.length < 1 or row.start < 0:
            raise RowRefused(f"chunk [{row.start}, {end}) is empty or negative")
        if len(row.blocks) != -(-end // size):
            raise RowRefused(f"{len(row.blocks)} blocks of {size} tokens for [0, {end})")
        if row.blocks.min() < 0 or row.blocks.max() >= len(self._tags):
            raise RowRefused(f"block table leaves the pool of {len(self._tags)} blocks")
        if len(row.prefix_hashes) != end // size:
            raise RowRefused(f"{len(row.prefix_hashes)} prefix hashes for {end // size} full blocks")

    def check_canaries(self, row: RowWork) -> None:
        """Every full block that is read carries the tag of exactly this prefix."""
        full = row.start // self.block_tokens
        tags = self._tags[row.blocks[:full]]
        wrong = np.flatnonzero(tags != row.prefix_hashes[:full])
        if wrong.size:
            at = int(wrong[0])
            came = "unwritten" if int(tags[at]) == POISON else f"{int(tags[at]):#018x}"
            wanted = f"{int(row.prefix_hashes[at]):#018x}"
            raise RowRefused(f"bad canary in block {at} (device block {int(row.blocks[at])}): {came}, not {wanted}")

    def state_before(self, row: RowWork) -> int:
        """The cached state of the token ahead of the chunk; 0 ahead of the prompt."""
        if row.start == 0:
            return 0
        size, last = self.block_tokens, row.start - 1
        return int(self._cells[row.blocks[last // size], last % size]) ^ self._salt

    def write(self, row: RowWork, states: Words) -> None:
        size, end = self.block_tokens, row.start + row.length
        positions = np.arange(row.start, end)
        self._cells[row.blocks[positions // size], positions % size] = states ^ np.uint64(self._salt)
        first, full = row.start // size, end // size
        self._tags[row.blocks[first:full]] = row.prefix_hashes[first:full]
        # The last block is not full: nobody may take it for a whole prefix, nor for what it held before.
        self._tags[row.blocks[full:]] = POISON
