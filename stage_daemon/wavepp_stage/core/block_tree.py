"""The tree of published blocks: what one stage can reuse (DESIGN.md).

A node stands for a whole prefix: its full hash vouches for every block above it. A node exists only
while its parent does, so residency along a chain is monotone and the deepest resident block is found
by bisection. Holding a node means holding its whole chain, so references are monotone too: a node
without references has no held descendant. A chain is on the device down to some depth, below that on
the host: a node leaves the device only after its children.

Owns nodes, references, both tiers' places and the free host blocks. Does not own free device blocks
(block_pool.py), copies (copies.py), escrow or holds (block_cache.py). residency.py is the caller.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wavepp_proto.errors import InternalError
from wavepp_stage.core.block_hashes import FULL, BlockHashes, Shorts
from wavepp_stage.core.block_pool import Blocks
from wavepp_stage.core.id_stack import IdStack
from wavepp_stage.core.tier import NOWHERE, Mask, Nodes, Tier

ROOT = 0
RUN = 64
"""A node whose depth is a multiple of RUN keeps the ids of the RUN nodes that end in it, so that a
chain of 6,250 nodes is gathered from 98 arrays instead of being walked."""
PIECE = 8
"""Between those, every PIECE-th node keeps the PIECE nodes that end in it: the rest of a chain is not walked either."""
NO_NODES: Nodes = np.empty(0, dtype=np.int64)
NO_BLOCKS: Blocks = np.empty(0, dtype=np.int32)
_UNPLACED = -2
"""On the host tier, its block not chosen yet: only inside `evict`."""


@dataclass(frozen=True, slots=True, eq=False)
class Evicted:
    """What `evict` did, as arrays; `blocks` are the caller's now."""

    blocks: Blocks
    """Device blocks, in eviction order."""
    moved: Nodes
    """Nodes that are on the host now."""
    sources: Blocks
    """Device blocks of `moved`, to be copied before anything overwrites them."""
    targets: Blocks
    """Host blocks of `moved`."""
    dropped: Nodes
    """Nodes that are gone, children before parents."""


class BlockTree:
    """At most `device` + `host` nodes below a virtual root, which holds no block and is always resident."""

    def __init__(self, device: int, host: int = 0) -> None:
        size = device + host
        self.resident = 0
        """Nodes on either tier."""
        self.host_blocks = host
        self._parent: Nodes = np.zeros(size + 1, dtype=np.int64)
        self._depth = np.zeros(size + 1, dtype=np.int32)
        self._refs = np.zeros(size + 1, dtype=np.int32)
        self._stamp = np.zeros(size + 1, dtype=np.int64)
        self.device = Tier(self._parent, self._refs, self._stamp)
        self.host = Tier(self._parent, self._refs, self._stamp)
        self._full: npt.NDArray[np.void] = np.zeros(size + 1, dtype=FULL)
        self._short: Shorts = np.zeros(size + 1, dtype=np.uint64)
        self._alive = np.zeros(size + 1, dtype=np.bool_)
        self._unused = IdStack(ROOT + 1, size)
        self._unused_hosts = IdStack(0, host)
        self._index: dict[int, int] = {}
        self._runs: dict[int, Nodes] = {}
        self._broken: dict[int, int] = {}
        """Nodes that are lost but still held, with their host block: nobody finds them any more."""
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
        return self._line(node, self._depth.item(node))

    def _line(self, node: int, length: int) -> Nodes:
        """The last `length` nodes of the chain that ends in `node`: all of it, or back to a multiple of RUN."""
        parent_of, runs = self._parent.item, self._runs
        tail: list[int] = []
        pieces: list[Nodes] = []
        while length:
            run = runs.get(node)
            if run is None:  # only before the first run: those above it lie end to end
                tail.append(node)
                length -= 1
                node = parent_of(node)
            else:
                pieces.append(run)
                length -= len(run)
                node = parent_of(run.item(0))
        pieces.reverse()
        pieces.append(np.array(tail[::-1], dtype=np.int64))
        return np.concatenate(pieces)

    def chain_of(self, hashes: BlockHashes, depth: int) -> Nodes:
        """All nodes of the prompt's first `depth` blocks, which are resident."""
        node = self.node_at(hashes, depth)
        if node is None:
            raise InternalError("a block above a resident one is missing", field="depth", value=depth)
        return self.chain(node)

    def blocks(self, nodes: Nodes) -> Blocks:
        """Device blocks of `nodes`, which are on the device."""
        return self.device.block[nodes]

    def on_device(self, nodes: Nodes) -> int:
        """How many of a chain's `nodes` are on the device: its first ones."""
        return int(np.count_nonzero(self.device.has(nodes))) if self.host.resident or self._broken else len(nodes)

    def usable(self, nodes: Nodes) -> int:
        """How many of a held chain's first nodes are not lost."""
        return int(np.count_nonzero(self._alive[nodes])) if self._broken else len(nodes)

    def shorts(self, nodes: Nodes) -> Shorts:
        return self._short[nodes]

    def resident_hashes(self) -> Shorts:
        """Short hashes of all nodes, an atomic copy in no meaningful order."""
        return self._short[self._alive]

    @property
    def torn(self) -> bool:
        """Some held node is lost."""
        return bool(self._broken)

    @property
    def free_host_blocks(self) -> int:
        return len(self._unused_hosts)

    # --- holding ----------------------------------------------------------------------------------

    def held_by_others(self, nodes: Nodes, mine: int) -> int:
        """How many device blocks of `nodes` stay held when `mine` (0 or 1) references of each are taken away."""
        return int(np.count_nonzero(self._refs[nodes[: self.on_device(nodes)]] > mine))

    def hold(self, nodes: Nodes) -> None:
        """Add one reference to each of `nodes` (distinct, with their ancestors held or included)."""
        counts = self._refs[nodes]
        self._count_cached(nodes, counts, -1)
        counts += 1
        self._refs[nodes] = counts

    def drop(self, nodes: Nodes) -> None:
        """Take one reference from each of `nodes`, the lower end of a held chain; marks their use."""
        if not len(nodes):
            return
        counts = self._refs[nodes]
        counts -= 1
        self._refs[nodes] = counts
        nodes, counts = self._bury(nodes, counts)
        if not len(nodes):
            return
        self._count_cached(nodes, counts, 1)
        self._clock += 1
        self._stamp[nodes] = self._clock
        above = self.on_device(nodes)
        if above:
            self.device.offer(int(nodes[above - 1]))
        if above < len(nodes):
            self.host.offer(int(nodes[-1]))

    def _count_cached(self, nodes: Nodes, counts: npt.NDArray[np.int32], sign: int) -> None:
        """Those of `nodes` whose count is 0 begin (1) or cease (-1) to be cached."""
        above = self.on_device(nodes)
        self.device.cached += sign * (above - int(np.count_nonzero(counts[:above])))
        self.host.cached += sign * (len(nodes) - above - int(np.count_nonzero(counts[above:])))

    def _bury(self, nodes: Nodes, counts: npt.NDArray[np.int32]) -> tuple[Nodes, npt.NDArray[np.int32]]:
        """Give back the lost ones among a chain's `nodes` that nobody holds any more; the others."""
        sound = self.usable(nodes)
        for node, count in zip(nodes[sound:].tolist(), counts[sound:].tolist(), strict=True):
            if not count:
                self._unused_hosts.give(np.array([self._broken.pop(node)]))
                self._unused.give(np.array([node]))
        return nodes[:sound], counts[:sound]

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
        self._refs[nodes] = 1
        self.device.put(nodes, blocks[:count])
        self._full[nodes] = hashes.full[first : first + count]
        self._short[nodes] = hashes.shorts[first : first + count]
        self._alive[nodes] = True
        self._keep_runs(parent, nodes)
        return nodes

    def evict(self, count: int) -> Evicted:
        """Take `count` (<= device.cached) nodes off the device: to the host as far as it has room for them, where
        the least recently used leaf gives way first, be it an old resident or one of them."""
        nodes, blocks = self.device.peel(count)
        if not self.host_blocks:
            self._forget(nodes)
            return Evicted(blocks, NO_NODES, NO_BLOCKS, NO_BLOCKS, nodes)
        self.host.put(nodes, _UNPLACED)
        for node in nodes[self.host.children[nodes] == 0].tolist():
            self.host.offer(node)
        dropped, hosts = self.host.peel(max(0, count - len(self._unused_hosts)))
        self._unused_hosts.give(hosts[hosts != _UNPLACED])
        kept = self.host.block[nodes] == _UNPLACED
        moved = nodes[kept]
        targets = self._unused_hosts.take(len(moved)).astype(np.int32)
        self.host.block[moved] = targets
        self._forget(dropped)
        return Evicted(blocks, moved, blocks[kept], targets, dropped)

    def bring_back(self, nodes: Nodes, blocks: Blocks) -> None:
        """Host residents, parents first, are on the device from now on; their host blocks are free."""
        self._unused_hosts.give(self.host.remove(nodes))
        self.device.put(nodes, blocks)

    def lose(self, roots: Nodes) -> Nodes:
        """The contents of host residents `roots` are lost: they and all below them are gone from every look-up,
        for their holders too (`usable`). The lost nodes, children before parents."""
        lost = self._below(roots)
        if not len(lost):
            return lost
        held = self._refs[lost] > 0
        hosts = self.host.remove(lost)
        for node in self._parent[lost].tolist():
            self.host.offer(node)
        self._forget(lost, keep=held)
        self._broken.update(zip(lost[held].tolist(), hosts[held].tolist(), strict=True))
        self._unused_hosts.give(hosts[~held])
        return lost

    def _below(self, roots: Nodes) -> Nodes:
        """`roots` and every descendant, deepest first: all on the host. Walks the whole tier; only a failed copy
        asks for it."""
        residents = np.nonzero(self.host.block != NOWHERE)[0]
        order = residents[np.argsort(self._depth[residents], kind="stable")].tolist()
        doomed = set(roots.tolist())
        for node in order:
            if self._parent.item(node) in doomed:
                doomed.add(node)
        return np.array([node for node in reversed(order) if node in doomed], dtype=np.int64)

    def _forget(self, nodes: Nodes, keep: Mask | None = None) -> None:
        """Nobody finds `nodes` any more. Ids in the mask `keep` are not given to other nodes yet."""
        self._alive[nodes] = False
        self.resident -= len(nodes)
        for key in self._short[nodes].tolist():
            del self._index[key]
        for node in nodes[self._depth[nodes] % PIECE == 0].tolist():
            del self._runs[node]
        self._unused.give(nodes if keep is None else nodes[~keep])

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
        """Store the run of every new node that keeps one."""
        known = self._depth.item(parent) % RUN
        line = np.concatenate([self._line(parent, known), nodes])
        for end in range(known // PIECE * PIECE + PIECE, len(line) + 1, PIECE):
            length = PIECE if end % RUN else RUN
            self._runs[line.item(end - 1)] = line[end - length : end].copy()
