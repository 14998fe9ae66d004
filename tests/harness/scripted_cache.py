"""A cache manager that does as it is told, for tests of what the stage machine makes of its answers.

Answers everything with "held, nothing missing" unless a test scripts otherwise, keeps the phase of each
hold and a list of what was called. Has no blocks: tests about those run on the real cache.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.harness.stage_core import B
from wavepp_proto.errors import RowVoided
from wavepp_proto.hashing import blocks_for
from wavepp_proto.terms import Capacity, Digest, HoldKey, HoldState
from wavepp_stage.core.block_hashes import BlockHashes
from wavepp_stage.core.cache_manager import Escrow, Lease, Materialised, TokenIds
from wavepp_stage.core.census import Census
from wavepp_stage.core.work import BlockTable, CopyDirection, CopyLot, StateWork


@dataclass
class _Held:
    prompt_tokens: int
    endpoint: int
    phase: str = "leased"


@dataclass
class ScriptedCache:
    """Implements cache_manager.CacheManager."""

    lease_answer: Lease | None = None
    escrow_answer: Escrow | None = None
    commit_answer: Escrow | None = None
    revise_answer: Escrow | None = None
    steps: dict[HoldKey, deque[Materialised | RowVoided]] = field(default_factory=lambda: defaultdict(deque))
    """What the next calls of `materialise` come to, by hold; then DONE."""
    due: list[CopyLot] = field(default_factory=list)
    """What the next `take_lots` gives out."""
    called: list[tuple[object, ...]] = field(default_factory=list)
    """(name, key, arguments...) of calls that change something, in order."""
    holds: dict[HoldKey, _Held] = field(default_factory=dict)
    floor_blocks: int = 0
    pool_blocks: int = 16
    cached_blocks: int = 1
    quarantined_blocks: int = 2
    state_slots: int = 8
    cached_states: int = 3
    quarantined_states: int = 4
    host_pool_blocks: int = 32
    host_cached_blocks: int = 5

    def names(self) -> list[str]:
        return [str(call[0]) for call in self.called]

    def copy(self, number: int) -> CopyLot:
        """One block to off-load."""
        lot = CopyLot(number, CopyDirection.OFFLOAD, np.zeros(1, np.int32), np.zeros(1, np.int32))
        self.due.append(lot)
        return lot

    # --- the protocol -----------------------------------------------------------------------------

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
        self.called.append(("lease", key, candidate, snapshots, ignore_floor))
        answer = self.lease_answer or Lease(candidate, candidate)
        if not answer.shortfall:
            self.holds[key] = _Held(prompt_tokens, answer.endpoint)
        return answer

    def escrow(self, key: HoldKey) -> Escrow:
        self.called.append(("escrow", key))
        answer = self.escrow_answer or Escrow(self.holds[key].endpoint, 1)
        if not answer.shortfall:
            self.holds[key].phase = "escrowed"
        return answer

    def commit(self, key: HoldKey) -> Escrow:
        self.called.append(("commit", key))
        answer = self.commit_answer or Escrow(self.holds[key].endpoint, 1)
        if not answer.shortfall:
            self.holds[key].phase = "committed"
        return answer

    def revise(self, key: HoldKey, endpoint: int, snapshots: int = 0) -> Escrow:
        self.called.append(("revise", key, endpoint, snapshots))
        answer = self.revise_answer or Escrow(endpoint, 1)
        if not answer.shortfall:
            self.holds[key].endpoint = answer.endpoint
            self.holds[key].phase = "committed" if answer.endpoint == endpoint else "escrowed"
        return answer

    def materialise(self, key: HoldKey) -> Materialised:
        self.called.append(("materialise", key))
        self.holds[key].phase = "materialising"
        step = self.steps[key].popleft() if self.steps[key] else Materialised.DONE
        if isinstance(step, RowVoided):
            raise step
        if step is Materialised.DONE:
            self.holds[key].phase = "owned"
        return step

    def table(self, key: HoldKey) -> BlockTable:
        return np.arange(blocks_for(self.holds[key].prompt_tokens, B), dtype=np.int32)

    def plan_state(self, key: HoldKey, start: int, snapshots: tuple[int, ...]) -> StateWork | None:
        self.called.append(("plan_state", key, start, snapshots))
        return StateWork(0, None, tuple((position, 1 + index) for index, position in enumerate(snapshots)))

    def publish(self, key: HoldKey, tokens: int) -> None:
        self.called.append(("publish", key, tokens))

    def discard(self, key: HoldKey) -> None:
        self.called.append(("discard", key))

    def release(self, key: HoldKey) -> None:
        if self.holds.pop(key, None) is not None:
            self.called.append(("release", key))

    def hold_state(self, key: HoldKey) -> HoldState | None:
        held = self.holds.get(key)
        return HoldState(key, held.phase, held.endpoint, held.endpoint // B, 0, 0) if held else None

    def inventory(self) -> tuple[HoldState, ...]:
        return tuple(state for key in self.holds if (state := self.hold_state(key)) is not None)

    def census(self) -> Census:
        return Census()

    def end_formation(self, formation: int) -> None:
        self.called.append(("end_formation", formation))
        self.holds.clear()

    def executor_stopped(self, formation: int) -> None:
        self.called.append(("executor_stopped", formation))

    def take_lots(self) -> list[CopyLot]:
        lots, self.due = self.due, []
        return lots

    def copied(self, number: int, ok: bool) -> None:
        self.called.append(("copied", number, ok))

    def capacity(self) -> Capacity:
        return Capacity(1, self.pool_blocks, 0)

    def digests_since(self, seq: int) -> Sequence[Digest]:
        return []

    def check(self) -> None:
        """Nothing is counted twice here."""
