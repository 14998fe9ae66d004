"""What the controller core hears and what it asks its shell to do (DESIGN.md sections 3, 6 and 7).

Owns the event and action types between `machine.ControllerMachine` and its shells: the asyncio
runtime and the virtual-time simulator. `handle(event) -> list[Action]`. `now` is monotonic seconds;
the shell calls `Tick` at least at `next_deadline()` and every 50 ms.
"""

from __future__ import annotations

from dataclasses import dataclass

from wavepp_proto.hashing import HashScope
from wavepp_proto.terms import (
    AnnounceAck,
    DaemonKey,
    Digest,
    Epoch,
    ErrorInfo,
    Fence,
    Formation,
    Heartbeat,
    HoldKey,
    Incarnation,
    JoinPlan,
    JoinReply,
    LinkKind,
    MemberRecord,
    PipelineId,
    PrefillEvent,
    PrefillRequest,
    RequestId,
    Round,
    Row,
    Timings,
    TraceContext,
    Votes,
    WaveOrdinal,
    WaveReport,
)

# --- events -------------------------------------------------------------------------------------


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
    """Any stream to a daemon broke: the daemon is lost to this formation."""

    key: DaemonKey
    incarnation: Incarnation
    formation: Formation
    error: ErrorInfo
    now: float


@dataclass(frozen=True, slots=True)
class Submit:
    request: PrefillRequest
    now: float


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
    | Submit
    | Hashed
    | Cancel
    | AnnounceAcked
    | VotesArrived
    | DigestArrived
    | ReportArrived
    | BeatArrived
    | ReformAsked
    | DrainAsked
    | Tick
)

# --- actions ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FormPipeline:
    """Per plan: Inventory (installs the epoch), then Join, then open all streams; answer Joined or
    JoinFailed. Joins of one formation must run concurrently: links meet inside them."""

    pipeline: PipelineId
    formation: Formation
    plans: tuple[JoinPlan, ...]


@dataclass(frozen=True, slots=True)
class EndFormation:
    """Tell every daemon still there (best effort, bounded), close the streams to all of them."""

    pipeline: PipelineId
    formation: Formation
    targets: tuple[tuple[DaemonKey, Fence], ...]
    cause: ErrorInfo


@dataclass(frozen=True, slots=True)
class RefuseReform:
    pipeline: PipelineId
    error: ErrorInfo


@dataclass(frozen=True, slots=True)
class RefuseSubmit:
    """Answer to the Submit being handled: a request of this id is alive, and goes on undisturbed.

    Every other refusal is an Emit of Failed, because then no stream of this id exists yet."""

    request_id: RequestId
    error: ErrorInfo


@dataclass(frozen=True, slots=True)
class HashPrompt:
    """Hash off the critical path, in slices or a pool; answer Hashed."""

    request_id: RequestId
    scope: HashScope
    token_ids: bytes
    block_tokens: int
    life: int
    """Which life of the request id asks; given back in Hashed."""


@dataclass(frozen=True, slots=True)
class AnnounceRequest:
    """Send to each target in frames <= limits.FRAME_BYTES; serialise the common part once."""

    key: HoldKey
    request: PrefillRequest
    block_hashes: bytes
    trace: TraceContext
    targets: tuple[tuple[DaemonKey, Fence, bool], ...]
    """(daemon, fence, needs tokens)."""


@dataclass(frozen=True, slots=True)
class SendRound:
    key: DaemonKey
    round: Round


@dataclass(frozen=True, slots=True)
class SendWave:
    """The same rows to every daemon of the pipeline; serialise the rows once."""

    pipeline: PipelineId
    ordinal: WaveOrdinal
    rows: tuple[Row, ...]
    targets: tuple[tuple[DaemonKey, Fence], ...]


@dataclass(frozen=True, slots=True)
class WatchAgain:
    """Ask for a fresh digest snapshot."""

    key: DaemonKey
    fence: Fence


@dataclass(frozen=True, slots=True)
class Emit:
    """To the client; Finished and Failed are terminal and come exactly once a request."""

    event: PrefillEvent
    admission: Timings | None = None
    """Beside Admitted: where its admission's time went. For metrics, the client is told at the end."""


@dataclass(frozen=True, slots=True)
class Span:
    """A finished phase of one request, for tracing; times are `now` values of the events."""

    request_id: RequestId
    name: str
    """A name of DESIGN.md section 12."""
    start: float
    end: float
    attributes: tuple[tuple[str, str | int | float | bool], ...] = ()
    parent: str = ""
    """Name of the enclosing phase of the same request ("" = the request itself); children are
    emitted before their parent."""


Action = (
    FormPipeline
    | EndFormation
    | RefuseReform
    | RefuseSubmit
    | HashPrompt
    | AnnounceRequest
    | SendRound
    | SendWave
    | WatchAgain
    | Emit
    | Span
)
