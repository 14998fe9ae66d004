"""What the stage core hears and what it answers (DESIGN.md).

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
    Incarnation,
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
from wavepp_stage.core.work import CopyLot, WaveWork

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
    announces: tuple[AnnounceFrame, ...] = ()
    """Came in front of the round, each the only frame of its request; nobody waits for an acknowledgement."""


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


@dataclass(frozen=True, slots=True)
class ControllerHeard:
    """A heartbeat of the present formation's controller, or the opening of its wave stream.

    From the first on the core fences itself: whatever the controller wants (gate.OF_THE_CONTROLLER) and comes
    more than the plan's `silence_ms` after the last one heard ends the formation and answers SelfFenced instead."""

    fence: Fence
    now: float


@dataclass(frozen=True, slots=True)
class Reincarnate:
    """The daemon is somebody new from now on: every hold is gone, what is published stays reusable.

    The shell posts it after SelfFenced, once the executor has stopped, and registers again."""

    incarnation: Incarnation
    now: float


# --- events from the executor -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PrepareWave:
    """Materialise the rows of the next queued wave; answers WavePrepared.

    WaveWaits instead: copies are under way, post the event again after a CopiesEnded. Neither of the
    two: a slice of the work is done and more remains, the mutex was due a rest, post it again at once."""

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
    """No wave and no copy of an ended formation can touch a block any more: quarantine is freed."""

    formation: int
    now: float


@dataclass(frozen=True, slots=True)
class CopiesEnded:
    """A lot of StartCopies is complete, or has failed as a whole. Not fenced: copies outlive formations."""

    number: int
    ok: bool
    now: float


Event = (
    InventoryAsked
    | JoinAsked
    | FormationEnd
    | Announced
    | RoundArrived
    | WaveArrived
    | ReleaseArrived
    | ControllerHeard
    | Reincarnate
    | PrepareWave
    | WaveRetired
    | ExecutorStopped
    | CopiesEnded
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
class WaveWaits:
    """The wave's blocks are still being copied: PrepareWave again after the next CopiesEnded."""

    ordinal: WaveOrdinal


@dataclass(frozen=True, slots=True)
class StartCopies:
    """Hand the lot to the copy thread, which runs lots one at a time in this order; answer CopiesEnded."""

    lot: CopyLot


@dataclass(frozen=True, slots=True)
class SelfFenced:
    """The controller was silent for too long: nothing old is acted on. The formation has ended (FormationEnded is
    among the actions). The shell stops the executor, posts Reincarnate and registers anew."""

    silent_s: float


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
    | WaveWaits
    | StartCopies
    | SelfFenced
    | WaveDone
    | DigestChanged
    | CoreError
)
