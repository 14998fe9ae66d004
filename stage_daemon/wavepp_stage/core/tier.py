"""One tier of a stage's cache: which tree nodes have their block here, and in what order they leave.

Device and host are two of these over the same nodes. A node leaves its tier leaf first, least recently
used first, where a leaf is a node nobody holds that has no child on the same tier. Owns block numbers
by node, counts and eviction order; links, references and stamps are the tree's (block_tree.py, the
only caller), which shares its arrays.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from wavepp_stage.core.block_pool import Blocks
from wavepp_stage.core.leaf_queue import LeafQueue

Nodes = npt.NDArray[np.int64]
"""Node ids; a chain is ordered from the root down."""
Mask = npt.NDArray[np.bool_]
NOWHERE = -1
"""No block on this tier."""


class Tier:
    """Nodes 0 <= node < len(parent); `parent`, `refs` and `stamp` are the tree's own arrays."""

    def __init__(self, parent: Nodes, refs: npt.NDArray[np.int32], stamp: npt.NDArray[np.int64]) -> None:
        self.block: Blocks = np.full(len(parent), NOWHERE, dtype=np.int32)
        self.children = np.zeros(len(parent), dtype=np.int32)
        """Children of a node that are on this tier, whatever tier the node itself is on."""
        self.leaves = LeafQueue(len(parent))
        self.resident = 0
        self.cached = 0
        """Residents without references: what eviction can take away."""
        self._parent, self._refs, self._stamp = parent, refs, stamp

    def has(self, nodes: Nodes) -> Mask:
        """Which of the nodes are on this tier."""
        mask: Mask = self.block[nodes] != NOWHERE
        return mask

    def put(self, nodes: Nodes, blocks: Blocks | int) -> None:
        """Bring distinct `nodes` in, none of which is here."""
        self.block[nodes] = blocks
        np.add.at(self.children, self._parent[nodes], 1)
        self.resident += len(nodes)
        self.cached += len(nodes) - int(np.count_nonzero(self._refs[nodes]))

    def remove(self, nodes: Nodes) -> Blocks:
        """Take distinct residents out, whoever holds them; their blocks. Parents may become leaves: offer them."""
        blocks = self.block[nodes]
        self.block[nodes] = NOWHERE
        np.subtract.at(self.children, self._parent[nodes], 1)
        self.resident -= len(nodes)
        self.cached -= len(nodes) - int(np.count_nonzero(self._refs[nodes]))
        return blocks

    def offer(self, node: int) -> None:
        """Queue `node` for eviction if it is a leaf nobody holds."""
        if self._is_leaf(node):
            self.leaves.push(self._stamp.item(node), node)

    def peel(self, count: int) -> tuple[Nodes, Blocks]:
        """Take `count` (<= cached) nodes out in eviction order; the nodes and their blocks."""
        nodes: list[int] = []
        blocks: list[int] = []
        while len(nodes) < count:
            stamp, leaf = self.leaves.pop()
            if not self._is_leaf(leaf):
                continue
            if self._stamp.item(leaf) != stamp:
                self.leaves.push(self._stamp.item(leaf), leaf)
                continue
            self._peel_branch(leaf, count, nodes, blocks)
        self.resident -= len(nodes)
        self.cached -= len(nodes)
        return np.array(nodes, dtype=np.int64), np.array(blocks, dtype=np.int32)

    def _peel_branch(self, node: int, count: int, nodes: list[int], blocks: list[int]) -> None:
        """Take out `node` and the ancestors that eviction would take next anyway: last used with it,
        with no other child here. Saves the queue a push and a pop for each."""
        parent_of, refs, children, stamp_of, block_of = (
            self._parent.item, self._refs.item, self.children.item, self._stamp.item, self.block.item,
        )  # fmt: skip
        stamp = stamp_of(node)
        while True:
            nodes.append(node)
            blocks.append(block_of(node))
            self.block[node] = NOWHERE
            node = parent_of(node)
            self.children[node] -= 1
            if len(nodes) == count or block_of(node) == NOWHERE:
                break
            if refs(node) or children(node) or stamp_of(node) != stamp:
                break
        self.offer(node)

    def _is_leaf(self, node: int) -> bool:
        return self.block.item(node) != NOWHERE and not self._refs.item(node) and not self.children.item(node)
