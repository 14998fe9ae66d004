"""The ledger of holds of one stage's cache, and the invariant that every promise can be kept.

    free + evictable - sum of escrows >= floor          blocks; evictable: `cached` of the device tier
    free + evictable - sum of escrows >= 0              recurrent slots; evictable: `cached` of state_pool.py

A lease, the snapshot it starts from, a revise and a publish that finds its hash lower `evictable` and are
charged to their taker; an escrow is a count charged to its taker; materialise spends it. So a committed
hold always finds its blocks and its slots. Owns room, charges and promises. Does not own the steps of a
hold's life (block_cache.py, the only caller) or what is where (residency.py).
"""

from __future__ import annotations

from wavepp_proto.errors import InternalError
from wavepp_proto.hashing import blocks_for
from wavepp_proto.terms import CacheGroup, GroupEndpoint, HoldKey
from wavepp_stage.core.cache_manager import ENOUGH, Escrow, Shortfall
from wavepp_stage.core.cache_shape import CacheShape
from wavepp_stage.core.holds import Hold, HoldInput, Phase
from wavepp_stage.core.residency import Residency
from wavepp_stage.core.tier import Nodes


class Ledger:
    """Holds in the order in which they were taken, and what they were promised."""

    def __init__(self, shape: CacheShape, store: Residency) -> None:
        self.floor_blocks = shape.floor_blocks
        """Blocks that escrows may never touch."""
        self.holds: dict[HoldKey, Hold] = {}
        self.escrowed = self.escrowed_states = 0
        """Sums of `escrow` and `escrow_states` over all holds."""
        self.unmaterialised = 0
        """Holds whose sequence does not own its table yet."""
        self._shape = shape
        self._block_tokens = shape.block_tokens
        self._store = store

    # --- what a prefix is good for ----------------------------------------------------------------

    def reusable(self, chain: Nodes) -> int:
        """How many blocks of a resident chain every group can use: up to the last snapshot, if there are any."""
        if not self._shape.recurrent:
            return len(chain)
        return int(self._store.states.depths(chain).max(initial=0))

    def group_hits(self, attention: int, own_hit: int) -> tuple[GroupEndpoint, ...]:
        hits = {CacheGroup.ATTENTION: attention, CacheGroup.RECURRENT: own_hit}
        return tuple(GroupEndpoint(group, hits[group]) for group in self._shape.groups)

    def set_lease(self, hold: Hold, chain: Nodes) -> None:
        hold.chain, hold.leased_blocks = chain, len(chain)
        hold.snapshot = int(chain[-1]) if self._shape.recurrent and len(chain) else None

    def hold_lease(self, hold: Hold) -> None:
        self._store.tree.hold(hold.chain)
        if hold.snapshot is not None:
            self._store.states.hold(hold.snapshot)

    def drop_lease(self, hold: Hold) -> None:
        self.let_go(hold)
        self._store.tree.drop(hold.chain)

    def let_go(self, hold: Hold) -> None:
        """The snapshot that the hold starts from is not needed any more."""
        if hold.snapshot is not None:
            self._store.states.let_go(hold.snapshot)
            hold.snapshot = None

    # --- room -------------------------------------------------------------------------------------

    def room(self, hold: Hold) -> int:
        """Blocks that `hold` may still be charged for."""
        alone = hold.ignore_floor and not any(
            other is not hold and other.phase is not Phase.OWNED for other in self.holds.values()
        )
        floor = 0 if alone else self.floor_blocks
        return self._store.pool.free + self._store.tree.device.cached - self.escrowed - floor

    def missing(self, hold: Hold, blocks: int, states: int) -> Shortfall:
        """What lacks for a charge of so many blocks and slots."""
        slots = self._store.states.free + self._store.states.cached - self.escrowed_states
        lacking_blocks, lacking_states = blocks - self.room(hold), states - slots
        if lacking_blocks <= 0 and lacking_states <= 0:
            return ENOUGH
        return Shortfall(max(0, lacking_blocks), max(0, lacking_states))

    def demand(self, hold: Hold) -> int:
        """Blocks of the prompt that are not leased on the device."""
        return blocks_for(hold.prompt_tokens, self._block_tokens) - self._store.tree.on_device(hold.chain)

    def demand_states(self, hold: Hold) -> int:
        """A working state, and the snapshots to be taken."""
        return 1 + hold.snapshots if self._shape.recurrent else 0

    def unheld(self, snapshot: int | None, mine: int) -> int:
        """1 if nobody would hold the snapshot without `mine` (0 or 1) references, else 0."""
        return int(snapshot is not None and self._store.states.references(snapshot) == mine)

    def promise(self, hold: Hold, given: HoldInput) -> Escrow:
        """Count what the rest of the prompt demands by now, if there is room; then move by `given`."""
        hold.require(given)
        blocks, states = self.demand(hold), self.demand_states(hold)
        missing = self.missing(hold, blocks - hold.escrow, states - hold.escrow_states)
        if not missing:
            hold.advance(given)
            self.set_escrow(hold, blocks, states)
        return self._answer(hold, blocks, states, missing)

    def answer(self, hold: Hold, missing: Shortfall = ENOUGH) -> Escrow:
        return self._answer(hold, self.demand(hold), self.demand_states(hold), missing)

    def _answer(self, hold: Hold, demand: int, states: int, missing: Shortfall) -> Escrow:
        endpoint = hold.leased_blocks * self._block_tokens
        if missing:
            return Escrow(endpoint, demand, states, missing)
        free = min(demand, max(0, self._store.pool.free - (self.escrowed - hold.escrow)))
        offload = min(demand - free, self._store.tree.free_host_blocks)
        return Escrow(endpoint, demand, states, ENOUGH, free, offload, demand - free - offload)

    def set_escrow(self, hold: Hold, blocks: int, states: int) -> None:
        self.escrowed += blocks - hold.escrow
        self.escrowed_states += states - hold.escrow_states
        hold.escrow, hold.escrow_states = blocks, states

    def take_slot(self, hold: Hold) -> int:
        self.set_escrow(hold, hold.escrow, hold.escrow_states - 1)
        return self._store.take_slot()

    def is_lost(self, hold: Hold) -> bool:
        return self._store.tree.usable(hold.chain) < len(hold.chain)

    def owned(self, key: HoldKey, what: str) -> Hold:
        hold = self.hold(key)
        if hold.phase is not Phase.OWNED:
            raise hold.illegal(what)
        return hold

    def hold(self, key: HoldKey) -> Hold:
        hold = self.holds.get(key)
        if hold is None:
            raise InternalError("nothing is held", request_id=key.request_id, attempt=key.attempt)
        return hold
