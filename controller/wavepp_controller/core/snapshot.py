"""Reads a `ControllerStatus` off the machine.

Apart from `status`, which owns the shapes, because it knows every part of the core and nothing in the
core may know it but `machine`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from wavepp_controller.core.config import ControllerConfig
from wavepp_controller.core.pipeline import PipelineMachine
from wavepp_controller.core.status import (
    ControllerStatus,
    PipelineStatus,
    RefusedMember,
    daemon_status,
    member_status,
    request_status,
)

if TYPE_CHECKING:
    from wavepp_controller.core.machine import ControllerMachine


def snapshot(machine: ControllerMachine, counters: Counter[str], now: float, *, requests: bool) -> ControllerStatus:
    pipelines, ready = tuple(machine.pipelines.values()), machine.ready_pipelines()
    return ControllerStatus(
        epoch=machine.epoch,
        draining=machine.draining,
        ready=machine.ready,
        membership_frozen=machine.membership_frozen,
        pipelines=tuple(_pipeline(pipeline, machine.config, ready[pipeline.id], now) for pipeline in pipelines),
        requests=tuple(
            request_status(request, pipeline.id, pipeline.serving, now)
            for pipeline in (pipelines if requests else ())
            for request in pipeline.book
        ),
        refused=tuple(refused for pipeline in pipelines for refused in _refused(pipeline, now)),
        counters=_copy(counters),
    )


def _pipeline(pipeline: PipelineMachine, config: ControllerConfig, ready: bool, now: float) -> PipelineStatus:
    forming, service = pipeline.forming, pipeline.service
    formation, roster = forming.present, forming.roster(now)
    facts = forming.facts
    fault = (roster.blocking if formation is None else None) or forming.last_fault
    if formation is not None:
        daemons = tuple(
            daemon_status(daemon, pipeline.index, pipeline.latency, pipeline.serving, now)
            for daemon in formation.daemons.values()
        )
    else:
        daemons = tuple(member_status(record) for record in roster.records.values())
    return PipelineStatus(
        pipeline=pipeline.id,
        state=pipeline.state,
        formation=forming.number,
        stages=next((record.stages for record in roster.records.values()), 0),
        missing=roster.missing,
        model=None if facts is None else facts.model,
        block_tokens=None if facts is None else facts.block_tokens,
        wave_tokens=None if formation is None else formation.wave_tokens,
        link=None if formation is None else formation.link,
        policy=config.policy,
        mode=config.mode,
        waves_in_flight=0 if service is None else service.execution.ring.in_flight,
        queued_requests=len(pipeline.book.waiting),
        queued_tokens=pipeline.book.waiting_tokens,
        running_requests=len(pipeline.book.living) - len(pipeline.book.waiting),
        parked_requests=0 if service is None else sum(1 for _ in service.admission.sharing),
        daemons=daemons,
        last_fault=None if fault is None else fault.info(),
        stalled=pipeline.stalled(now),
        ready=ready,
    )


def _refused(pipeline: PipelineMachine, now: float) -> list[RefusedMember]:
    return [
        RefusedMember(refused.record.key, refused.record.incarnation, refused.record.address, refused.error.info())
        for refused in pipeline.forming.roster(now).refused
    ]


def _copy(counters: Counter[str]) -> Mapping[str, int]:
    return dict(sorted(counters.items()))
