"""What one attempt of one request holds on this stage, and the one table of its life.

    lease          escrow             commit              materialise        install
  ─────────▶ leased ─────▶ escrowed ─────▶ committed ─────────▶ materialising ─────▶ owned
                │              ▲  │ revise      │ uncommit │          │ abandon         │
                │              └──┴─────────────┘          │          │ release: waits  │
                └───────────────── release ────────────────┴──────────┴── release ──────┴──▶ retired

A release in `materialising` waits for its end; one whose prefix was lost has no end and is abandoned.
Owns phases and the story of each hold. Counts and blocks are block_cache.py's. The table is the truth:
`advance` compares the phase and sets it in one step, an absent pair is an IllegalTransition.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from wavepp_proto.errors import InternalError
from wavepp_proto.terms import ErrorInfo, HoldKey, HoldState
from wavepp_stage.core.block_hashes import BlockHashes
from wavepp_stage.core.block_tree import NO_BLOCKS, NO_NODES
from wavepp_stage.core.tier import Nodes
from wavepp_stage.core.work import BlockTable

STORY_ENTRIES = 16


class Phase(StrEnum):
    LEASED = "leased"  # holds a chain; holds no room
    ESCROWED = "escrowed"  # room is counted; the endpoint may still fall
    COMMITTED = "committed"  # the endpoint is fixed
    MATERIALISING = "materialising"  # blocks are being taken; a release waits
    OWNED = "owned"  # the sequence has its block table
    RETIRED = "retired"  # holds nothing


class HoldInput(StrEnum):
    ESCROW = "escrow"
    COMMIT = "commit"
    UNCOMMIT = "uncommit"  # a revise may lower a committed endpoint
    REVISE = "revise"  # trim an uncommitted hold
    MATERIALISE = "materialise"
    INSTALL = "install"
    RELEASE = "release"
    ABANDON = "abandon"  # its prefix was lost to a failed copy, and its copies have ended
    END_FORMATION = "end formation"  # the waves are gone, whatever was being done


TRANSITIONS: dict[tuple[Phase, HoldInput], Phase] = {
    (Phase.LEASED, HoldInput.ESCROW): Phase.ESCROWED,
    (Phase.LEASED, HoldInput.RELEASE): Phase.RETIRED,
    (Phase.LEASED, HoldInput.END_FORMATION): Phase.RETIRED,
    (Phase.ESCROWED, HoldInput.COMMIT): Phase.COMMITTED,
    (Phase.ESCROWED, HoldInput.REVISE): Phase.ESCROWED,
    (Phase.ESCROWED, HoldInput.RELEASE): Phase.RETIRED,
    (Phase.ESCROWED, HoldInput.END_FORMATION): Phase.RETIRED,
    (Phase.COMMITTED, HoldInput.UNCOMMIT): Phase.ESCROWED,
    (Phase.COMMITTED, HoldInput.MATERIALISE): Phase.MATERIALISING,
    (Phase.COMMITTED, HoldInput.RELEASE): Phase.RETIRED,
    (Phase.COMMITTED, HoldInput.END_FORMATION): Phase.RETIRED,
    (Phase.MATERIALISING, HoldInput.INSTALL): Phase.OWNED,
    (Phase.MATERIALISING, HoldInput.RELEASE): Phase.MATERIALISING,
    (Phase.MATERIALISING, HoldInput.ABANDON): Phase.RETIRED,
    (Phase.MATERIALISING, HoldInput.END_FORMATION): Phase.RETIRED,
    (Phase.OWNED, HoldInput.RELEASE): Phase.RETIRED,
    (Phase.OWNED, HoldInput.END_FORMATION): Phase.RETIRED,
}


class IllegalTransition(RuntimeError):
    """An input that the hold's phase does not know: a bug here, told with the hold's story."""

    def __init__(self, key: HoldKey, phase: Phase, given: str, story: str) -> None:
        super().__init__(f"{given} is illegal for a hold that is {phase.value}")
        self.key = key
        self.story = story

    def info(self) -> ErrorInfo:
        """As data for the shell."""
        request, attempt = self.key.request_id, self.key.attempt
        return InternalError(str(self), request_id=request, attempt=attempt, story=self.story).info()


@dataclass(slots=True)
class Hold:
    """One entry of the ledger.

    Block row of the prompt, each position in exactly one place:

        | chain: held nodes             | to come                    |   before materialise
        | leased        | private ... published ─▶ node | private ... |   after: `table` covers it all
    """

    key: HoldKey
    prompt_tokens: int
    hashes: BlockHashes
    ignore_floor: bool
    """The one oversized request: its own charges may use the headroom."""
    snapshots: int = 0
    """Recurrent snapshots to be taken on the way."""
    phase: Phase = Phase.LEASED
    chain: Nodes = field(default_factory=lambda: NO_NODES)
    """Held nodes from the root down: the lease, then what this sequence published."""
    leased_blocks: int = 0
    """Blocks of the lease; the endpoint in blocks."""
    snapshot: int | None = None
    """Node whose recurrent snapshot is held; None at endpoint 0 and once it was used."""
    escrow: int = 0
    """Blocks promised and not taken yet; falls with each one taken."""
    escrow_states: int = 0
    """Slots promised and not taken yet."""
    taken: BlockTable = field(default_factory=lambda: NO_BLOCKS)
    """Blocks behind the lease, while materialising."""
    after_lot: int = 0
    """Number of the last copy lot that must end before this hold is owned, or gives its blocks back."""
    table: BlockTable = field(default_factory=lambda: NO_BLOCKS)
    """ceil(prompt / B) block ids of an owned hold."""
    private: npt.NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, dtype=np.bool_))
    """Which blocks of `table` belong to this sequence alone."""
    working: int | None = None
    """Slot of the working state of an owned hold."""
    planned: dict[int, int] = field(default_factory=dict)
    """Slots of snapshots that prepared waves take, by position; not published yet."""
    publishing: bool = True
    """False after a hash collision or for want of room: the rest of the sequence stays private."""
    void: bool = False
    """A row of it was void: no later snapshot is published, its slot may hold anything."""
    release_waits: bool = False
    """A release arrived in `materialising`."""
    story: deque[str] = field(default_factory=lambda: deque(maxlen=STORY_ENTRIES))

    def advance(self, given: HoldInput) -> Phase:
        """Move by the table; raises IllegalTransition with the story of this hold."""
        reached = self.require(given)
        self.story.append(f"{given.value}:{reached.value}")
        self.phase = reached
        return reached

    def require(self, given: HoldInput) -> Phase:
        """Where `given` leads; raises IllegalTransition if nowhere. Nothing moves."""
        reached = TRANSITIONS.get((self.phase, given))
        if reached is None:
            raise self.illegal(given.value)
        return reached

    def illegal(self, given: str) -> IllegalTransition:
        return IllegalTransition(self.key, self.phase, given, " > ".join(self.story) or "new")

    def state(self, block_tokens: int) -> HoldState:
        """This hold as the inventory lists it."""
        return HoldState(
            self.key,
            self.phase.value,
            endpoint=self.leased_blocks * block_tokens,
            leased_blocks=self.leased_blocks,
            escrow_blocks=self.escrow,
            owned_blocks=len(self.taken) + int(np.count_nonzero(self.private)),
            escrow_states=self.escrow_states,
            owned_states=(self.working is not None) + len(self.planned),
        )

    @property
    def private_blocks(self) -> BlockTable:
        """Blocks that belong to this sequence alone."""
        return np.concatenate([self.taken, self.table[self.private]])

    @property
    def slots(self) -> list[int]:
        """Slots that belong to this sequence alone."""
        return [*(() if self.working is None else (self.working,)), *self.planned.values()]
