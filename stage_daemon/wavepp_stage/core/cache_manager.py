"""What the stage core asks of a cache (DESIGN.md).

Owns the Protocol and its answers. `block_cache.BlockCache` implements it for engines that leave
their cache to us; an engine with a cache manager of its own brings an adapter. The machine
(machine.py) is the only caller and holds the shell's mutex; no method blocks or copies cache.

Where an engine's own manager stands behind it (EngineTraits.cache_thread), the methods from `lease` to
`release`, and `executor_stopped`, come on the executor's thread. All others come on any thread, beside a
wave that computes: they are bookkeeping, and never ask that manager.

One hold's life: lease, escrow, commit (revise any number of times before materialise), materialise,
plan_state and publish for each of its rows, release. `release` is legal at any time, and idempotent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from wavepp_proto.terms import Capacity, Digest, GroupEndpoint, HoldKey, HoldState
from wavepp_stage.core.block_hashes import BlockHashes
from wavepp_stage.core.census import Census
from wavepp_stage.core.work import BlockTable, CopyLot, StateWork

TokenIds = npt.NDArray[np.int32]
"""Shape [prompt_tokens]."""


@dataclass(frozen=True, slots=True)
class Shortfall:
    """What is missing; false when nothing is."""

    blocks: int = 0
    states: int = 0
    """Slots of the recurrent group."""

    def __bool__(self) -> bool:
        return bool(self.blocks or self.states)


ENOUGH = Shortfall()


@dataclass(frozen=True, slots=True)
class Lease:
    """Answer to `lease`."""

    endpoint: int
    """Tokens held, usable by EVERY group of this stage; a multiple of B, at most the candidate. 0 when refused."""
    own_hit: int
    """Longest prefix this stage alone could reuse (tokens), capped strictly below the prompt."""
    group_hits: tuple[GroupEndpoint, ...] = ()
    """The same for each group alone: deepest resident block, deepest snapshot."""
    shortfall: Shortfall = ENOUGH
    """Missing for lease AND escrow; false means held."""


@dataclass(frozen=True, slots=True)
class Escrow:
    """Answer to `escrow`, `commit` and `revise`."""

    endpoint: int
    """Tokens held after this step."""
    demand: int
    """Blocks promised: ceil(prompt / B) less the leased ones that are on the device."""
    demand_states: int = 0
    """Slots promised: one working state and the snapshots to be taken."""
    shortfall: Shortfall = ENOUGH
    """False means promised. On a shortfall nothing has changed."""
    backed_free: int = 0
    backed_offload: int = 0
    backed_evict: int = 0
    """What backs the promise (blocks): free, to off-load, to evict."""


class Materialised(Enum):
    """How far `materialise` got."""

    MORE = "more"  # a slice is done; call again
    COPYING = "copying"  # everything is taken; lots are under way: call again after one ended
    DONE = "done"  # the sequence owns its table


class CacheManager(Protocol):
    """One stage's cache: blocks, recurrent states, holds and the digest of what is reusable."""

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
        """Hold the longest usable prefix up to `candidate` tokens, and the snapshot at its end where the stage has
        recurrent layers; charged to the taker. `snapshots` will be taken on the way, their slots are part of the
        escrow. `ignore_floor` is heeded only while no other hold waits to be materialised. `tokens`, the whole prompt,
        is there for caches that match on tokens instead of hashes (EngineTraits.needs_tokens).

        On a shortfall nothing is held. A key that holds something already is illegal."""

    def escrow(self, key: HoldKey) -> Escrow:
        """Promise room for the rest of the prompt, all or nothing."""

    def commit(self, key: HoldKey) -> Escrow:
        """Fix the endpoint after checking demand and floors again. On a shortfall it stays uncommitted."""

    def revise(self, key: HoldKey, endpoint: int, snapshots: int = 0) -> Escrow:
        """Lower the hold to the longest usable prefix of at most `endpoint` tokens: un-commit, acquire the earlier
        snapshot, trim, promise anew; committed again if that prefix is exactly `endpoint`, else escrowed.

        On a shortfall the old hold stays as it was."""

    def materialise(self, key: HoldKey) -> Materialised:
        """Take the promised blocks and the working state, bring host-resident prefix blocks back, and build the
        block table of a committed hold. One call is one critical section; the hold is `materialising` in between.

        Raises RowVoided when a copy failed: the hold stays materialising until it is released."""

    def table(self, key: HoldKey) -> BlockTable:
        """The whole block table of a materialised hold; the caller copies what a wave needs."""

    def plan_state(self, key: HoldKey, start: int, snapshots: tuple[int, ...]) -> StateWork | None:
        """What the row beginning at `start` does with recurrent state; takes a slot for each snapshot from the
        escrow. None on a stage without recurrent layers. A snapshot beyond the promise is left out."""

    def publish(self, key: HoldKey, tokens: int) -> None:
        """Make the full blocks and the snapshots below or at `tokens` reusable: a wave computed them and has retired.
        After the first, the snapshot that the sequence began with is no longer held."""

    def discard(self, key: HoldKey) -> None:
        """A wave with a row of `key` has retired and that row was void: its snapshots are not published."""

    def release(self, key: HoldKey) -> None:
        """Give up everything: first the escrow, then the references. Unknown keys are no error."""

    def hold_state(self, key: HoldKey) -> HoldState | None:
        """What `key` holds; None if nothing."""

    def inventory(self) -> tuple[HoldState, ...]:
        """Every hold, in the order in which they were taken."""

    def census(self) -> Census:
        """How full it is, in counts."""

    def end_formation(self, formation: int) -> None:
        """Retire every hold; what an executor or a copy may still touch goes into quarantine, and so does whatever
        only the executor's thread may give back."""

    def executor_stopped(self, formation: int) -> None:
        """No wave and no copy of that formation touches a block any more: its quarantine is free. Of a formation that
        ended under an earlier cache, nothing."""

    # --- copies between the tiers -----------------------------------------------------------------

    def take_lots(self) -> list[CopyLot]:
        """Lots to be started now, in order; each is given out once, at most MAX_LOTS are under way."""

    def copied(self, number: int, ok: bool) -> None:
        """A lot is complete, or failed: then what it should have moved is dropped, and who needs it is void."""

    # --- facts ------------------------------------------------------------------------------------

    def capacity(self) -> Capacity:
        """Room as it is now; of a manager that is made by loading, what was planned until then."""

    @property
    def pool_blocks(self) -> int: ...

    @property
    def cached_blocks(self) -> int: ...

    @property
    def quarantined_blocks(self) -> int: ...

    @property
    def state_slots(self) -> int: ...

    @property
    def cached_states(self) -> int:
        """Snapshots that nobody holds."""

    @property
    def quarantined_states(self) -> int: ...

    @property
    def host_pool_blocks(self) -> int: ...

    @property
    def host_cached_blocks(self) -> int:
        """Host blocks that nobody holds."""

    @property
    def floor_blocks(self) -> int:
        """Blocks that escrows may never touch."""

    @floor_blocks.setter
    def floor_blocks(self, blocks: int) -> None: ...

    def digests_since(self, seq: int) -> Sequence[Digest]:
        """What a reader at `seq` has not seen: deltas, or one snapshot in pages; seq 0 knows nothing."""

    def check(self) -> None:
        """Verify every invariant from first principles; raises InternalError naming the broken one."""
