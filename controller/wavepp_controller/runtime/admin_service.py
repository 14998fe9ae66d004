"""Admin: what operators see and may ask.

Owns the mapping of the core's status to messages, the watch loop, and the audit, which is the only
place that asks daemons and core the same question and compares the answers.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import TYPE_CHECKING

from wavepp_controller.core import status as st
from wavepp_controller.core.events import ReformAsked, StageShape
from wavepp_controller.runtime.audit import audit
from wavepp_proto import __version__, convert, limits
from wavepp_proto.errors import InvalidRequest, WaveppError
from wavepp_proto.runtime.context import Context
from wavepp_proto.terms import LinkKind, PipelineId
from wavepp_proto.v1 import admin_pb2 as pb
from wavepp_proto.v1 import admin_pb2_grpc

if TYPE_CHECKING:
    from wavepp_controller.runtime.controller import Controller

MIN_WATCH_PERIOD_MS = 50
MAX_WATCH_PERIOD_MS = 60_000
DEFAULT_WATCH_PERIOD_MS = 1000


class AdminService(admin_pb2_grpc.AdminServicer):
    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusResponse:
        return self._status(request.requests)

    async def Watch(self, request: pb.WatchStatusRequest, context: Context) -> AsyncIterator[pb.WatchStatusResponse]:
        period_ms = request.period_ms or DEFAULT_WATCH_PERIOD_MS
        period_ms = min(max(period_ms, MIN_WATCH_PERIOD_MS), MAX_WATCH_PERIOD_MS)
        shell = self._controller.shell
        while not shell.closed:
            yield pb.WatchStatusResponse(status=self._status(False))
            # Changes come by the thousand a second under load: at most one status a minimum period.
            await asyncio.sleep(MIN_WATCH_PERIOD_MS / 1000)
            await shell.changed_within((period_ms - MIN_WATCH_PERIOD_MS) / 1000)
        try:
            shell.check_open()
        except WaveppError as error:
            await convert.abort(context, error)

    async def DrainController(self, request: pb.DrainControllerRequest, context: Context) -> pb.DrainControllerResponse:
        remaining = await self._controller.drain(request.deadline_ms / 1000)
        return pb.DrainControllerResponse(drained=remaining == 0, remaining_requests=remaining)

    async def Reform(self, request: pb.ReformRequest, context: Context) -> pb.ReformResponse:
        try:
            event = _reform_event(request)
            before = self._formation(event.pipeline)
            await self._controller.shell.reform(event)
            async with asyncio.timeout((request.deadline_ms or limits.JOIN_DEADLINE_MS) / 1000):
                while not self._serves_after(event.pipeline, before):
                    self._controller.shell.check_open()
                    await self._controller.shell.changed_within(1.0)
        except TimeoutError:
            message = "the pipeline did not form again in time"
            await convert.abort(context, InvalidRequest(message, field="deadline_ms", value=request.deadline_ms))
        except WaveppError as error:
            await convert.abort(context, error)
        return pb.ReformResponse(formation=self._formation(PipelineId(request.pipeline)))

    async def Audit(self, request: pb.AuditRequest, context: Context) -> pb.AuditResponse:
        try:
            return await audit(self._controller, PipelineId(request.pipeline))
        except WaveppError as error:
            await convert.abort(context, error)
        raise AssertionError("abort raises")

    def _pipeline(self, pipeline: PipelineId) -> st.PipelineStatus | None:
        found = self._controller.machine.status().pipelines
        return next((candidate for candidate in found if candidate.pipeline == pipeline), None)

    def _formation(self, pipeline: PipelineId) -> int:
        found = self._pipeline(pipeline)
        return found.formation if found is not None else 0

    def _serves_after(self, pipeline: PipelineId, formation: int) -> bool:
        found = self._pipeline(pipeline)
        return found is not None and found.state == "serving" and found.formation > formation

    def _status(self, requests: bool) -> pb.StatusResponse:
        status = self._controller.machine.status(requests=requests)
        out = pb.StatusResponse(
            version=__version__,
            cluster=self._controller.settings.cluster,
            epoch=status.epoch or 0,
            leader=status.epoch is not None,
            draining=status.draining,
            ready=status.ready,
            pipelines=[_pipeline_to_pb(pipeline) for pipeline in status.pipelines],
            counters=dict(status.counters),
            membership_frozen=status.membership_frozen,
            refused=[
                pb.RefusedMember(
                    key=convert.daemon_key_to_pb(member.key),
                    address=member.address,
                    error=convert.error_to_pb(member.error),
                )
                for member in status.refused
            ],
            pid=os.getpid(),
        )
        if requests:
            out.requests.extend(_request_to_pb(live) for live in status.requests)
        return out


def _reform_event(request: pb.ReformRequest) -> ReformAsked:
    shapes = tuple(
        StageShape(shape.stage, shape.first_layer, shape.last_layer, shape.pool_blocks or None)
        if shape.last_layer
        else StageShape(shape.stage, pool_blocks=shape.pool_blocks or None)
        for shape in request.shapes
    )
    try:
        link = LinkKind(request.link) if request.link else None
    except ValueError:
        kinds = ", ".join(kind.value for kind in LinkKind)
        raise InvalidRequest(f"unknown link {request.link!r}", field="link", value=request.link, limit=kinds) from None
    pipeline = PipelineId(request.pipeline)
    return ReformAsked(pipeline, shapes, link, request.wave_tokens or None, time.monotonic())


def _pipeline_to_pb(status: st.PipelineStatus) -> pb.PipelineStatus:
    out = pb.PipelineStatus(
        pipeline=status.pipeline,
        state=status.state,
        formation=status.formation,
        stages=status.stages,
        missing_stages=sorted({key.stage for key in status.missing}),
        missing=[convert.daemon_key_to_pb(key) for key in status.missing],
        model=status.model.name if status.model else "",
        block_tokens=status.block_tokens or 0,
        window=status.model.window if status.model else 0,
        wave_tokens=status.wave_tokens or 0,
        waves_in_flight=status.waves_in_flight,
        queued_requests=status.queued_requests,
        running_requests=status.running_requests,
        daemons=[_daemon_to_pb(daemon) for daemon in status.daemons],
        link=status.link.value if status.link else "",
        model_path=status.model.path if status.model else "",
        policy=status.policy,
        mode=status.mode,
        parked_requests=status.parked_requests,
        ready=status.ready,
    )
    if status.last_fault is not None:
        out.last_fault.CopyFrom(convert.error_to_pb(status.last_fault))
    return out


def _daemon_to_pb(status: st.DaemonStatus) -> pb.StageStatus:
    out = pb.StageStatus(
        key=convert.daemon_key_to_pb(status.key),
        incarnation=status.incarnation,
        address=status.address,
        engine=status.engine,
        first_layer=status.first_layer,
        last_layer=status.last_layer,
        pool_blocks=status.pool_blocks,
        indexed_blocks=status.indexed_blocks,
        digest_in_sync=status.digest_in_sync,
        digest_age_ms=status.digest_age_ms or 0,
        heartbeat_age_ms=status.heartbeat_age_ms or 0,
        waves_done=status.waves_done,
        pid=status.pid,
        version=status.version,
        times=convert.stage_times_to_pb(status.times),
        groups=[group.value for group in status.groups],
        host_pool_blocks=status.host_pool_blocks,
        state_slots=status.state_slots,
        reconnecting=status.reconnecting,
        reconnects=status.reconnects,
        inventory_age_ms=status.inventory_age_ms,
        orphans=status.orphans,
        executing_wave=status.executing_wave,
        executing_ms=status.executing_ms,
    )
    if status.costs is not None:
        costs = pb.StageCosts(**asdict(status.costs), error=status.costs_error, samples=status.costs_samples)
        costs.believed = status.costs_believed
        out.costs.CopyFrom(costs)
    if status.capacity is not None:
        out.capacity.CopyFrom(convert.capacity_to_pb(status.capacity))
    return out


def _request_to_pb(status: st.RequestStatus) -> pb.RequestStatus:
    return pb.RequestStatus(
        request_id=status.request_id,
        pipeline=status.pipeline,
        state=status.state,
        prompt_tokens=status.prompt_tokens,
        endpoint=status.endpoint,
        scheduled_tokens=status.scheduled_tokens,
        computed_tokens=status.computed_tokens,
        age_ms=status.age_ms,
        priority=status.priority,
        waiting_for=status.waiting_for,
    )
