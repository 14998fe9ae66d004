"""Our cache manager: the steps of a hold's life, over what is resident and what is promised.

    lease ─▶ escrow ─▶ commit (─▶ revise) ─▶ materialise ─▶ plan_state, publish for each row ─▶ release

Owns the order of what each step does and what an ended formation leaves behind. Does not own room and
charges (ledger.py), what is where (residency.py), rounds, waves or fences (machine.py, the only caller).
"""

from __future__ import annotations

import numpy as np

from wavepp_proto.errors import RowVoided
from wavepp_proto.hashing import blocks_for, reuse_cap
from wavepp_proto.terms import Capacity, HoldKey, HoldState
from wavepp_stage.core.block_hashes import BlockHashes
from wavepp_stage.core.block_tree import NO_BLOCKS, ROOT
from wavepp_stage.core.cache_manager import Escrow, Lease, Materialised, TokenIds
from wavepp_stage.core.cache_shape import CacheShape
from wavepp_stage.core.census import Census, take_census
from wavepp_stage.core.digest_feed import DigestFeed, Digests
from wavepp_stage.core.holds import Hold, HoldInput, Phase
from wavepp_stage.core.invariants import check_cache
from wavepp_stage.core.ledger import Ledger
from wavepp_stage.core.residency import Residency
from wavepp_stage.core.tier import Nodes
from wavepp_stage.core.work import BlockTable, CopyLot, StateWork

EVICTION_SLICE = 256
"""Blocks evicted in one critical section: about 150 us."""
OFFLOAD_SLICE = 128
"""The same where there is a host tier: each may push another block out there."""


class BlockCache:
    """Implements cache_manager.CacheManager for engines that leave their cache to us."""

    def __init__(self, shape: CacheShape, feed: DigestFeed) -> None:
        self._shape = shape
        self._block_tokens = shape.block_tokens
        self._store = Residency(shape, feed)
        self._ledger = Ledger(shape, self._store)
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
        tokens: TokenIds | None = None,
    ) -> Lease:
        if key in self._ledger.holds:
            raise self._ledger.holds[key].illegal("lease")
        size, tree = self._block_tokens, self._store.tree
        chain = tree.chain_of(hashes, tree.deepest(hashes, reuse_cap(prompt_tokens, size) // size))
        own_hit = self._ledger.reusable(chain) * size
        group_hits = self._ledger.group_hits(len(chain) * size, own_hit)
        chain = chain[: candidate // size]
        hold = Hold(key, prompt_tokens, hashes, ignore_floor, snapshots)
        self._ledger.set_lease(hold, chain[: self._ledger.reusable(chain)])
        # A leased block costs room only if nobody held it, a block still to come always does.
        blocks = blocks_for(prompt_tokens, size) - tree.held_by_others(hold.chain, 0)
        states = self._ledger.demand_states(hold) + self._ledger.unheld(hold.snapshot, 0)
        missing = self._ledger.missing(hold, blocks, states)
        if missing:
            return Lease(0, own_hit, group_hits, missing)
        self._ledger.hold_lease(hold)
        self._ledger.holds[key] = hold
        self._ledger.unmaterialised += 1
        return Lease(hold.leased_blocks * size, own_hit, group_hits)

    def escrow(self, key: HoldKey) -> Escrow:
        return self._ledger.promise(self._ledger.hold(key), HoldInput.ESCROW)

    def commit(self, key: HoldKey) -> Escrow:
        return self._ledger.promise(self._ledger.hold(key), HoldInput.COMMIT)

    def revise(self, key: HoldKey, endpoint: int, snapshots: int = 0) -> Escrow:
        old, tree = self._ledger.hold(key), self._store.tree
        if old.phase not in (Phase.ESCROWED, Phase.COMMITTED):
            raise old.illegal("revise")
        depth = min(endpoint // self._block_tokens, tree.usable(old.chain))
        new = Hold(key, old.prompt_tokens, old.hashes, old.ignore_floor, snapshots)
        self._ledger.set_lease(new, old.chain[: self._ledger.reusable(old.chain[:depth])])
        trimmed = old.chain[new.leased_blocks :]
        # Trimming gives back what nobody else holds; the same blocks are then promised instead.
        regained = tree.on_device(trimmed) - tree.held_by_others(trimmed, 1)
        states = self._ledger.demand_states(new) - old.escrow_states
        if new.snapshot != old.snapshot:
            states += self._ledger.unheld(new.snapshot, 0) - self._ledger.unheld(old.snapshot, 1)
        missing = self._ledger.missing(old, self._ledger.demand(new) - old.escrow - regained, states)
        if missing:
            return self._ledger.answer(old, missing)
        old.advance(HoldInput.UNCOMMIT if old.phase is Phase.COMMITTED else HoldInput.REVISE)
        self._lower(old, new, trimmed)
        if old.leased_blocks * self._block_tokens == endpoint:
            old.advance(HoldInput.COMMIT)
        return self._ledger.answer(old)

    def _lower(self, hold: Hold, new: Hold, trimmed: Nodes) -> None:
        """Take over `new`'s lease: the earlier snapshot is held before the later one is let go."""
        if new.snapshot != hold.snapshot:
            if new.snapshot is not None:
                self._store.states.hold(new.snapshot)
            self._ledger.let_go(hold)
        self._store.tree.drop(trimmed)
        hold.chain, hold.leased_blocks = new.chain, new.leased_blocks
        hold.snapshot, hold.snapshots = new.snapshot, new.snapshots
        self._ledger.set_escrow(hold, self._ledger.demand(hold), self._ledger.demand_states(hold))

    # --- execution --------------------------------------------------------------------------------

    def materialise(self, key: HoldKey) -> Materialised:
        hold, store = self._ledger.hold(key), self._store
        if hold.phase is not Phase.MATERIALISING:
            hold.advance(HoldInput.MATERIALISE)
        if self._ledger.is_lost(hold):
            raise RowVoided("a copy of its prefix failed", request_id=key.request_id, attempt=key.attempt)
        homeless = store.homeless(hold.chain)
        missing = blocks_for(hold.prompt_tokens, self._block_tokens) - hold.leased_blocks - len(hold.taken)
        # What others brought back meanwhile is a surplus of the promise.
        self._ledger.set_escrow(hold, len(homeless) + missing, hold.escrow_states)
        blocks, lot = store.take_blocks(hold.escrow, OFFLOAD_SLICE if self.host_pool_blocks else EVICTION_SLICE)
        self._ledger.set_escrow(hold, hold.escrow - len(blocks), hold.escrow_states)
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
            hold.working = self._ledger.take_slot(hold)
        hold.advance(HoldInput.INSTALL)
        self._ledger.unmaterialised -= 1
        if hold.release_waits:
            self._retire(hold, HoldInput.RELEASE)

    def table(self, key: HoldKey) -> BlockTable:
        return self._ledger.hold(key).table

    def plan_state(self, key: HoldKey, start: int, snapshots: tuple[int, ...]) -> StateWork | None:
        hold = self._ledger.owned(key, "plan a state of")
        if hold.working is None:
            return None
        first = start == hold.leased_blocks * self._block_tokens
        restore = self._store.states.slot(hold.snapshot) if first and hold.snapshot is not None else None
        planned = {position: self._ledger.take_slot(hold) for position in snapshots[: hold.escrow_states]}
        hold.planned.update(planned)
        return StateWork(hold.working, restore, tuple(planned.items()))

    def publish(self, key: HoldKey, tokens: int) -> None:
        hold = self._ledger.owned(key, "publish")
        known = self._publish_blocks(hold, tokens // self._block_tokens)
        if not hold.void:
            self._publish_states(hold, tokens, known)

    def _publish_blocks(self, hold: Hold, end: int) -> int:
        """The first `end` blocks are computed; how many of the prompt's blocks were resident before."""
        done = len(hold.chain)
        known = max(done, self._store.tree.deepest(hold.hashes, end))
        if hold.publishing and end > done and (known == done or self._adopt(hold, known)) and end > known:
            self._grow(hold, known, end)
        return known

    def _adopt(self, hold: Hold, depth: int) -> bool:
        """Hold the nodes that another sequence published first; our copies stay private, but for those of which
        only the host has one. This lowers `evictable` and is charged like a lease; without room the sequence stops
        publishing."""
        tree, done = self._store.tree, len(hold.chain)
        chain = tree.chain_of(hold.hashes, depth)
        fresh = chain[done:]
        above = tree.on_device(fresh)
        if above - tree.held_by_others(fresh, 0) > max(0, self._ledger.room(hold)):  # what costs nothing is always held
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

    def _publish_states(self, hold: Hold, tokens: int, known: int) -> None:
        self._ledger.let_go(hold)
        for position in [position for position in hold.planned if position <= tokens]:
            slot, depth = hold.planned.pop(position), position // self._block_tokens
            self._store.publish_state(hold.hashes, depth, slot, fresh=depth > known)

    def discard(self, key: HoldKey) -> None:
        """The slots stay with the hold until its release: a wave prepared ahead may still write them."""
        hold = self._ledger.holds.get(key)
        if hold is not None:
            hold.void = True

    # --- giving back ------------------------------------------------------------------------------

    def release(self, key: HoldKey) -> None:
        hold = self._ledger.holds.get(key)
        if hold is None:
            return
        if hold.phase is Phase.MATERIALISING:
            hold.advance(HoldInput.RELEASE)
            hold.release_waits = True
            self._abandon_lost()
            return
        self._retire(hold, HoldInput.RELEASE)

    def _retire(self, hold: Hold, given: HoldInput) -> None:
        self._ledger.unmaterialised -= hold.phase is not Phase.OWNED
        hold.advance(given)
        del self._ledger.holds[hold.key]
        self._ledger.set_escrow(hold, 0, 0)
        self._ledger.drop_lease(hold)
        self._store.pool.give(hold.private_blocks)
        self._store.states.give(hold.slots)

    def _abandon_lost(self) -> None:
        """Retire holds whose release waits for an end that cannot come, once their copies have ended."""
        if not self._store.tree.torn:
            return
        for hold in list(self._ledger.holds.values()):
            if hold.release_waits and self._ledger.is_lost(hold) and hold.after_lot <= self._store.copies.ended:
                self._retire(hold, HoldInput.ABANDON)

    def end_formation(self, formation: int) -> None:
        for hold in self._ledger.holds.values():
            touched = hold.phase in (Phase.MATERIALISING, Phase.OWNED)
            hold.advance(HoldInput.END_FORMATION)
            self._ledger.set_escrow(hold, 0, 0)
            if touched:
                self._store.pool.quarantine(formation, hold.private_blocks)
                self._store.states.quarantine(formation, hold.slots)
                self._dying.setdefault(formation, []).append(hold)
            else:
                self._ledger.drop_lease(hold)
        self._ledger.holds.clear()
        self._ledger.unmaterialised = 0
        self._store.end_formation(formation)

    def executor_stopped(self, formation: int) -> None:
        self._store.executor_stopped(formation)
        for hold in self._dying.pop(formation, ()):
            self._ledger.drop_lease(hold)

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
            self._ledger.escrowed,
            store.tree.free_host_blocks,
            store.states.free,
            store.states.cached,
            self._ledger.escrowed_states,
        )
        # An oversized request waits for the others to be materialised, which moves no count.
        waits = (*counts, self._ledger.floor_blocks, self._ledger.unmaterialised)
        if waits != self._waits:
            self._waits = waits
            self._capacity = Capacity(self._capacity.seq + 1, *counts)
        return self._capacity

    @property
    def floor_blocks(self) -> int:
        return self._ledger.floor_blocks

    @floor_blocks.setter
    def floor_blocks(self, blocks: int) -> None:
        self._ledger.floor_blocks = blocks

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
        hold = self._ledger.holds.get(key)
        return None if hold is None else hold.state(self._block_tokens)

    def inventory(self) -> tuple[HoldState, ...]:
        return tuple(hold.state(self._block_tokens) for hold in self._ledger.holds.values())

    def census(self) -> Census:
        return take_census(self)

    def digests_since(self, seq: int) -> Digests:
        return self._store.digests_since(seq, self.capacity())

    def check(self) -> None:
        check_cache(self)
