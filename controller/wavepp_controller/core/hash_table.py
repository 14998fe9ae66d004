"""One map from short hash to bitmask of daemons, for one cache group of the reuse index.

Owns the entries, cut into shards so that no single step (growing, sweeping) is long, and the two ways to
look a chain up: by bisection where residency is monotone along it, and from the back through a sieve where
it is not. Knows bits, not daemons. Called by `index` only.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from wavepp_proto.digest import Hashes

SHARDS = 256
SIEVE = 1 << 16
"""Buckets of a sieve: far more than the snapshots that fit the stages' slots."""


class HashTable:
    def __init__(self, *, sparse: bool) -> None:
        """`sparse`: most blocks of a chain have no entry, and `deepest` must pass over them quickly."""
        self._shards: list[dict[int, int]] = [{} for _ in range(SHARDS)]
        self._sieve: npt.NDArray[np.uint32] | None = np.zeros(SIEVE, dtype=np.uint32) if sparse else None
        """Entries by the low bits of their hash."""

    def __len__(self) -> int:
        return sum(len(shard) for shard in self._shards)

    def masks(self) -> Iterator[int]:
        return (mask for shard in self._shards for mask in shard.values())

    def has(self, found: int, need: int) -> bool:
        return self._shards[found % SHARDS].get(found, 0) & need == need

    def depth(self, chain: Hashes, need: int) -> int:
        """Leading blocks of `chain` under all bits of `need`, given that each bit's blocks are a prefix."""
        shards = self._shards
        low, high = 0, len(chain)
        while low < high:
            middle = (low + high) // 2
            found = int(chain[middle])
            if shards[found % SHARDS].get(found, 0) & need == need:
                low = middle + 1
            else:
                high = middle
        return low

    def deepest(self, chain: Hashes, need: int) -> int:
        """Blocks up to the last one of `chain` that is under all bits of `need`; 0 if none is. Sparse tables only."""
        if self._sieve is None:
            return 0
        likely = np.flatnonzero(self._sieve[chain & np.uint64(SIEVE - 1)])
        place: int
        for place in likely[::-1].tolist():
            if self.has(int(chain[place]), need):
                return place + 1
        return 0

    def add(self, hashes: Hashes, bit: int) -> None:
        sieve = self._sieve
        for added in hashes.tolist():
            shard = self._shards[added % SHARDS]
            if sieve is not None and added not in shard:
                sieve[added % SIEVE] += 1
            shard[added] = shard.get(added, 0) | bit

    def remove(self, hashes: Hashes, bit: int) -> None:
        for removed in hashes.tolist():
            shard = self._shards[removed % SHARDS]
            left = shard.get(removed, 0) & ~bit
            if left:
                shard[removed] = left
            elif shard.pop(removed, None) is not None:
                self._dropped(removed)

    def sweep(self, at: int, keep: int) -> None:
        """Erase all bits but `keep` from one shard."""
        shard = self._shards[at]
        for found, mask in list(shard.items()):
            left = mask & keep
            if left == 0:
                del shard[found]
                self._dropped(found)
            elif left != mask:
                shard[found] = left

    def check(self) -> list[str]:
        if self._sieve is None or int(self._sieve.sum()) == len(self):
            return []
        return [f"the sieve counts {int(self._sieve.sum())} entries, there are {len(self)}"]

    def _dropped(self, found: int) -> None:
        if self._sieve is not None:
            self._sieve[found % SIEVE] -= 1
