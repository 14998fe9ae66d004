"""What the stage core asks of a cache (DESIGN.md section 9).

Owns the Protocol and its answers. `block_cache.BlockCache` implements it for engines that leave
their cache to us; an engine with a cache manager of its own brings an adapter. The machine
(machine.py) is the only caller and holds the shell's mutex; no method blocks or copies cache.

One hold's life: lease, escrow, commit (revise any number of times before materialise), materialise,
publish after each of its waves, release. `release` is legal at any time, and idempotent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from wavepp_proto.terms import Capacity, Digest, HoldKey, HoldState
from wavepp_stage.core.block_hashes import BlockHashes
from wavepp_stage.core.census import Census
from wavepp_stage.core.work import BlockTable


@dataclass(frozen=True, slots=True)
class Lease:
    """Answer to `lease`."""

    endpoint: int
    """Tokens held; a multiple of B, at most the candidate. 0 when refused."""
    own_hit: int
    """Longest prefix this stage could reuse (tokens), capped strictly below the prompt."""
    shortfall: int = 0
    """Blocks missing for lease AND escrow; 0 means held."""


@dataclass(frozen=True, slots=True)
class Escrow:
    """Answer to `escrow` and `revise`."""

    endpoint: int
    """Tokens held after this step."""
    demand: int
    """Blocks promised: ceil(prompt / B) less the leased ones."""
    shortfall: int = 0
    """Blocks missing; 0 means promised. On a shortfall nothing has changed."""
    backed_free: int = 0
    backed_offload: int = 0
    backed_evict: int = 0
    """What backs the promise (blocks): free, to off-load, to evict."""


class CacheManager(Protocol):
    """One stage's cache: blocks, holds and the digest of what is reusable."""

    def lease(self, key: HoldKey, prompt_tokens: int, hashes: BlockHashes, candidate: int, ignore_floor: bool) -> Lease:
        """Hold the longest resident prefix up to `candidate` tokens; charged to the taker.

        On a shortfall nothing is held. A key that holds something already is illegal."""

    def escrow(self, key: HoldKey) -> Escrow:
        """Promise room for the rest of the prompt, all or nothing."""

    def commit(self, key: HoldKey) -> None:
        """Fix the endpoint; room and floor were checked by the step that took them."""

    def revise(self, key: HoldKey, endpoint: int) -> Escrow:
        """Lower the endpoint to at most `endpoint` tokens and commit there.

        On a shortfall the old hold stays as it was."""

    def materialise(self, key: HoldKey) -> bool:
        """Take the promised blocks and build the block table of a committed hold.

        False when a slice of it is done and the rest must wait for another call: one call is one
        critical section. The hold is `materialising` in between."""

    def table(self, key: HoldKey) -> BlockTable:
        """The whole block table of a materialised hold; the caller copies what a wave needs."""

    def publish(self, key: HoldKey, tokens: int) -> None:
        """Make the full blocks below `tokens` reusable: a wave computed them and has retired."""

    def release(self, key: HoldKey) -> None:
        """Give up everything: first the escrow, then the references. Unknown keys are no error."""

    def hold_state(self, key: HoldKey) -> HoldState | None:
        """What `key` holds; None if nothing."""

    def inventory(self) -> tuple[HoldState, ...]:
        """Every hold, in the order in which they were taken."""

    def census(self) -> Census:
        """How full it is, in counts."""

    def end_formation(self, formation: int) -> None:
        """Retire every hold; what an executor may still touch goes into quarantine."""

    def executor_stopped(self, formation: int) -> None:
        """Nothing touches that formation's blocks any more."""

    def capacity(self) -> Capacity: ...

    @property
    def pool_blocks(self) -> int: ...

    @property
    def cached_blocks(self) -> int: ...

    @property
    def quarantined_blocks(self) -> int: ...

    @property
    def floor_blocks(self) -> int:
        """Blocks that escrows may never touch."""

    @floor_blocks.setter
    def floor_blocks(self, blocks: int) -> None: ...

    def digests_since(self, seq: int) -> list[Digest]:
        """What a reader at `seq` has not seen: deltas, or one snapshot in pages; seq 0 knows nothing."""

    def check(self) -> None:
        """Verify every invariant from first principles; raises InternalError naming the broken one."""
