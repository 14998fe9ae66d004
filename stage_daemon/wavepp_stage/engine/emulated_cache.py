"""The paged cache of the emulated engine: what a protocol bug cannot pass unseen.

Owns cells and canary tags of one stage, on the device and on the host, and the checks of what a row
reads. Knows no time, no thread and no wave. Called by `emulated_band.py`.

    block of one stage    | state ^ salt | state ^ salt | ...      B cells, one per token
    tag of that block     short hash of the chain up to it once full; POISON until then

The salt differs by daemon, so a block of one is never right on another. A copy between the tiers
moves cells and tag and poisons where they came from: reading the wrong tier shows, and so does reading
before the copy is complete.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wavepp_proto.errors import EngineFault
from wavepp_stage.core.work import BlockTable, CopyDirection, CopyLot, RowWork
from wavepp_stage.engine.emulated_model import Words, splitmix_one

POISON = 0xDEADBEEFFEEDFACE
"""Tag of a block that was never written, is not full, or was moved to the other tier."""
NON_FINITE = 0x7FF80000BAD0BAD0
"""Cell or state of a row that computed NaN."""
WORD_BYTES = 8


class RowRefused(Exception):
    """This row read or was told something wrong; its wave goes on without it."""


class RowNotFinite(RowRefused):
    """The row computed what stands for NaN here."""


@dataclass(frozen=True, slots=True)
class _Tier:
    name: str
    cells: Words
    """Shape [blocks, B]."""
    tags: Words
    """Shape [blocks]."""

    @classmethod
    def of(cls, name: str, blocks: int, block_tokens: int) -> _Tier:
        return cls(name, np.zeros((blocks, block_tokens), np.uint64), np.full(blocks, POISON, np.uint64))


class CanaryCache:
    """Blocks of `block_tokens` cells on the device and on the host, all allocated at once, every tag poisoned."""

    def __init__(self, pool_blocks: int, block_tokens: int, place: int, host_pool_blocks: int = 0) -> None:
        self.block_tokens = block_tokens
        self._device = _Tier.of("device", pool_blocks, block_tokens)
        self._host = _Tier.of("host", host_pool_blocks, block_tokens)
        self._salt = splitmix_one(place + 1)

    def check_canaries(self, row: RowWork) -> None:
        """Every full block that is read carries the tag of exactly this prefix."""
        full = row.start // self.block_tokens
        tags = self._device.tags[row.blocks[:full]]
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
        block = row.blocks[last // size]
        cell = int(self._device.cells[block, last % size])
        if cell == NON_FINITE:
            raise RowRefused(f"device block {int(block)} holds values that are not finite")
        return cell ^ self._salt

    def write(self, row: RowWork, states: Words) -> None:
        size, end = self.block_tokens, row.start + row.length
        positions = np.arange(row.start, end)
        self._device.cells[row.blocks[positions // size], positions % size] = states ^ np.uint64(self._salt)
        first, full = row.start // size, end // size
        self._device.tags[row.blocks[first:full]] = row.prefix_hashes[first:full]
        # The last block is not full: nobody may take it for a whole prefix, nor for what it held before.
        self._device.tags[row.blocks[full:]] = POISON

    def spoil(self, row: RowWork) -> None:
        """What the row wrote is NaN."""
        size = self.block_tokens
        positions = np.arange(row.start, row.start + row.length)
        self._device.cells[row.blocks[positions // size], positions % size] = NON_FINITE

    def begin_copy(self, lot: CopyLot) -> None:
        """From here to `end_copy` the targets hold nothing that may be read."""
        _, _, target, written = self._ends(lot)
        target.tags[written] = POISON

    def end_copy(self, lot: CopyLot) -> None:
        """Move cells and tags. Raises EngineFault, and moves nothing, when a source is not a full block."""
        source, read, target, written = self._ends(lot)
        tags = source.tags[read]
        empty = np.flatnonzero(tags == POISON)
        if empty.size:
            block = int(read[int(empty[0])])
            raise EngineFault(
                f"{source.name} block {block} of lot {lot.number} holds no full block", field=source.name, value=block
            )
        target.cells[written] = source.cells[read]
        target.tags[written] = tags
        source.tags[read] = POISON

    def _ends(self, lot: CopyLot) -> tuple[_Tier, BlockTable, _Tier, BlockTable]:
        """(source, its blocks, target, its blocks)"""
        if lot.direction is CopyDirection.OFFLOAD:
            return self._device, lot.device, self._host, lot.host
        return self._host, lot.host, self._device, lot.device


def check_table(row: RowWork, pool_blocks: int, block_tokens: int) -> None:
    """Raises RowRefused when the row's chunk, block table and hashes do not fit each other or the pool."""
    end = row.start + row.length
    if row.length < 1 or row.start < 0:
        raise RowRefused(f"chunk [{row.start}, {end}) is empty or negative")
    if len(row.blocks) != -(-end // block_tokens):
        raise RowRefused(f"{len(row.blocks)} blocks of {block_tokens} tokens for [0, {end})")
    if row.blocks.min() < 0 or row.blocks.max() >= pool_blocks:
        raise RowRefused(f"block table leaves the pool of {pool_blocks} blocks")
    if len(row.prefix_hashes) != end // block_tokens:
        raise RowRefused(f"{len(row.prefix_hashes)} prefix hashes for {end // block_tokens} full blocks")
