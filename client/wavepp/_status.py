"""The controller's status as frozen values, and how they come from its message.

Owns the classes behind `client.status()`. Field names, meanings and units are those of
`admin.proto`; durations end in `_ms`, counts of cache in `_blocks`. Called by `_wire.py` only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, TypeVar

from wavepp_proto import convert
from wavepp_proto.terms import Capacity, DaemonKey, ErrorInfo, StageTimes

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from wavepp_proto.v1 import admin_pb2 as pb

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """What the waves of a stage were learnt to take (microseconds)."""

    c_us: float
    """Per wave."""
    b_us: float
    """Per new token."""
    a_us: float
    """Per pair of a new token and one it attends to."""
    g_us: float
    """Per prefix token and chunk."""
    error: float
    """Mean relative error of the last predictions."""
    samples: int
    """Reports learnt from."""
    believed: bool = False
    """`adaptive` plans with them if every stage's are: errors are small, or noise that cancels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStatus:
    """One stage daemon of a pipeline."""

    key: DaemonKey
    incarnation: int
    address: str
    engine: str
    first_layer: int
    last_layer: int
    """Exclusive."""
    pool_blocks: int
    capacity: Capacity
    indexed_blocks: int
    """Blocks known to the controller's reuse index."""
    digest_in_sync: bool
    digest_age_ms: int
    heartbeat_age_ms: int
    waves_done: int
    pid: int
    version: str
    times: StageTimes
    """Sums since the formation began."""
    groups: tuple[str, ...]
    """Cache groups of its layers: attention, recurrent."""
    host_pool_blocks: int
    """Blocks of the host tier; 0 = none."""
    state_slots: int
    """Slots for recurrent states; 0 where the layers have none."""
    reconnecting: bool
    """Its streams are broken; it is lost if it stays silent."""
    reconnects: int
    """How often its streams were opened again in this formation."""
    inventory_age_ms: int | None
    """Since its holds were last compared; None before the first time."""
    orphans: int
    """Holds and announcements of nobody, found and released in this formation."""
    costs: StageCosts | None = None
    """What its waves were learnt to take; None before the first report."""
    executing_wave: int | None = None
    """What its engine computed at its last heartbeat; None between two waves."""
    executing_ms: int = 0
    """Since it was given that wave."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStatus:
    """One pipeline, with the daemons that serve it."""

    pipeline: str
    state: str
    """forming, serving or broken."""
    formation: int
    stages: int
    missing_stages: tuple[int, ...]
    """Stages that lack a daemon, each once."""
    model: str
    model_path: str
    block_tokens: int
    window: int
    wave_tokens: int
    waves_in_flight: int
    queued_requests: int
    running_requests: int
    parked_requests: int
    """Waiting behind a request that computes the same prefix."""
    daemons: tuple[StageStatus, ...]
    link: str
    policy: str
    mode: str = "overlapped"
    """How admission and execution share time: overlapped, lockstep or drain."""
    last_fault: ErrorInfo | None
    """Why the last formation ended; None if none did."""
    missing: tuple[DaemonKey, ...] = ()
    """Places without a daemon: stage and rank."""
    ready: bool = False
    """A request that comes now is served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStatus:
    """One live request."""

    request_id: str
    pipeline: str
    state: str
    prompt_tokens: int
    endpoint: int
    scheduled_tokens: int
    computed_tokens: int
    age_ms: int
    priority: int
    waiting_for: str
    """Why it waits; empty when it does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedMember:
    """A stage daemon that no pipeline can use, with the reason."""

    key: DaemonKey
    address: str
    error: ErrorInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """What one controller knows and does."""

    version: str
    cluster: str
    epoch: int
    leader: bool
    draining: bool
    ready: bool
    """It leads, takes requests, and some pipeline is ready."""
    membership_frozen: bool
    """etcd does not answer: membership stands still."""
    pid: int
    etcd_version: str
    pipelines: tuple[PipelineStatus, ...]
    requests: tuple[RequestStatus, ...]
    """Empty unless asked for."""
    refused: tuple[RefusedMember, ...]
    counters: Mapping[str, int]
    """Since this controller started."""


def cluster_status_from_pb(message: pb.StatusResponse) -> ClusterStatus:
    return _copy(
        ClusterStatus,
        message,
        pipelines=tuple(map(_pipeline_from_pb, message.pipelines)),
        requests=tuple(_copy(RequestStatus, request) for request in message.requests),
        refused=tuple(map(_refused_from_pb, message.refused)),
        counters=dict(message.counters),
    )


def _pipeline_from_pb(message: pb.PipelineStatus) -> PipelineStatus:
    return _copy(
        PipelineStatus,
        message,
        missing_stages=tuple(message.missing_stages),
        missing=tuple(map(convert.daemon_key_from_pb, message.missing)),
        daemons=tuple(map(_stage_from_pb, message.daemons)),
        last_fault=convert.error_from_pb(message.last_fault) if message.HasField("last_fault") else None,
    )


def _stage_from_pb(message: pb.StageStatus) -> StageStatus:
    return _copy(
        StageStatus,
        message,
        key=convert.daemon_key_from_pb(message.key),
        capacity=convert.capacity_from_pb(message.capacity),
        times=convert.stage_times_from_pb(message.times),
        groups=tuple(message.groups),
        costs=_copy(StageCosts, message.costs) if message.HasField("costs") else None,
        inventory_age_ms=message.inventory_age_ms if message.HasField("inventory_age_ms") else None,
        executing_wave=message.executing_wave if message.HasField("executing_wave") else None,
    )


def _refused_from_pb(message: pb.RefusedMember) -> RefusedMember:
    return _copy(
        RefusedMember,
        message,
        key=convert.daemon_key_from_pb(message.key),
        error=convert.error_from_pb(message.error),
    )


def _copy(cls: type[T], message: Message, **converted: object) -> T:
    """A `cls` whose fields are those of `message` of the same name, or `converted` where types differ."""
    names = (field.name for field in fields(cls) if field.name not in converted)  # type: ignore[arg-type]
    return cls(**{name: getattr(message, name) for name in names}, **converted)
