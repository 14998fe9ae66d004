"""The tree of published blocks: what one stage can reuse (DESIGN.md section 5).

A node stands for a whole prefix: its full hash vouches for every block above it. A node exists only
while its parent does, so residency along a chain is monotone and the deepest resident block is found
by bisection. Holding a node means holding its whole chain, so references are monotone too: a node
without references has no held descendant and may be evicted, leaf first, least recently used first.

Owns nodes, references and eviction order. Does not own block ids (block_pool.py), escrow or holds
(block_cache.py, the only caller). Node ids are not block ids: a node may outlive its device block.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from wavepp_proto.errors import InternalError
from wavepp_stage.core.block_hashes import FULL, BlockHashes, Shorts
from wavepp_stage.core.block_pool import Blocks
from wavepp_stage.core.id_stack import IdStack
from wavepp_stage.core.leaf_queue import LeafQueue

Nodes = npt.NDArray[np.int64]
"""Node ids; a chain is ordered from the root down."""
ROOT = 0
RUN = 64
"""A node whose depth is a multiple of RUN keeps the ids of the RUN nodes that end in it, so that a
chain of 6,250 nodes is gathered from 98 arrays instead of being walked."""
NO_NODES: Nodes = np.empty(0, dtype=np.int64)


class BlockTree:
    """At most `size` nodes below a virtual root, which holds no block and is always resident."""

    def __init__(self, size: int) -> None:
        self.cached = 0
        """Nodes without references: what eviction can give back."""
        self.resident = 0
        self.evicted = 0
        """Nodes evicted so far."""
        self._parent: Nodes = np.zeros(size + 1, dtype=np.int64)
        self._depth = np.zeros(size + 1, dtype=np.int32)
        self._refs = np.zeros(size + 1, dtype=np.int32)
        self._children = np.zeros(size + 1, dtype=np.int32)
        self._stamp = np.zeros(size + 1, dtype=np.int64)
        self._block: Blocks = np.zeros(size + 1, dtype=np.int32)
        self._full: npt.NDArray[np.void] = np.zeros(size + 1, dtype=FULL)
        self._short: Shorts = np.zeros(size + 1, dtype=np.uint64)
        self._alive = np.zeros(size + 1, dtype=np.bool_)
        self._unused = IdStack(ROOT + 1, size)
        self._index: dict[int, int] = {}
        self._runs: dict[int, Nodes] = {}
        self._leaves = LeafQueue(size + 1)
        self._clock = 0

    # --- looking up -------------------------------------------------------------------------------

    def deepest(self, hashes: BlockHashes, limit: int) -> int:
        """How many of the first `limit` blocks of a prompt are resident (its own hit, in blocks)."""
        low, high = 0, min(limit, len(hashes))
        probe = high  # a hint is mostly right: look at its end first
        while low < high:
            if self.node_at(hashes, probe) is not None:
                low = probe
            else:
                high = probe - 1
            probe = (low + high + 1) // 2
        return low

    def node_at(self, hashes: BlockHashes, depth: int) -> int | None:
        """The node of the prompt's first `depth` blocks; None if it is not resident.

        The full hash is compared: one comparison vouches for the whole prefix."""
        if depth == 0:
            return ROOT
        node = self._index.get(hashes.shorts.item(depth - 1))
        if node is None or self._full.item(node) != hashes.full.item(depth - 1):
            return None
        return node

    def chain(self, node: int) -> Nodes:
        """All nodes from the root (excluded) down to `node`."""
        parent_of, runs = self._parent.item, self._runs
        tail: list[int] = []
        while node != ROOT and node not in runs:
            tail.append(node)
            node = parent_of(node)
        pieces = [np.array(tail[::-1], dtype=np.int64)]
        while node != ROOT:
            run = runs[node]
            pieces.append(run)
            node = parent_of(run.item(0))
        pieces.reverse()
        return np.concatenate(pieces)

    def chain_of(self, hashes: BlockHashes, depth: int) -> Nodes:
        """All nodes of the prompt's first `depth` blocks, which are resident."""
        node = self.node_at(hashes, depth)
        if node is None:
            raise InternalError("a block above a resident one is missing", field="depth", value=depth)
        return self.chain(node)

    def blocks(self, nodes: Nodes) -> Blocks:
        return self._block[nodes]

    def resident_hashes(self) -> Shorts:
        """Short hashes of all nodes, an atomic copy in no meaningful order."""
        return self._short[self._alive]

    # --- holding ----------------------------------------------------------------------------------

    def held_by_others(self, nodes: Nodes, mine: int) -> int:
        """How many of `nodes` stay held when `mine` (0 or 1) references of each are taken away."""
        return int(np.count_nonzero(self._refs[nodes] > mine))

    def hold(self, nodes: Nodes) -> None:
        """Add one reference to each of `nodes` (distinct, with their ancestors held or included)."""
        counts = self._refs[nodes]
        self.cached -= len(nodes) - int(np.count_nonzero(counts))
        counts += 1
        self._refs[nodes] = counts

    def drop(self, nodes: Nodes) -> None:
        """Take one reference from each of `nodes`, the lower end of a held chain; marks their use."""
        if not len(nodes):
            return
        counts = self._refs[nodes]
        counts -= 1
        self._refs[nodes] = counts
        self.cached += len(nodes) - int(np.count_nonzero(counts))
        self._clock += 1
        self._stamp[nodes] = self._clock
        self._offer(int(nodes[-1]))

    # --- growing and shrinking --------------------------------------------------------------------

    def extend(self, parent: int, hashes: BlockHashes, first: int, blocks: Blocks) -> Nodes:
        """Add nodes for blocks `first`, `first + 1`, ... of a prompt below `parent`, one reference each.

        None of them may be resident. A short hash that is taken by another prefix ends the growth
        there: the nodes really added come back, maybe fewer than `blocks`."""
        keys = hashes.shorts[first : first + len(blocks)].tolist()
        count = self._untaken(keys)
        if not count:
            return NO_NODES
        self.resident += count
        nodes = self._unused.take(count)
        self._index.update(zip(keys[:count], nodes.tolist(), strict=True))
        self._parent[nodes[0]], self._parent[nodes[1:]] = parent, nodes[:-1]
        depth = self._depth.item(parent)
        self._depth[nodes] = np.arange(depth + 1, depth + 1 + count)
        self._children[parent] += 1
        self._children[nodes[:-1]], self._children[nodes[-1]] = 1, 0
        self._refs[nodes] = 1
        self._block[nodes] = blocks[:count]
        self._full[nodes] = hashes.full[first : first + count]
        self._short[nodes] = hashes.shorts[first : first + count]
        self._alive[nodes] = True
        self._keep_runs(parent, nodes)
        return nodes

    def evict(self, count: int) -> tuple[Blocks, Shorts]:
        """Drop `count` (<= cached) nodes: their blocks and short hashes, in order of eviction."""
        doomed: list[int] = []
        while len(doomed) < count:
            stamp, leaf = self._leaves.pop()
            if not self._evictable_leaf(leaf):
                continue
            if self._stamp.item(leaf) != stamp:
                self._leaves.push(self._stamp.item(leaf), leaf)
                continue
            self._evict_branch(leaf, count, doomed)
        nodes = np.array(doomed, dtype=np.int64)
        self._forget(nodes)
        self.evicted += len(nodes)
        return self._block[nodes], self._short[nodes]

    def _evict_branch(self, node: int, count: int, doomed: list[int]) -> None:
        """Doom `node` and the ancestors that eviction would take next anyway: last used with it,
        with no other child. Saves the queue a push and a pop for each."""
        parent_of, refs, children, stamp_of = (
            self._parent.item, self._refs.item, self._children.item, self._stamp.item,
        )  # fmt: skip
        stamp = stamp_of(node)
        while True:
            doomed.append(node)
            self._alive[node] = False
            node = parent_of(node)
            self._children[node] -= 1
            if len(doomed) == count or node == ROOT or refs(node) or children(node) or stamp_of(node) != stamp:
                break
        self._offer(node)

    def _forget(self, nodes: Nodes) -> None:
        self.cached -= len(nodes)
        self.resident -= len(nodes)
        for key in self._short[nodes].tolist():
            del self._index[key]
        for node in nodes[self._depth[nodes] % RUN == 0].tolist():
            del self._runs[node]
        self._unused.give(nodes)

    def _evictable_leaf(self, node: int) -> bool:
        return self._alive.item(node) and not self._refs.item(node) and not self._children.item(node)

    def _offer(self, node: int) -> None:
        """Queue `node` for eviction if it is a leaf nobody holds."""
        if node != ROOT and self._evictable_leaf(node):
            self._leaves.push(self._stamp.item(node), node)

    def _untaken(self, keys: list[int]) -> int:
        """Length of the longest prefix of `keys` that are free in the index and distinct."""
        if self._index.keys().isdisjoint(keys) and len(set(keys)) == len(keys):
            return len(keys)
        seen: set[int] = set()
        for count, key in enumerate(keys):
            if key in self._index or key in seen:
                return count
            seen.add(key)
        return len(keys)

    def _keep_runs(self, parent: int, nodes: Nodes) -> None:
        """Store the run of every new node whose depth is a multiple of RUN."""
        above: list[int] = []
        for _ in range(self._depth.item(parent) % RUN):
            above.append(parent)
            parent = self._parent.item(parent)
        line = np.concatenate([np.array(above[::-1], dtype=np.int64), nodes])
        for end in range(RUN, len(line) + 1, RUN):
            self._runs[line.item(end - 1)] = line[end - RUN : end].copy()
