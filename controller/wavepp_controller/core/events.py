"""What the controller core hears and what it asks its shell to do (DESIGN.md).

Owns the event and action types between `machine.ControllerMachine` and its shells: the asyncio
runtime and the virtual-time simulator. `handle(event) -> list[Action]`. `now` is monotonic seconds;
the shell calls `Tick` at least at `next_deadline()` and every 50 ms.
"""

from __future__ import annotations

from dataclasses import dataclass

from wavepp_controller.core.actions import (
    Action,
    AnnounceRequest,
    AskInventory,
    DigestExcess,
    Emit,
    EndFormation,
    FormPipeline,
    HashPrompt,
    RefuseReform,
    RefuseSubmit,
    ReopenStreams,
    SendRound,
    SendWave,
    Span,
    WatchAgain,
)
from wavepp_proto.terms import (
    AnnounceAck,
    DaemonKey,
    Digest,
    Epoch,
    ErrorInfo,
    Formation,
    Heartbeat,
    HoldKey,
    Incarnation,
    Inventory,
    JoinReply,
    LinkKind,
    MemberRecord,
    PipelineId,
    PrefillRequest,
    RequestId,
    Votes,
    WaveReport,
)

__all__ = [
    "Action",
    "AnnounceAcked",
    "AnnounceRequest",
    "AnnounceRides",
    "AskInventory",
    "BeatArrived",
    "Cancel",
    "DigestArrived",
    "DigestExcess",
    "DrainAsked",
    "Emit",
    "EndFormation",
    "Event",
    "FormPipeline",
    "HashPrompt",
    "Hashed",
    "InventoryArrived",
    "JoinFailed",
    "Joined",
    "LeadershipLost",
    "LeadershipWon",
    "MemberGone",
    "MemberUp",
    "MembershipFrozen",
    "PauseOver",
    "ReformAsked",
    "RefuseReform",
    "RefuseSubmit",
    "ReopenStreams",
    "ReportArrived",
    "SendRound",
    "SendWave",
    "Span",
    "StageShape",
    "StreamLost",
    "StreamsReopened",
    "Submit",
    "Tick",
    "VotesArrived",
    "WatchAgain",
]


@dataclass(frozen=True, slots=True)
class LeadershipWon:
    """A new life: every pipeline forms anew under this epoch."""

    epoch: Epoch
    now: float


@dataclass(frozen=True, slots=True)
class LeadershipLost:
    """Nothing more may be sent; every live request fails CONTROLLER_UNAVAILABLE."""

    now: float


@dataclass(frozen=True, slots=True)
class MemberUp:
    record: MemberRecord
    now: float


@dataclass(frozen=True, slots=True)
class MemberGone:
    """Membership only: a standing formation goes on until its heartbeat stops."""

    key: DaemonKey
    incarnation: Incarnation
    now: float


@dataclass(frozen=True, slots=True)
class MembershipFrozen:
    frozen: bool
    now: float


@dataclass(frozen=True, slots=True)
class Joined:
    """Answer to FormPipeline, one per daemon; streams are open when this arrives."""

    key: DaemonKey
    formation: Formation
    reply: JoinReply
    now: float


@dataclass(frozen=True, slots=True)
class JoinFailed:
    key: DaemonKey
    formation: Formation
    error: ErrorInfo
    now: float


@dataclass(frozen=True, slots=True)
class StreamLost:
    """A stream to a daemon broke, or was refused."""

    key: DaemonKey
    incarnation: Incarnation
    formation: Formation
    error: ErrorInfo
    now: float
    resumable: bool = False
    """The connection broke or a message was missing, and the daemon may be alive: the core may answer
    ReopenStreams. False: the process is gone or says that the formation is over."""


@dataclass(frozen=True, slots=True)
class StreamsReopened:
    """Answer to ReopenStreams: all streams are open again, nothing was sent on them yet but the opening heartbeat."""

    key: DaemonKey
    formation: Formation
    now: float


@dataclass(frozen=True, slots=True)
class InventoryArrived:
    """Answer to AskInventory."""

    key: DaemonKey
    inventory: Inventory
    now: float


@dataclass(frozen=True, slots=True)
class Submit:
    request: PrefillRequest
    now: float
    traced: bool = True
    """Its trace is sampled: only then are its spans made, where spans are made at all."""


@dataclass(frozen=True, slots=True)
class Hashed:
    """Packed 32-byte hashes of the full blocks."""

    request_id: RequestId
    block_hashes: bytes
    life: int
    """As in HashPrompt: an id that was cancelled and submitted again may have another prompt."""
    now: float


@dataclass(frozen=True, slots=True)
class Cancel:
    """From the client, or because its stream closed. Unknown ids are counted and ignored."""

    request_id: RequestId
    now: float


@dataclass(frozen=True, slots=True)
class AnnounceAcked:
    key: DaemonKey
    ack: AnnounceAck
    now: float


@dataclass(frozen=True, slots=True)
class AnnounceRides:
    """The shell keeps the announcement back and sends it in front of the next round, on the round's own stream.

    That order takes the place of acknowledgements: a daemon has heard of the request when it is asked to prepare it.
    One that was refused, or went down with its stream, is answered `not announced`, and announced again."""

    key: HoldKey
    targets: tuple[DaemonKey, ...]
    now: float


@dataclass(frozen=True, slots=True)
class VotesArrived:
    key: DaemonKey
    votes: Votes
    now: float


@dataclass(frozen=True, slots=True)
class DigestArrived:
    key: DaemonKey
    digest: Digest
    now: float


@dataclass(frozen=True, slots=True)
class ReportArrived:
    key: DaemonKey
    report: WaveReport
    now: float


@dataclass(frozen=True, slots=True)
class BeatArrived:
    key: DaemonKey
    beat: Heartbeat
    now: float


@dataclass(frozen=True, slots=True)
class StageShape:
    """Override of one stage when a pipeline forms again; None keeps the registered value."""

    stage: int
    first_layer: int | None = None
    last_layer: int | None = None
    pool_blocks: int | None = None


@dataclass(frozen=True, slots=True)
class ReformAsked:
    """Ends the present formation (its requests fail or wait as after a fault) and forms again.

    Raises nothing: a shape that does not fit answers RefuseReform."""

    pipeline: PipelineId
    shapes: tuple[StageShape, ...]
    link: LinkKind | None
    wave_tokens: int | None
    now: float


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """No new requests from now on."""

    now: float


@dataclass(frozen=True, slots=True)
class PauseOver:
    """`machine.wake_at` is reached: admission goes on. A shell that only ticks is served later, not worse."""

    now: float


@dataclass(frozen=True, slots=True)
class Tick:
    now: float


Event = (
    LeadershipWon
    | LeadershipLost
    | MemberUp
    | MemberGone
    | MembershipFrozen
    | Joined
    | JoinFailed
    | StreamLost
    | StreamsReopened
    | InventoryArrived
    | Submit
    | Hashed
    | Cancel
    | AnnounceAcked
    | AnnounceRides
    | VotesArrived
    | DigestArrived
    | ReportArrived
    | BeatArrived
    | ReformAsked
    | DrainAsked
    | PauseOver
    | Tick
)
