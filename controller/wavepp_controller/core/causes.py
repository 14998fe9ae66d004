"""Why requests and formations of a pipeline end, as typed errors that name stage, value and limit.

Owns wording and fields only; `pipeline` decides when they apply.
"""

from __future__ import annotations

from collections.abc import Iterable

from wavepp_controller.core.config import ControllerConfig
from wavepp_controller.core.formation import Daemon
from wavepp_controller.core.members import Roster
from wavepp_controller.core.request import Request
from wavepp_controller.core.wave_watch import Overdue
from wavepp_proto.errors import (
    ENGINE_HUNG,
    DeadlineExpired,
    FormationEnded,
    JoinRefused,
    PipelineUnavailable,
    RowVoided,
    StageLost,
    WaveppError,
)
from wavepp_proto.terms import DaemonKey, ErrorInfo, PipelineId, WaveReport


def stage_lost(daemon: Daemon, why: str) -> StageLost:
    key = daemon.key
    return StageLost(
        f"{key.place} of {key.pipeline} was lost: {why}",
        pipeline=key.pipeline,
        stage=key.stage,
        rank=key.rank,
        incarnation=daemon.record.incarnation,
    )


def hung(daemon: Daemon, overdue: Overdue) -> StageLost | FormationEnded:
    """StageLost where the engine does not return: that stage is asked to leave. FormationEnded where what it has is
    not executed: what it waits for may be anybody's fault."""
    key, spent_ms, limit_ms = daemon.key, round(overdue.spent_s * 1e3), round(overdue.limit_s * 1e3)
    if overdue.executing:
        why = f"its engine has computed wave {overdue.wave} for {overdue.spent_s:.1f} s, at most {overdue.limit_s:.1f}"
        error = stage_lost(daemon, why)
        told: dict[str, int | str] = {"wave": overdue.wave, "value": spent_ms, "limit": limit_ms, "cause": ENGINE_HUNG}
        error.fields |= {name: str(value) for name, value in told.items()}
        return error
    return FormationEnded(
        f"{key.place} of {key.pipeline} has the input of wave {overdue.wave} and has not begun it for "
        f"{overdue.spent_s:.1f} s",
        pipeline=key.pipeline,
        stage=key.stage,
        rank=key.rank,
        wave=overdue.wave,
        field="wave_timeout_ms",
        value=spent_ms,
        limit=limit_ms,
    )


def failed_report(key: DaemonKey, report: WaveReport) -> FormationEnded:
    cause = report.error or ErrorInfo("UNKNOWN", "the daemon gave no cause")
    return FormationEnded(
        f"{key.place} of {key.pipeline} failed wave {report.fence.ordinal}: {cause.message}",
        pipeline=key.pipeline,
        stage=key.stage,
        rank=key.rank,
        wave=report.fence.ordinal,
        cause=cause.reason,
    )


def hold_lost(daemon: Daemon, request: Request) -> RowVoided:
    return RowVoided(
        f"{daemon.key.place} no longer holds the cache of request {request.id}",
        stage=daemon.key.stage,
        rank=daemon.key.rank,
        wave=request.current.last_wave,
        cause="HOLD_LOST",
    )


def drained(pipeline: PipelineId, leaving: Iterable[Daemon]) -> FormationEnded:
    stages = stages_of(daemon.key for daemon in leaving)
    return FormationEnded(f"stage {stages} of {pipeline} drained", pipeline=pipeline, stages=stages)


def late(request: Request) -> DeadlineExpired:
    allowed = round((request.deadline - request.arrived) * 1e3)
    return DeadlineExpired(
        f"request {request.id} was {request.state.value} when its {allowed} ms were over",
        field="deadline_ms",
        limit=allowed,
        state=request.state.value,
    )


def unserved(
    pipeline: PipelineId, roster: Roster, fault: WaveppError | None, config: ControllerConfig
) -> PipelineUnavailable | JoinRefused:
    """`fault` is what the last formation ended for. JoinRefused, which no retry helps, where a stage is there and
    cannot be used until an operator changes it."""
    stages = stages_of(roster.missing)
    said = f"pipeline {pipeline} did not serve within {config.pipeline_wait_ms} ms"
    refused = roster.blocking
    if refused is not None:
        error = JoinRefused(f"{said}: {refused.message}", pipeline=pipeline, missing_stages=stages)
        error.fields = {**refused.fields, **error.fields}
        return error
    why = f", missing stages: {stages}" if stages else f": {fault.message}" if fault is not None else ""
    return PipelineUnavailable(
        f"{said}{why}",
        pipeline=pipeline,
        missing_stages=stages or None,
        limit=config.pipeline_wait_ms,
        retry_after_ms=config.reform_backoff_max_ms,
    )


def stages_of(keys: Iterable[DaemonKey]) -> str:
    """In order, for messages: `0 1 1.1`, the rank only where it is not 0."""
    return " ".join(key.short for key in sorted(keys))
