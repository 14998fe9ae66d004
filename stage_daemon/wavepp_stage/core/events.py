"""What the stage core hears and what it answers (DESIGN.md sections 3, 5 and 7).

Owns the event and action types between `machine.StageMachine` and its shells: the asyncio runtime
and the virtual-time simulator. `handle(event) -> list[Action]` is called under the shell's one
mutex; a fence mismatch raises StaleMessage before any handler. `now` is monotonic seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from wavepp_proto.terms import (
    AnnounceAck,
    AnnounceFrame,
    Capacity,
    ErrorInfo,
    Fence,
    Inventory,
    JoinPlan,
    Release,
    Round,
    RowFault,
    RowResult,
    Votes,
    WaveCommand,
    WaveOrdinal,
)
from wavepp_stage.core.work import WaveWork

# --- events from the network --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InventoryAsked:
    """Installs the epoch first (a higher epoch fences the lower), then answers InventoryTaken."""

    fence: Fence
    now: float


@dataclass(frozen=True, slots=True)
class JoinAsked:
    """Ends an earlier formation and installs this one; an unchanged pool keeps its cached blocks.

    Answers FormationStarted with `rebuild` True when band, pool, block size or budget changed (the
    shell loads the engine again and every cached block is gone, in the digest as well)."""

    plan: JoinPlan
    now: float


@dataclass(frozen=True, slots=True)
class FormationEnd:
    """Drops queued waves, retires every sequence into quarantine, releases every hold."""

    fence: Fence
    now: float


@dataclass(frozen=True, slots=True)
class Announced:
    frame: AnnounceFrame
    now: float


@dataclass(frozen=True, slots=True)
class RoundArrived:
    round: Round
    now: float


@dataclass(frozen=True, slots=True)
class WaveArrived:
    """Must be the next ordinal of this formation (a re-sent older one is ignored)."""

    command: WaveCommand
    now: float


@dataclass(frozen=True, slots=True)
class ReleaseArrived:
    """A release outside a round."""

    fence: Fence
    release: Release
    now: float


# --- events from the executor -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PrepareWave:
    """Materialise the rows of the next queued wave; answers WavePrepared.

    Without WavePrepared among the actions, a slice of the work is done and more remains: the mutex
    was due a rest, post the event again."""

    ordinal: WaveOrdinal
    now: float
    formation: int | None = None
    """The wave's formation: an executor that outlives it is refused. None skips this check."""


@dataclass(frozen=True, slots=True)
class WaveRetired:
    """The engine is done with the wave: publish full blocks of non-void rows, apply releases.

    Rows in `void_bitmap` came void or were voided here (`faults` says why)."""

    ordinal: WaveOrdinal
    void_bitmap: int
    faults: tuple[RowFault, ...]
    results: tuple[RowResult, ...]
    now: float
    formation: int | None = None
    """As in PrepareWave."""


@dataclass(frozen=True, slots=True)
class ExecutorStopped:
    """No wave of an ended formation can touch a block any more: quarantine is freed."""

    formation: int
    now: float


Event = (
    InventoryAsked
    | JoinAsked
    | FormationEnd
    | Announced
    | RoundArrived
    | WaveArrived
    | ReleaseArrived
    | PrepareWave
    | WaveRetired
    | ExecutorStopped
)

# --- actions ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InventoryTaken:
    inventory: Inventory


@dataclass(frozen=True, slots=True)
class FormationStarted:
    plan: JoinPlan
    rebuild: bool
    ended: int
    """Formation that this one replaced; 0 if there was none."""


@dataclass(frozen=True, slots=True)
class FormationEnded:
    """The shell stops the executor and abandons the link, then posts ExecutorStopped."""

    formation: int


@dataclass(frozen=True, slots=True)
class SendAck:
    ack: AnnounceAck


@dataclass(frozen=True, slots=True)
class SendVotes:
    votes: Votes


@dataclass(frozen=True, slots=True)
class WaveQueued:
    """The executor has something to do: `command` is runnable once its activations are there."""

    command: WaveCommand


@dataclass(frozen=True, slots=True)
class WavePrepared:
    work: WaveWork
    faults: tuple[RowFault, ...]
    """Rows that could not be materialised or whose start is not what was computed: void."""


@dataclass(frozen=True, slots=True)
class WaveDone:
    """What the shell reports upstream, with times it measured itself."""

    ordinal: WaveOrdinal
    void_bitmap: int
    running_hash: bytes
    faults: tuple[RowFault, ...]
    results: tuple[RowResult, ...]
    capacity: Capacity


@dataclass(frozen=True, slots=True)
class DigestChanged:
    """Residency or capacity changed: readers of the digest feed have something to fetch."""


@dataclass(frozen=True, slots=True)
class CoreError:
    """Something impossible was seen (an invariant is broken); the shell logs it and ends the formation."""

    error: ErrorInfo


Action = (
    InventoryTaken
    | FormationStarted
    | FormationEnded
    | SendAck
    | SendVotes
    | WaveQueued
    | WavePrepared
    | WaveDone
    | DigestChanged
    | CoreError
)
