"""What finished requests have published, until the digests say so.

A wave is published on a stage before it is sent on, so the last stage's report of a request's final
chunk means that every stage has published its full blocks, and the snapshots it was told to take.
Digests take a few milliseconds more; a request that follows at once would otherwise be hinted short.
Like any hint this binds nobody: if a stage has evicted meanwhile, votes say so. Owns the last few
chains of one formation. Called by `admission`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from wavepp_proto.digest import Hashes

KEEP_S = 1.0
"""Far longer than a digest takes; after that the index alone is right."""
KEEP_CHAINS = 32


@dataclass(frozen=True, slots=True)
class _Published:
    until: float
    chain: Hashes
    snapshots: tuple[int, ...]
    """Places of its snapshots, in blocks, ascending."""


class FreshChains:
    def __init__(self) -> None:
        self._chains: deque[_Published] = deque(maxlen=KEEP_CHAINS)
        self.version = 0

    def finished(self, chain: Hashes, now: float, snapshots: Iterable[int] = ()) -> None:
        """Every stage has published all blocks of `chain` (short hashes, shape [full blocks]); recurrent ones have
        a snapshot after each of `snapshots` (blocks)."""
        if chain.size:
            self._chains.append(_Published(now + KEEP_S, chain, tuple(sorted(snapshots))))
            self.version += 1

    def extend(self, chain: Hashes, blocks: int, now: float) -> int:
        """Leading blocks of `chain` believed resident everywhere, given that `blocks` are known to be."""
        self._forget(now)
        size, wanted = chain.size, hash_at(chain, blocks)
        for recent in self._chains:
            if blocks >= size:
                break
            # chained hashes: equal at one place means equal at every place before it
            if hash_at(recent.chain, blocks) == wanted:
                blocks = common_blocks(chain, recent.chain, blocks + 1)
                wanted = hash_at(chain, blocks)
        return blocks

    def snapshot_blocks(self, chain: Hashes, blocks: int, most: int, now: float) -> int:
        """Deepest place of at most `most` blocks believed to have a snapshot everywhere, given that `blocks` has."""
        self._forget(now)
        for recent in self._chains:
            for place in reversed(recent.snapshots):
                if place <= blocks:
                    break
                if place <= min(most, recent.chain.size) and recent.chain[place - 1] == chain[place - 1]:
                    blocks = place
                    break
        return blocks

    def _forget(self, now: float) -> None:
        while self._chains and self._chains[0].until < now:
            self._chains.popleft()


def hash_at(chain: Hashes, place: int) -> int | None:
    """None beyond the end. A Python integer: comparing numpy's own scalars costs five times as much."""
    return chain.item(place) if place < chain.size else None


def common_blocks(chain: Hashes, other: Hashes, low: int) -> int:
    """Length of the common prefix of two chains, at least `low`, by bisection."""
    high = min(chain.size, other.size)
    while low < high:
        middle = (low + high + 1) // 2
        if chain.item(middle - 1) == other.item(middle - 1):
            low = middle
        else:
            high = middle - 1
    return low
