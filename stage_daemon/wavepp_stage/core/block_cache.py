"""Our cache manager: the block tree, the block pool and the ledger of holds under one invariant.

    free + evictable - sum of escrows >= floor          (evictable: `cached` of block_tree.py)

A lease and a publish that finds its hash lower `evictable` and are charged to their taker; an escrow
is a count charged to its taker; materialise spends it. So a committed hold always finds its blocks.
Owns this invariant. Does not own rounds, waves or fences (machine.py, the only caller).
"""

from __future__ import annotations

import numpy as np

from wavepp_proto.errors import InternalError
from wavepp_proto.hashing import blocks_for, reuse_cap
from wavepp_proto.terms import Capacity, Digest, HoldKey, HoldState
from wavepp_stage.core.block_hashes import BlockHashes
from wavepp_stage.core.block_pool import BlockPool
from wavepp_stage.core.block_tree import ROOT, BlockTree, Nodes
from wavepp_stage.core.cache_manager import Escrow, Lease
from wavepp_stage.core.cache_shape import CacheShape
from wavepp_stage.core.census import Census, take_census
from wavepp_stage.core.digest_feed import DigestFeed
from wavepp_stage.core.holds import Hold, HoldInput, Phase
from wavepp_stage.core.invariants import check_cache
from wavepp_stage.core.work import BlockTable

EVICTION_SLICE = 256
"""Blocks evicted in one critical section: about 120 us."""


class BlockCache:
    """Implements cache_manager.CacheManager for engines that leave their cache to us."""

    def __init__(self, shape: CacheShape, feed: DigestFeed) -> None:
        self.floor_blocks = shape.floor_blocks
        self._block_tokens = shape.block_tokens
        self._pool = BlockPool(shape.pool_blocks)
        self._tree = BlockTree(shape.pool_blocks)
        self._feed = feed
        feed.replaced()
        self._holds: dict[HoldKey, Hold] = {}
        self._escrowed = 0
        """Sum of `escrow` over all holds."""
        self._dying: dict[int, list[Nodes]] = {}
        """Chains that an ended formation's executor may still read, by formation."""
        self._capacity = Capacity(seq=1, free_blocks=shape.pool_blocks, evictable_blocks=0)

    # --- admission --------------------------------------------------------------------------------

    def lease(self, key: HoldKey, prompt_tokens: int, hashes: BlockHashes, candidate: int, ignore_floor: bool) -> Lease:
        if key in self._holds:
            raise self._holds[key].illegal("lease")
        size = self._block_tokens
        hit = self._tree.deepest(hashes, reuse_cap(prompt_tokens, size) // size)
        depth = min(hit, candidate // size)
        chain = self._tree.chain_of(hashes, depth)
        # A leased block costs room only if nobody held it, a block still to come always does.
        charge = blocks_for(prompt_tokens, size) - self._tree.held_by_others(chain, 0)
        shortfall = max(0, charge - self._room(ignore_floor))
        if shortfall:
            return Lease(0, hit * size, shortfall)
        self._tree.hold(chain)
        self._holds[key] = Hold(key, prompt_tokens, hashes, ignore_floor, chain=chain, leased_blocks=depth)
        return Lease(depth * size, hit * size)

    def escrow(self, key: HoldKey) -> Escrow:
        hold = self._hold(key)
        demand = hold.demand(self._block_tokens)
        shortfall = max(0, demand - self._room(hold.ignore_floor))
        if shortfall:
            return Escrow(hold.leased_blocks * self._block_tokens, demand, shortfall)
        hold.advance(HoldInput.ESCROW)
        return self._promise(hold, demand)

    def commit(self, key: HoldKey) -> None:
        self._hold(key).advance(HoldInput.COMMIT)

    def revise(self, key: HoldKey, endpoint: int) -> Escrow:
        hold = self._hold(key)
        if hold.phase not in (Phase.ESCROWED, Phase.COMMITTED):
            raise hold.illegal("revise")
        depth = min(hold.leased_blocks, endpoint // self._block_tokens)
        trimmed = hold.chain[depth:]
        # Trimming gives back what nobody else holds; the same blocks are then promised instead.
        charge = self._tree.held_by_others(trimmed, 1)
        shortfall = max(0, charge - self._room(hold.ignore_floor))
        if shortfall:
            return Escrow(hold.leased_blocks * self._block_tokens, hold.demand(self._block_tokens), shortfall)
        hold.advance(HoldInput.UNCOMMIT if hold.phase is Phase.COMMITTED else HoldInput.REVISE)
        self._tree.drop(trimmed)
        hold.chain, hold.leased_blocks = hold.chain[:depth], depth
        self._cancel_escrow(hold)
        promised = self._promise(hold, hold.demand(self._block_tokens))
        hold.advance(HoldInput.COMMIT)
        return promised

    # --- execution --------------------------------------------------------------------------------

    def materialise(self, key: HoldKey) -> bool:
        hold = self._hold(key)
        if hold.phase is not Phase.MATERIALISING:
            hold.advance(HoldInput.MATERIALISE)
            hold.table = self._tree.blocks(hold.chain)
        taken = self._pool.take(min(hold.escrow, self._pool.free))
        evict = min(hold.escrow - len(taken), EVICTION_SLICE)
        if evict:
            evicted, hashes = self._tree.evict(evict)
            self._feed.removed(hashes)
            taken = np.concatenate([taken, evicted])
        hold.escrow -= len(taken)
        self._escrowed -= len(taken)
        hold.table = np.concatenate([hold.table, taken])
        hold.private = np.arange(len(hold.table)) >= hold.leased_blocks
        if hold.escrow:
            return False
        hold.advance(HoldInput.INSTALL)
        if hold.release_waits:
            self._retire(hold)
        return True

    def table(self, key: HoldKey) -> BlockTable:
        return self._hold(key).table

    def publish(self, key: HoldKey, tokens: int) -> None:
        hold = self._hold(key)
        if hold.phase is not Phase.OWNED:
            raise hold.illegal("publish")
        done, end = len(hold.chain), tokens // self._block_tokens
        if not hold.publishing or end <= done:
            return
        known = max(done, self._tree.deepest(hold.hashes, end))
        if (known == done or self._adopt(hold, known)) and end > known:
            self._grow(hold, known, end)

    def _adopt(self, hold: Hold, depth: int) -> bool:
        """Hold the nodes that another sequence published first; our copies stay private.

        This lowers `evictable` and is charged like a lease; without room the sequence stops publishing."""
        chain = self._tree.chain_of(hold.hashes, depth)
        fresh = chain[len(hold.chain) :]
        if len(fresh) - self._tree.held_by_others(fresh, 0) > self._room(hold.ignore_floor):
            hold.publishing = False
            return False
        self._tree.hold(fresh)
        hold.chain = chain
        return True

    def _grow(self, hold: Hold, first: int, end: int) -> None:
        """Turn private blocks [first, end) into nodes; a hash collision ends this sequence's publishing."""
        parent = int(hold.chain[-1]) if len(hold.chain) else ROOT
        nodes = self._tree.extend(parent, hold.hashes, first, hold.table[first:end])
        hold.publishing = len(nodes) == end - first
        hold.private[first : first + len(nodes)] = False
        hold.chain = np.concatenate([hold.chain, nodes])
        self._feed.added(hold.hashes.shorts[first : first + len(nodes)])

    # --- giving back ------------------------------------------------------------------------------

    def release(self, key: HoldKey) -> None:
        hold = self._holds.get(key)
        if hold is None:
            return
        if hold.phase is Phase.MATERIALISING:
            hold.advance(HoldInput.RELEASE)
            hold.release_waits = True
            return
        self._retire(hold)

    def _retire(self, hold: Hold) -> None:
        hold.advance(HoldInput.RELEASE)
        del self._holds[hold.key]
        self._cancel_escrow(hold)
        self._tree.drop(hold.chain)
        self._pool.give(hold.private_blocks)

    def end_formation(self, formation: int) -> None:
        for hold in self._holds.values():
            touched = hold.phase in (Phase.MATERIALISING, Phase.OWNED)
            hold.advance(HoldInput.END_FORMATION)
            self._cancel_escrow(hold)
            if touched:
                self._pool.quarantine(formation, hold.private_blocks)
                self._dying.setdefault(formation, []).append(hold.chain)
            else:
                self._tree.drop(hold.chain)
        self._holds.clear()

    def executor_stopped(self, formation: int) -> None:
        self._pool.executor_stopped(formation)
        for chain in self._dying.pop(formation, ()):
            self._tree.drop(chain)

    # --- what is there ----------------------------------------------------------------------------

    def capacity(self) -> Capacity:
        now = (self._pool.free, self._tree.cached, self._escrowed)
        old = self._capacity
        if now != (old.free_blocks, old.evictable_blocks, old.escrowed_blocks):
            self._capacity = Capacity(old.seq + 1, *now)
        return self._capacity

    @property
    def pool_blocks(self) -> int:
        return self._pool.size

    @property
    def cached_blocks(self) -> int:
        return self._tree.cached

    @property
    def quarantined_blocks(self) -> int:
        return self._pool.quarantined

    def hold_state(self, key: HoldKey) -> HoldState | None:
        hold = self._holds.get(key)
        return None if hold is None else hold.state(self._block_tokens)

    def inventory(self) -> tuple[HoldState, ...]:
        return tuple(hold.state(self._block_tokens) for hold in self._holds.values())

    def census(self) -> Census:
        return take_census(self)

    def digests_since(self, seq: int) -> list[Digest]:
        return self._feed.since(seq, self._tree.resident_hashes, self.capacity())

    def check(self) -> None:
        check_cache(self)

    # --- parts ------------------------------------------------------------------------------------

    def _room(self, ignore_floor: bool) -> int:
        """Blocks that a taker may still be charged for."""
        floor = 0 if ignore_floor else self.floor_blocks
        return self._pool.free + self._tree.cached - self._escrowed - floor

    def _promise(self, hold: Hold, demand: int) -> Escrow:
        free = min(demand, max(0, self._pool.free - self._escrowed))
        hold.escrow = demand
        self._escrowed += demand
        endpoint = hold.leased_blocks * self._block_tokens
        return Escrow(endpoint, demand, backed_free=free, backed_evict=demand - free)

    def _cancel_escrow(self, hold: Hold) -> None:
        self._escrowed -= hold.escrow
        hold.escrow = 0

    def _hold(self, key: HoldKey) -> Hold:
        hold = self._holds.get(key)
        if hold is None:
            raise InternalError("nothing is held", request_id=key.request_id, attempt=key.attempt)
        return hold
