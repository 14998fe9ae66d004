"""Least-recently-used order of what may be evicted: leaves of a tier, or snapshots.

Owns a lazy heap: at most one entry a node, whose stamp may be older than the node's own. The caller
(tier.py, state_pool.py) checks a popped entry and pushes it again if the leaf was used since; a stamp only
grows, so the first entry that is up to date is the least recently used leaf.
"""

from __future__ import annotations

import heapq

from wavepp_proto.errors import InternalError


class LeafQueue:
    """Heap of (stamp, node) for nodes 0 <= node < size."""

    def __init__(self, size: int) -> None:
        self._heap: list[tuple[int, int]] = []
        self._queued = bytearray(size)

    def __len__(self) -> int:
        return len(self._heap)

    def __contains__(self, node: int) -> bool:
        return bool(self._queued[node])

    def push(self, stamp: int, node: int) -> None:
        """Queue `node`; a node that is queued already keeps its entry."""
        if not self._queued[node]:
            self._queued[node] = 1
            heapq.heappush(self._heap, (stamp, node))

    def pop(self) -> tuple[int, int]:
        """The entry with the oldest stamp."""
        if not self._heap:
            raise InternalError("nothing can be evicted although something was counted as cached", field="cached")
        stamp, node = heapq.heappop(self._heap)
        self._queued[node] = 0
        return stamp, node
