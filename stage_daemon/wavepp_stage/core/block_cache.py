"""Our cache manager: the ledger of holds over what is resident, under one invariant per cache group.

    free + evictable - sum of escrows >= floor          blocks; evictable: `cached` of the device tier
    free + evictable - sum of escrows >= 0              recurrent slots; evictable: `cached` of state_pool.py

A lease, the snapshot it starts from, a revise and a publish that finds its hash lower `evictable` and are
charged to their taker; an escrow is a count charged to its taker; materialise spends it. So a committed
hold always finds its blocks and its slots. Owns these invariants. Does not own what is where
(residency.py), rounds, waves or fences (machine.py, the only caller).
"""

from __future__ import annotations

import numpy as np

from wavepp_proto.errors import InternalError, RowVoided
from wavepp_proto.hashing import blocks_for, reuse_cap
from wavepp_proto.terms import CacheGroup, Capacity, Digest, GroupEndpoint, HoldKey, HoldState
from wavepp_stage.core.block_hashes import BlockHashes
from wavepp_stage.core.block_tree import NO_BLOCKS, ROOT
from wavepp_stage.core.cache_manager import ENOUGH, Escrow, Lease, Materialised, Shortfall
from wavepp_stage.core.cache_shape import CacheShape
from wavepp_stage.core.census import Census, take_census
from wavepp_stage.core.digest_feed import DigestFeed
from wavepp_stage.core.holds import Hold, HoldInput, Phase
from wavepp_stage.core.invariants import check_cache
from wavepp_stage.core.residency import Residency
from wavepp_stage.core.tier import Nodes
from wavepp_stage.core.work import BlockTable, CopyLot, StateWork

EVICTION_SLICE = 256
"""Blocks evicted in one critical section: about 120 us without a host tier."""


class BlockCache:
    """Implements cache_manager.CacheManager for engines that leave their cache to us."""

    def __init__(self, shape: CacheShape, feed: DigestFeed) -> None:
        self.floor_blocks = shape.floor_blocks
        self._shape = shape
        self._block_tokens = shape.block_tokens
        self._store = Residency(shape, feed)
        self._holds: dict[HoldKey, Hold] = {}
        self._escrowed = self._escrowed_states = 0
        """Sums of `escrow` and `escrow_states` over all holds."""
        self._dying: dict[int, list[Hold]] = {}
        """Holds whose chain and snapshot an ended formation's executor may still read, by formation."""
        self._capacity = Capacity(seq=0, free_blocks=0, evictable_blocks=0)
        self._waits: tuple[int, ...] = ()
        """Whatever somebody may wait for, when `_capacity` was made."""

    # --- admission --------------------------------------------------------------------------------

    def lease(
        self,
        key: HoldKey,
        prompt_tokens: int,
        hashes: BlockHashes,
        candidate: int,
        snapshots: int = 0,
        ignore_floor: bool = False,
    ) -> Lease:
        if key in self._holds:
            raise self._holds[key].illegal("lease")
        size, tree = self._block_tokens, self._store.tree
        chain = tree.chain_of(hashes, tree.deepest(hashes, reuse_cap(prompt_tokens, size) // size))
        own_hit = self._reusable(chain) * size
        group_hits = self._group_hits(len(chain) * size, own_hit)
        chain = chain[: candidate // size]
        hold = Hold(key, prompt_tokens, hashes, ignore_floor, snapshots)
        self._set_lease(hold, chain[: self._reusable(chain)])
        # A leased block costs room only if nobody held it, a block still to come always does.
        blocks = blocks_for(prompt_tokens, size) - tree.held_by_others(hold.chain, 0)
        states = self._demand_states(hold) + self._unheld(hold.snapshot, 0)
        missing = self._missing(hold, blocks, states)
        if missing:
            return Lease(0, own_hit, group_hits, missing)
        self._hold_lease(hold)
        self._holds[key] = hold
        return Lease(hold.leased_blocks * size, own_hit, group_hits)

    def escrow(self, key: HoldKey) -> Escrow:
        return self._promise(self._hold(key), HoldInput.ESCROW)

    def commit(self, key: HoldKey) -> Escrow:
        return self._promise(self._hold(key), HoldInput.COMMIT)

    def revise(self, key: HoldKey, endpoint: int, snapshots: int = 0) -> Escrow:
        old, tree = self._hold(key), self._store.tree
        if old.phase not in (Phase.ESCROWED, Phase.COMMITTED):
            raise old.illegal("revise")
        depth = min(endpoint // self._block_tokens, tree.usable(old.chain))
        new = Hold(key, old.prompt_tokens, old.hashes, old.ignore_floor, snapshots)
        self._set_lease(new, old.chain[: self._reusable(old.chain[:depth])])
        trimmed = old.chain[new.leased_blocks :]
        # Trimming gives back what nobody else holds; the same blocks are then promised instead.
        regained = tree.on_device(trimmed) - tree.held_by_others(trimmed, 1)
        states = self._demand_states(new) - old.escrow_states
        if new.snapshot != old.snapshot:
            states += self._unheld(new.snapshot, 0) - self._unheld(old.snapshot, 1)
        missing = self._missing(old, self._demand(new) - old.escrow - regained, states)
        if missing:
            return self._answer(old, missing)
        old.advance(HoldInput.UNCOMMIT if old.phase is Phase.COMMITTED else HoldInput.REVISE)
        self._lower(old, new, trimmed)
        if old.leased_blocks * self._block_tokens == endpoint:
            old.advance(HoldInput.COMMIT)
        return self._answer(old)

    def _lower(self, hold: Hold, new: Hold, trimmed: Nodes) -> None:
        """Take over `new`'s lease: the earlier snapshot is held before the later one is let go."""
        if new.snapshot != hold.snapshot:
            if new.snapshot is not None:
                self._store.states.hold(new.snapshot)
            self._let_go(hold)
        self._store.tree.drop(trimmed)
        hold.chain, hold.leased_blocks = new.chain, new.leased_blocks
        hold.snapshot, hold.snapshots = new.snapshot, new.snapshots
        self._set_escrow(hold, self._demand(hold), self._demand_states(hold))

    # --- execution --------------------------------------------------------------------------------

    def materialise(self, key: HoldKey) -> Materialised:
        hold, store = self._hold(key), self._store
        if hold.phase is not Phase.MATERIALISING:
            hold.advance(HoldInput.MATERIALISE)
        if self._is_lost(hold):
            raise RowVoided("a copy of its prefix failed", request_id=key.request_id, attempt=key.attempt)
        homeless = store.homeless(hold.chain)
        missing = blocks_for(hold.prompt_tokens, self._block_tokens) - hold.leased_blocks - len(hold.taken)
        # What others brought back meanwhile is a surplus of the promise.
        self._set_escrow(hold, len(homeless) + missing, hold.escrow_states)
        blocks, lot = store.take_blocks(hold.escrow, EVICTION_SLICE)
        self._set_escrow(hold, hold.escrow - len(blocks), hold.escrow_states)
        back = homeless[: len(blocks)]
        store.bring_back(back, blocks[: len(back)])
        hold.taken = np.concatenate([hold.taken, blocks[len(back) :]])
        hold.after_lot = max(hold.after_lot, lot, store.last_incoming(hold.chain))
        if hold.escrow:
            return Materialised.MORE
        if hold.after_lot > store.copies.ended:
            return Materialised.COPYING
        self._install(hold)
        return Materialised.DONE

    def _install(self, hold: Hold) -> None:
        """Everything is in place: the sequence owns its table and its working state."""
        hold.table = np.concatenate([self._store.tree.blocks(hold.chain), hold.taken])
        hold.private = np.arange(len(hold.table)) >= hold.leased_blocks
        hold.taken = NO_BLOCKS
        if self._shape.recurrent:
            hold.working = self._take_slot(hold)
        hold.advance(HoldInput.INSTALL)
        if hold.release_waits:
            self._retire(hold, HoldInput.RELEASE)

    def table(self, key: HoldKey) -> BlockTable:
        return self._hold(key).table

    def plan_state(self, key: HoldKey, start: int, snapshots: tuple[int, ...]) -> StateWork | None:
        hold = self._owned(key, "plan a state of")
        if hold.working is None:
            return None
        first = start == hold.leased_blocks * self._block_tokens
        restore = self._store.states.slot(hold.snapshot) if first and hold.snapshot is not None else None
        planned = {position: self._take_slot(hold) for position in snapshots[: hold.escrow_states]}
        hold.planned.update(planned)
        return StateWork(hold.working, restore, tuple(planned.items()))

    def publish(self, key: HoldKey, tokens: int) -> None:
        hold = self._owned(key, "publish")
        done, end = len(hold.chain), tokens // self._block_tokens
        if hold.publishing and end > done:
            known = max(done, self._store.tree.deepest(hold.hashes, end))
            if (known == done or self._adopt(hold, known)) and end > known:
                self._grow(hold, known, end)
        if not hold.void:
            self._publish_states(hold, tokens)

    def _adopt(self, hold: Hold, depth: int) -> bool:
        """Hold the nodes that another sequence published first; our copies stay private, but for those of which
        only the host has one. This lowers `evictable` and is charged like a lease; without room the sequence stops
        publishing."""
        tree, done = self._store.tree, len(hold.chain)
        chain = tree.chain_of(hold.hashes, depth)
        fresh = chain[done:]
        above = tree.on_device(fresh)
        if above - tree.held_by_others(fresh, 0) > self._room(hold):
            hold.publishing = False
            return False
        tree.hold(fresh)
        hold.chain = chain
        self._store.hand_over(fresh[above:], hold.table[done + above : depth])
        hold.private[done + above : depth] = False
        return True

    def _grow(self, hold: Hold, first: int, end: int) -> None:
        """Turn private blocks [first, end) into nodes; a hash collision ends this sequence's publishing."""
        parent = int(hold.chain[-1]) if len(hold.chain) else ROOT
        nodes = self._store.publish(parent, hold.hashes, first, hold.table[first:end])
        hold.publishing = len(nodes) == end - first
        hold.private[first : first + len(nodes)] = False
        hold.chain = np.concatenate([hold.chain, nodes])

    def _publish_states(self, hold: Hold, tokens: int) -> None:
        self._let_go(hold)
        for position in [position for position in hold.planned if position <= tokens]:
            slot = hold.planned.pop(position)
            self._store.publish_state(hold.hashes, position // self._block_tokens, slot)

    def discard(self, key: HoldKey) -> None:
        """The slots stay with the hold until its release: a wave prepared ahead may still write them."""
        hold = self._holds.get(key)
        if hold is not None:
            hold.void = True

    # --- giving back ------------------------------------------------------------------------------

    def release(self, key: HoldKey) -> None:
        hold = self._holds.get(key)
        if hold is None:
            return
        if hold.phase is Phase.MATERIALISING:
            hold.advance(HoldInput.RELEASE)
            hold.release_waits = True
            self._abandon_lost()
            return
        self._retire(hold, HoldInput.RELEASE)

    def _retire(self, hold: Hold, given: HoldInput) -> None:
        hold.advance(given)
        del self._holds[hold.key]
        self._set_escrow(hold, 0, 0)
        self._drop_lease(hold)
        self._store.pool.give(hold.private_blocks)
        self._store.states.give(hold.slots)

    def _abandon_lost(self) -> None:
        """Retire holds whose release waits for an end that cannot come, once their copies have ended."""
        for hold in list(self._holds.values()):
            if hold.release_waits and self._is_lost(hold) and hold.after_lot <= self._store.copies.ended:
                self._retire(hold, HoldInput.ABANDON)

    def end_formation(self, formation: int) -> None:
        for hold in self._holds.values():
            touched = hold.phase in (Phase.MATERIALISING, Phase.OWNED)
            hold.advance(HoldInput.END_FORMATION)
            self._set_escrow(hold, 0, 0)
            if touched:
                self._store.pool.quarantine(formation, hold.private_blocks)
                self._store.states.quarantine(formation, hold.slots)
                self._dying.setdefault(formation, []).append(hold)
            else:
                self._drop_lease(hold)
        self._holds.clear()
        self._store.end_formation(formation)

    def executor_stopped(self, formation: int) -> None:
        self._store.executor_stopped(formation)
        for hold in self._dying.pop(formation, ()):
            self._drop_lease(hold)

    # --- copies between the tiers -----------------------------------------------------------------

    def take_lots(self) -> list[CopyLot]:
        return self._store.start_copies()

    def copied(self, number: int, ok: bool) -> None:
        self._store.copied(number, ok)
        self._abandon_lost()

    # --- what is there ----------------------------------------------------------------------------

    def capacity(self) -> Capacity:
        store = self._store
        counts = (
            store.pool.free,
            store.tree.device.cached,
            self._escrowed,
            store.tree.free_host_blocks,
            store.states.free,
            store.states.cached,
            self._escrowed_states,
        )
        # An oversized request waits for the others to be materialised, which moves no count.
        waits = (*counts, self.floor_blocks, self._unmaterialised())
        if waits != self._waits:
            self._waits = waits
            self._capacity = Capacity(self._capacity.seq + 1, *counts)
        return self._capacity

    @property
    def pool_blocks(self) -> int:
        return self._shape.pool_blocks

    @property
    def cached_blocks(self) -> int:
        return self._store.tree.device.cached

    @property
    def quarantined_blocks(self) -> int:
        return self._store.pool.quarantined

    @property
    def host_pool_blocks(self) -> int:
        return self._store.tree.host_blocks

    @property
    def host_cached_blocks(self) -> int:
        """Host blocks that nobody holds."""
        return self._store.tree.host.cached

    @property
    def state_slots(self) -> int:
        return self._store.states.size

    @property
    def cached_states(self) -> int:
        """Snapshots that nobody starts from."""
        return self._store.states.cached

    @property
    def quarantined_states(self) -> int:
        return self._store.states.quarantined

    def hold_state(self, key: HoldKey) -> HoldState | None:
        hold = self._holds.get(key)
        return None if hold is None else hold.state(self._block_tokens)

    def inventory(self) -> tuple[HoldState, ...]:
        return tuple(hold.state(self._block_tokens) for hold in self._holds.values())

    def census(self) -> Census:
        return take_census(self)

    def digests_since(self, seq: int) -> list[Digest]:
        return self._store.digests_since(seq, self.capacity())

    def check(self) -> None:
        check_cache(self)

    # --- parts: what a prefix is good for ---------------------------------------------------------

    def _reusable(self, chain: Nodes) -> int:
        """How many blocks of a resident chain every group can use: up to the last snapshot, if there are any."""
        if not self._shape.recurrent:
            return len(chain)
        return int(self._store.states.depths(chain).max(initial=0))

    def _group_hits(self, attention: int, own_hit: int) -> tuple[GroupEndpoint, ...]:
        hits = {CacheGroup.ATTENTION: attention, CacheGroup.RECURRENT: own_hit}
        return tuple(GroupEndpoint(group, hits[group]) for group in self._shape.groups)

    def _set_lease(self, hold: Hold, chain: Nodes) -> None:
        hold.chain, hold.leased_blocks = chain, len(chain)
        hold.snapshot = int(chain[-1]) if self._shape.recurrent and len(chain) else None

    def _hold_lease(self, hold: Hold) -> None:
        self._store.tree.hold(hold.chain)
        if hold.snapshot is not None:
            self._store.states.hold(hold.snapshot)

    def _drop_lease(self, hold: Hold) -> None:
        self._let_go(hold)
        self._store.tree.drop(hold.chain)

    def _let_go(self, hold: Hold) -> None:
        """The snapshot that the hold starts from is not needed any more."""
        if hold.snapshot is not None:
            self._store.states.let_go(hold.snapshot)
            hold.snapshot = None

    # --- parts: room ------------------------------------------------------------------------------

    def _unmaterialised(self) -> int:
        return sum(hold.phase is not Phase.OWNED for hold in self._holds.values())

    def _room(self, hold: Hold) -> int:
        """Blocks that `hold` may still be charged for."""
        alone = hold.ignore_floor and not any(
            other is not hold and other.phase is not Phase.OWNED for other in self._holds.values()
        )
        floor = 0 if alone else self.floor_blocks
        return self._store.pool.free + self._store.tree.device.cached - self._escrowed - floor

    def _missing(self, hold: Hold, blocks: int, states: int) -> Shortfall:
        """What lacks for a charge of so many blocks and slots."""
        slots = self._store.states.free + self._store.states.cached - self._escrowed_states
        short = Shortfall(max(0, blocks - self._room(hold)), max(0, states - slots))
        return short or ENOUGH

    def _demand(self, hold: Hold) -> int:
        """Blocks of the prompt that are not leased on the device."""
        return blocks_for(hold.prompt_tokens, self._block_tokens) - self._store.tree.on_device(hold.chain)

    def _demand_states(self, hold: Hold) -> int:
        """A working state, and the snapshots to be taken."""
        return 1 + hold.snapshots if self._shape.recurrent else 0

    def _unheld(self, snapshot: int | None, mine: int) -> int:
        """1 if nobody would hold the snapshot without `mine` (0 or 1) references, else 0."""
        return int(snapshot is not None and self._store.states.references(snapshot) == mine)

    def _promise(self, hold: Hold, given: HoldInput) -> Escrow:
        """Count what the rest of the prompt demands by now, if there is room; then move by `given`."""
        hold.require(given)
        blocks, states = self._demand(hold), self._demand_states(hold)
        missing = self._missing(hold, blocks - hold.escrow, states - hold.escrow_states)
        if missing:
            return self._answer(hold, missing)
        hold.advance(given)
        self._set_escrow(hold, blocks, states)
        return self._answer(hold)

    def _answer(self, hold: Hold, missing: Shortfall = ENOUGH) -> Escrow:
        demand, others = self._demand(hold), self._escrowed - hold.escrow
        endpoint, states = hold.leased_blocks * self._block_tokens, self._demand_states(hold)
        if missing:
            return Escrow(endpoint, demand, states, missing)
        free = min(demand, max(0, self._store.pool.free - others))
        offload = min(demand - free, self._store.tree.free_host_blocks)
        return Escrow(endpoint, demand, states, ENOUGH, free, offload, demand - free - offload)

    def _set_escrow(self, hold: Hold, blocks: int, states: int) -> None:
        self._escrowed += blocks - hold.escrow
        self._escrowed_states += states - hold.escrow_states
        hold.escrow, hold.escrow_states = blocks, states

    def _take_slot(self, hold: Hold) -> int:
        self._set_escrow(hold, hold.escrow, hold.escrow_states - 1)
        return self._store.take_slot()

    def _is_lost(self, hold: Hold) -> bool:
        return self._store.tree.usable(hold.chain) < len(hold.chain)

    def _owned(self, key: HoldKey, what: str) -> Hold:
        hold = self._hold(key)
        if hold.phase is not Phase.OWNED:
            raise hold.illegal(what)
        return hold

    def _hold(self, key: HoldKey) -> Hold:
        hold = self._holds.get(key)
        if hold is None:
            raise InternalError("nothing is held", request_id=key.request_id, attempt=key.attempt)
        return hold
