"""What operators see: a snapshot of the controller core as plain data (Admin service, `wavepp status`).

Owns the shapes and how they are read off a pipeline. Computes nothing that the core does not know and
changes nothing. Ages are milliseconds at the time of the last event.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from wavepp_controller.core.formation import Daemon
from wavepp_controller.core.index import ReuseIndex
from wavepp_controller.core.latency_model import LatencyModel
from wavepp_controller.core.request import Request
from wavepp_controller.core.request_table import RequestState
from wavepp_proto.profile import StageCosts
from wavepp_proto.terms import (
    CacheGroup,
    Capacity,
    DaemonKey,
    Epoch,
    ErrorInfo,
    Formation,
    Incarnation,
    LinkKind,
    MemberRecord,
    ModelFacts,
    PipelineId,
    RequestId,
    StageTimes,
    WaveOrdinal,
)


@dataclass(frozen=True, slots=True)
class DaemonStatus:
    key: DaemonKey
    incarnation: Incarnation
    address: str
    engine: str
    first_layer: int
    last_layer: int
    pool_blocks: int
    pid: int
    version: str
    capacity: Capacity | None = None
    indexed_blocks: int = 0
    digest_in_sync: bool = False
    digest_age_ms: int | None = None
    heartbeat_age_ms: int | None = None
    """None outside a serving formation."""
    waves_done: int = 0
    times: StageTimes = StageTimes()
    device: str = ""
    groups: tuple[CacheGroup, ...] = ()
    host_pool_blocks: int = 0
    state_slots: int = 0
    reconnecting: bool = False
    """Its streams are broken; it is lost if it stays silent."""
    reconnects: int = 0
    """How often its streams were opened again in this formation."""
    inventory_age_ms: int | None = None
    """Since it was last compared; None before the first time."""
    orphans: int = 0
    """Holds and announcements of nobody, found and released in this formation."""
    costs: StageCosts | None = None
    """What its waves were learnt to take; None before the first report."""
    costs_error: float = 0.0
    """Mean relative error of the last predictions."""
    costs_believed: bool = False
    """`adaptive` plans with them if every stage's are."""
    costs_samples: int = 0
    """Reports learnt from in this life of the controller."""
    executing_wave: WaveOrdinal | None = None
    """What its engine computed at its last heartbeat; None between two waves."""
    executing_ms: int = 0
    """Since it was given that wave."""


@dataclass(frozen=True, slots=True)
class PipelineStatus:
    pipeline: PipelineId
    state: str
    """forming, serving or broken."""
    formation: Formation
    stages: int
    missing: tuple[DaemonKey, ...]
    model: ModelFacts | None
    block_tokens: int | None
    wave_tokens: int | None
    link: LinkKind | None
    policy: str
    mode: str
    """Admission mode."""
    waves_in_flight: int
    queued_requests: int
    queued_tokens: int
    running_requests: int
    parked_requests: int
    """Waiting behind a request that computes their prefix."""
    daemons: tuple[DaemonStatus, ...]
    last_fault: ErrorInfo | None
    """Why none forms where a refused stage is the reason; else why the last formation ended."""
    stalled: bool
    """Something waits, nothing runs and nothing is held, for longer than a retry should take."""
    ready: bool
    """A request that comes now is served (I6)."""


@dataclass(frozen=True, slots=True)
class RequestStatus:
    request_id: RequestId
    pipeline: PipelineId
    state: str
    attempt: int
    prompt_tokens: int
    endpoint: int
    scheduled_tokens: int
    computed_tokens: int
    age_ms: int
    priority: int
    waiting_for: str
    """Empty when it does not wait."""


@dataclass(frozen=True, slots=True)
class RefusedMember:
    key: DaemonKey
    incarnation: Incarnation
    address: str
    error: ErrorInfo


@dataclass(frozen=True, slots=True)
class ControllerStatus:
    epoch: Epoch | None
    """None while this controller does not lead."""
    draining: bool
    ready: bool
    """Leads, takes requests, and some pipeline is ready."""
    membership_frozen: bool
    pipelines: tuple[PipelineStatus, ...]
    requests: tuple[RequestStatus, ...]
    refused: tuple[RefusedMember, ...]
    counters: Mapping[str, int]


def daemon_status(daemon: Daemon, index: ReuseIndex, latency: LatencyModel, serving: bool, now: float) -> DaemonStatus:
    learnt = latency.stage(daemon.key)
    return replace(
        member_status(daemon.record),
        pool_blocks=daemon.pool_blocks,
        capacity=daemon.capacity,
        indexed_blocks=index.indexed_blocks(daemon.key),
        digest_in_sync=index.in_sync(daemon.key),
        digest_age_ms=None if daemon.digest_at is None else _ms(now - daemon.digest_at),
        heartbeat_age_ms=_ms(now - daemon.last_heard) if serving else None,
        waves_done=daemon.waves_done,
        times=daemon.times,
        device="" if daemon.reply is None else daemon.reply.device,
        groups=daemon.plan.groups,
        host_pool_blocks=daemon.host_pool_blocks,
        state_slots=daemon.state_slots,
        reconnecting=daemon.streams.reconnecting,
        reconnects=daemon.streams.reconnects,
        inventory_age_ms=None if daemon.inventory_at is None else _ms(now - daemon.inventory_at),
        orphans=daemon.orphans,
        costs=None if learnt is None else learnt.costs,
        costs_error=0.0 if learnt is None else learnt.error,
        costs_believed=learnt is not None and learnt.believed,
        costs_samples=0 if learnt is None else learnt.samples,
        executing_wave=None if daemon.executing is None else daemon.executing[0],
        executing_ms=0 if daemon.executing is None else _ms(now - daemon.executing[1]),
    )


def member_status(record: MemberRecord) -> DaemonStatus:
    """A registered daemon, as far as its registration tells."""
    return DaemonStatus(
        key=record.key,
        incarnation=record.incarnation,
        address=record.address,
        engine=record.engine,
        first_layer=record.first_layer,
        last_layer=record.last_layer,
        pool_blocks=record.pool_blocks,
        pid=record.pid,
        version=record.version,
        groups=record.groups,
        host_pool_blocks=record.host_pool_blocks,
        state_slots=record.state_slots if CacheGroup.RECURRENT in record.groups else 0,
    )


def request_status(request: Request, pipeline: PipelineId, serving: bool, now: float) -> RequestStatus:
    current = request.current
    return RequestStatus(
        request.id,
        pipeline,
        request.state.value,
        request.attempt,
        request.prompt_tokens,
        current.endpoint,
        current.scheduled,
        current.computed,
        _ms(now - request.arrived),
        request.prefill.priority,
        _waiting_for(request, serving),
    )


def _waiting_for(request: Request, serving: bool) -> str:
    match request.state:
        case RequestState.QUEUED:
            return "hashes" if request.hashes is None else "" if serving else "pipeline"
        case RequestState.ANNOUNCED:
            return "acknowledgement of " + " ".join(str(key) for key in sorted(request.current.unacked))
        case RequestState.HINTED:
            return "its turn"
        case RequestState.WAITING if request.current.behind is not None:
            return f"the prefix that {request.current.behind.front.request_id} computes"
        case RequestState.WAITING:
            return "capacity on stage " + " ".join(str(stage) for stage in sorted(request.current.waited_for))
        case _:
            return ""


def _ms(seconds: float) -> int:
    return max(0, int(seconds * 1e3))
