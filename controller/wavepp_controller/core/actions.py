"""What the controller core asks its shell to do (DESIGN.md).

Owns the action types of `machine.ControllerMachine`; `events` has what it hears, and gives both out under one
name. An action is carried out in the order of the list, and answered by the event that its docstring names.
"""

from __future__ import annotations

from dataclasses import dataclass

from wavepp_proto.hashing import HashScope
from wavepp_proto.terms import (
    DaemonKey,
    ErrorInfo,
    Fence,
    Formation,
    HoldKey,
    JoinPlan,
    PipelineId,
    PrefillEvent,
    PrefillRequest,
    RequestId,
    Round,
    Row,
    Timings,
    TraceContext,
    WaveOrdinal,
)


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
    limit_ms: int
    """Longest that any stage may take for it."""


@dataclass(frozen=True, slots=True)
class WatchAgain:
    """Open the digest stream again from `from_seq` on; 0 asks for a fresh snapshot."""

    key: DaemonKey
    fence: Fence
    from_seq: int = 0


@dataclass(frozen=True, slots=True)
class DigestExcess:
    """For the log: a digest told of more blocks and snapshots than its daemon has room for, which counts as empty until
    a snapshot of it fits. Not answered."""

    key: DaemonKey
    told: int
    most: int


@dataclass(frozen=True, slots=True)
class ReopenStreams:
    """Close what is left of the streams and open all but the digest's again, to the same incarnation, in the same
    formation; answer StreamsReopened or StreamLost. The first message on RunWaves is a heartbeat with
    `reported_wave`: the daemon sends every later report again, and the core what was not answered."""

    key: DaemonKey
    fence: Fence
    reported_wave: WaveOrdinal


@dataclass(frozen=True, slots=True)
class AskInventory:
    """Take the daemon's inventory (unary, bounded); answer InventoryArrived, or nothing if it does not come.

    `fence.ordinal` numbers the question: the daemon gives the fence back, and a late answer to an earlier one is
    not taken for this one's."""

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
    """A name of DESIGN.md."""
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
    | DigestExcess
    | ReopenStreams
    | AskInventory
    | Emit
    | Span
)
