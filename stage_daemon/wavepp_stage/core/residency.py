"""What is resident on one stage: blocks on both tiers and snapshots, moved together with the digest.

Owns the order in which tree, pools, copies and digest hear of a move: whatever becomes reusable or
ceases to be is told to the feed in the same step, a node together with its snapshot; off-loading and
bringing back tell it nothing. Does not know holds: block_cache.py is the only caller and keeps every
node it needs held.

    device ──evict, room on the host──▶ host (a lot copies; resident at once, valid once the lot ended)
    host ──onboard──▶ host, incoming ──lot ended──▶ device     (the source stays until the copy is complete)
    host or device ──evict, no room──▶ gone        a copy failed ──▶ gone, with all below it
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wavepp_proto.terms import CacheGroup, Capacity, Digest
from wavepp_stage.core.block_hashes import BlockHashes
from wavepp_stage.core.block_pool import BlockPool, Blocks
from wavepp_stage.core.block_tree import NO_NODES, ROOT, BlockTree
from wavepp_stage.core.cache_shape import CacheShape
from wavepp_stage.core.copies import CopyQueue, Lot
from wavepp_stage.core.digest_feed import NOTHING, DigestFeed, Residents
from wavepp_stage.core.state_pool import StatePool
from wavepp_stage.core.tier import Mask, Nodes
from wavepp_stage.core.work import CopyDirection, CopyLot


class Residency:
    """Blocks, slots and copies of one cache; every node id is the tree's."""

    def __init__(self, shape: CacheShape, feed: DigestFeed) -> None:
        host = shape.host_pool_blocks if shape.attention else 0  # a block number without bytes needs no second tier
        nodes = shape.pool_blocks + host + 1
        self.pool = BlockPool(shape.pool_blocks)
        self.tree = BlockTree(shape.pool_blocks, host)
        self.states = StatePool(shape.state_slots if shape.recurrent else 0, nodes, self.tree.chain)
        self.copies = CopyQueue()
        self.offloaded = self.onboarded = self.dropped = 0
        """Blocks moved to the host, brought back, and gone from both tiers, so far."""
        self._feed = feed
        self._incoming = np.zeros(nodes, dtype=np.int64)
        """Number of the lot that brings a node back; 0 if none does."""
        self._writer = np.zeros(host, dtype=np.int64)
        """Number of the last lot that writes a host block."""
        feed.replaced(shape.groups)

    # --- blocks -----------------------------------------------------------------------------------

    def take_blocks(self, count: int, evict: int) -> tuple[Blocks, int]:
        """Up to `count` blocks: free ones, then at most `evict` evicted ones. The blocks, and the number of the lot
        that must end before anything is written to them (0 if none must)."""
        taken = self.pool.take(min(count, self.pool.free))
        evict = min(count - len(taken), evict)
        if not evict:
            return taken, 0
        evicted = self.tree.evict(evict)
        self._tell_gone(evicted.dropped)
        self.offloaded += len(evicted.moved)
        lots = self.copies.plan(CopyDirection.OFFLOAD, evicted.moved, evicted.sources, evicted.targets)
        for lot in lots:
            self._writer[lot.copy.host] = lot.copy.number
        return np.concatenate([taken, evicted.blocks]), lots[-1].copy.number if lots else 0

    def homeless(self, chain: Nodes) -> Nodes:
        """Nodes of a held chain that are on the host and that nobody is bringing back, from the root down."""
        below = chain[self.tree.on_device(chain) :]
        homeless: Nodes = below[self._incoming[below] == 0]
        return homeless

    def bring_back(self, nodes: Nodes, blocks: Blocks) -> None:
        """Begin to copy held, homeless `nodes` into device `blocks`, which belong to the lots until these end."""
        for lot in self.copies.plan(CopyDirection.ONBOARD, nodes, blocks, self.tree.host.block[nodes]):
            self._incoming[lot.nodes] = lot.copy.number

    def last_incoming(self, chain: Nodes) -> int:
        """Number of the last lot that a chain waits for; 0 if it waits for none."""
        below = chain[self.tree.on_device(chain) :]
        return int(self._incoming[below].max(initial=0))

    def publish(self, parent: int, hashes: BlockHashes, first: int, blocks: Blocks) -> Nodes:
        """New nodes for computed `blocks` below `parent`, held once; fewer if a short hash is taken."""
        nodes = self.tree.extend(parent, hashes, first, blocks)
        self._feed.added({CacheGroup.ATTENTION: hashes.shorts[first : first + len(nodes)]})
        return nodes

    def hand_over(self, nodes: Nodes, blocks: Blocks) -> None:
        """Held host residents are on the device from now on, in `blocks` that hold the same. A lot that was
        bringing them back does it for nothing."""
        self._incoming[nodes] = 0
        self.tree.bring_back(nodes, blocks)

    # --- recurrent states -------------------------------------------------------------------------

    def take_slot(self) -> int:
        """A slot for a working state or a snapshot; evicts a snapshot if none is free, the superseded first."""
        slot, node = self.states.take()
        if node is not None:
            self._feed.removed({CacheGroup.RECURRENT: self.tree.shorts(np.array([node]))})
        return slot

    def publish_state(self, hashes: BlockHashes, depth: int, slot: int, *, fresh: bool) -> None:
        """The snapshot after `depth` blocks is in `slot`; it is freed where nobody could find it, or one is known.

        `fresh`: that node was published just now, with all that is below it."""
        node = self.tree.node_at(hashes, depth)
        if node is None or node == ROOT:
            self.states.give([slot])
        elif self.states.attach(node, slot, fresh=fresh):
            self._feed.added({CacheGroup.RECURRENT: hashes.shorts[depth - 1 : depth]})

    # --- copies -----------------------------------------------------------------------------------

    def start_copies(self) -> list[CopyLot]:
        return self.copies.take()

    def copied(self, number: int, ok: bool) -> None:
        for lot in self.copies.report(number, ok):
            self._end(lot)

    def end_formation(self, formation: int) -> None:
        """Cancel copies that were not started: what was to leave the device is lost, what was to come back stays."""
        for lot in self.copies.end_formation(formation):
            if lot.copy.direction is CopyDirection.OFFLOAD:
                self._lose(self._bound(lot))
            else:
                self._incoming[self._bound(lot)] = 0
        self._settle(self.copies.settle())

    def executor_stopped(self, formation: int) -> None:
        self._settle(self.copies.executor_stopped(formation))
        self.pool.executor_stopped(formation)
        self.states.executor_stopped(formation)

    def _settle(self, lots: list[Lot]) -> None:
        for lot in lots:
            self._end(lot)

    def _end(self, lot: Lot) -> None:
        bound = self._bound_mask(lot)
        nodes = lot.nodes[bound]
        if lot.copy.direction is CopyDirection.OFFLOAD:
            if not lot.ok:
                self._lose(nodes)
            return
        self._incoming[nodes] = 0
        sound = self.tree.host.has(nodes)  # the others were lost meanwhile
        if lot.ok:
            self.onboarded += int(np.count_nonzero(sound))
            self.tree.bring_back(nodes[sound], lot.copy.device[bound][sound])
            arrived = bound.copy()
            arrived[bound] = sound
            self.pool.give(lot.copy.device[~arrived])
        else:
            self._lose(nodes[sound])
            self.pool.give(lot.copy.device)

    def _bound(self, lot: Lot) -> Nodes:
        return lot.nodes[self._bound_mask(lot)]

    def _bound_mask(self, lot: Lot) -> Mask:
        """Which nodes of a lot still depend on it: others were dropped or brought back in another way meanwhile."""
        number, nodes = lot.copy.number, lot.nodes
        if lot.copy.direction is CopyDirection.ONBOARD:
            mask: Mask = self._incoming[nodes] == number
            return mask
        mask = (self.tree.host.block[nodes] == lot.copy.host) & (self._writer[lot.copy.host] == number)
        return mask

    def _lose(self, roots: Nodes) -> None:
        """Drop nodes whose contents are lost, with their subtrees, in one delta."""
        self._tell_gone(self.tree.lose(roots) if len(roots) else NO_NODES)

    def _tell_gone(self, nodes: Nodes) -> None:
        """`nodes` can be found no more: their snapshots go in the same step."""
        if not len(nodes):
            return
        self.dropped += len(nodes)
        marked = self.states.forget(nodes) if self.states.size else NO_NODES
        gone = {CacheGroup.ATTENTION: self.tree.shorts(nodes)}
        if len(marked):
            gone[CacheGroup.RECURRENT] = self.tree.shorts(marked)
        self._feed.removed(gone)

    # --- digest -----------------------------------------------------------------------------------

    def digests_since(self, seq: int, capacity: Capacity) -> Sequence[Digest]:
        return self._feed.since(seq, self.residents, capacity)

    def residents(self) -> Residents:
        """Short hashes of everything reusable, an atomic copy."""
        states = self.tree.shorts(self.states.nodes()) if self.states.size else NOTHING
        return {CacheGroup.ATTENTION: self.tree.resident_hashes(), CacheGroup.RECURRENT: states}
