"""What finished requests have published, until the digests say so.

A wave is published on a stage before it is sent on, so the last stage's report of a request's final
chunk means that every stage has published its full blocks. Digests take a few milliseconds more; a
request that follows at once would otherwise be hinted short. Like any hint this binds nobody: if a
stage has evicted meanwhile, votes say so. Owns the last few chains of one formation. Called by
`admission`.
"""

from __future__ import annotations

from collections import deque

from wavepp_proto.digest import Hashes

KEEP_S = 1.0
"""Far longer than a digest takes; after that the index alone is right."""
KEEP_CHAINS = 32


class FreshChains:
    def __init__(self) -> None:
        self._chains: deque[tuple[float, Hashes]] = deque(maxlen=KEEP_CHAINS)
        self.version = 0

    def finished(self, chain: Hashes, now: float) -> None:
        """Every stage has published all blocks of `chain` (short hashes, shape [full blocks])."""
        if chain.size:
            self._chains.append((now + KEEP_S, chain))
            self.version += 1

    def extend(self, chain: Hashes, blocks: int, now: float) -> int:
        """Leading blocks of `chain` believed resident everywhere, given that `blocks` are known to be."""
        while self._chains and self._chains[0][0] < now:
            self._chains.popleft()
        for _, recent in self._chains:
            # chained hashes: equal at one place means equal at every place before it
            if blocks < min(recent.size, chain.size) and recent[blocks] == chain[blocks]:
                blocks = _common(chain, recent, blocks + 1)
        return blocks


def _common(chain: Hashes, recent: Hashes, low: int) -> int:
    """Length of the common prefix, at least `low`, by bisection."""
    high = min(chain.size, recent.size)
    while low < high:
        middle = (low + high + 1) // 2
        if chain[middle - 1] == recent[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
