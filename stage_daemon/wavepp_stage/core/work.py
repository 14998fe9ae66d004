"""One wave on one stage as plain data: what the core prepares and an engine runs.

Row i of a wave owns payload rows [sum(lengths before i), + length i), void rows included: the shape
of a payload follows from the wave command alone, so receives can be posted early.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from wavepp_proto.fence import NO_EPOCH
from wavepp_proto.terms import Epoch, Formation, HoldKey, Sampling, TraceContext, WaveOrdinal


class CopyDirection(Enum):
    OFFLOAD = "offload"  # device to host
    ONBOARD = "onboard"  # host to device


BlockTable = npt.NDArray[np.int32]
"""Device block ids of one sequence, in prompt order."""


@dataclass(frozen=True, slots=True, eq=False)
class CopyLot:
    """Blocks to copy between the tiers, all in one direction. A stage runs its lots one at a time, in number order:
    a block off-loaded by one lot may be overwritten, or brought back, by the next."""

    number: int
    """From 1, growing for the life of an incarnation."""
    direction: CopyDirection
    device: BlockTable
    """Device block ids, shape [n]."""
    host: BlockTable
    """Host block ids, shape [n]; device[i] and host[i] are one copy."""

    def __len__(self) -> int:
        return len(self.device)


@dataclass(frozen=True, slots=True)
class StateWork:
    """What a row does with the recurrent state of its sequence. Slots are numbers below `state_slots`."""

    working: int
    """Slot of the sequence's working state: read at the start of the chunk, written at its end."""
    restore: int | None = None
    """Slot of the snapshot that the working state is loaded from before the first token; None goes on with what
    the working slot holds, and at start 0 begins with the empty state."""
    snapshots: tuple[tuple[int, int], ...] = ()
    """(position, slot), ascending, in (start, start + length]: the state after `position` tokens goes to `slot`."""


@dataclass(frozen=True, slots=True)
class RowWork:
    """One chunk, ready to run: positions [start, start + length) of one sequence."""

    key: HoldKey
    start: int
    length: int
    blocks: BlockTable
    """Snapshot covering [0, start + length): len == ceil((start + length) / B); empty where the engine's own cache
    manager numbers its blocks."""
    prefix_hashes: npt.NDArray[np.uint64]
    """Short hashes of the full blocks below `start` + `length` (canaries; shape [n_full])."""
    token_ids: npt.NDArray[np.int32] | None
    """Shape [length] on stages that get tokens, else None."""
    sampling: Sampling | None
    """Set only on the last stage and only when the chunk ends its prompt."""
    void: bool = False
    """The row flows (its payload rows are zero) and computes nothing."""
    trace: TraceContext = TraceContext()
    state: StateWork | None = None
    """None where the stage has no recurrent group, and in void rows."""


@dataclass(frozen=True, slots=True)
class WaveWork:
    formation: Formation
    ordinal: WaveOrdinal
    rows: tuple[RowWork, ...]
    chunks: bytes
    """First 16 bytes of the SHA-256 over the row list: neighbours must run the same rows."""
    ready_at: float = 0.0
    """Monotonic seconds at which its command, its activations and its copies had all come; 0 if nobody says.
    Only for engines that model a device's queue."""
    epoch: Epoch = NO_EPOCH
    """Formations are counted anew in each: with it, a wave has a name of its own."""
    ended: Callable[[float], bool] | None = None
    """Waits for at most so many seconds; whether the formation has ended. For engines whose ranks meet within a wave:
    one that waits for the others must not wait for a rank that will not run this wave. None: it does not end."""

    @property
    def tokens(self) -> int:
        return sum(row.length for row in self.rows)
