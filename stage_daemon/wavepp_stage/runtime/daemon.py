"""The stage daemon: one process (or object, in tests) that serves one stage.

Owns start-up, registration and shutdown; `run` reads top to bottom: load, bind, register, serve,
drain, close. Everything it serves lives in the *_service.py files beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from wavepp_proto import __version__, limits
from wavepp_proto.runtime.channels import advertise_address, bind_server, check_server, new_server, parse_address
from wavepp_proto.runtime.closers import Closers, end_tasks
from wavepp_proto.runtime.logs import get_log
from wavepp_proto.runtime.loop_probe import probe_loop
from wavepp_proto.runtime.process import settle_heap
from wavepp_proto.runtime.reflection import serve_reflection
from wavepp_proto.runtime.registrar import Registrar
from wavepp_proto.runtime.store import MembershipStore
from wavepp_proto.runtime.tracing import Tracer, TraceSettings
from wavepp_proto.terms import CacheGroup, Incarnation, MemberRecord
from wavepp_proto.v1 import (
    admission_pb2,
    admission_pb2_grpc,
    control_pb2,
    control_pb2_grpc,
    digest_pb2,
    digest_pb2_grpc,
    execution_pb2,
    execution_pb2_grpc,
)
from wavepp_stage.core.machine import StageMachine
from wavepp_stage.engine.base import EnginePlan
from wavepp_stage.runtime.admission_service import AdmissionService, DigestService
from wavepp_stage.runtime.cache_door import CacheDoor
from wavepp_stage.runtime.control_service import ControlService
from wavepp_stage.runtime.copier import Copier
from wavepp_stage.runtime.core_shell import CoreShell
from wavepp_stage.runtime.engines import as_profiled, equip
from wavepp_stage.runtime.execution_service import ExecutionService
from wavepp_stage.runtime.executor import Executor
from wavepp_stage.runtime.grpc_link import LinkHub
from wavepp_stage.runtime.observability import Observer
from wavepp_stage.runtime.report_log import wave_report
from wavepp_stage.runtime.running_formation import Report
from wavepp_stage.runtime.self_fence import SelfFence, new_incarnation
from wavepp_stage.runtime.settings import StageSettings
from wavepp_stage.runtime.spans import record_copy

log = get_log("wavepp.stage")

SWITCH_INTERVAL_S = 1e-4
"""Beside a computing thread an event-loop echo goes from 5.2 ms to 0.2 ms (DESIGN.md)."""
JOIN_S = 5.0
"""Longest wait for a thread or a task to end before it is abandoned."""
LOADING_JOIN_S = 0.5
"""The same while the engine loads, which nothing can interrupt."""
SERVED = (admission_pb2, digest_pb2, execution_pb2, control_pb2, health_pb2)
"""What reflection lists."""


class StageDaemon:
    """One process of one stage, under one incarnation after another. `start` then `close`, or `run` for both."""

    def __init__(
        self,
        settings: StageSettings,
        store: MembershipStore,
        tracer: Tracer | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self.settings = as_profiled(settings)
        self.incarnation = new_incarnation()
        self._store = store
        self._tracer = tracer or Tracer(TraceSettings("wavepp-stage"))
        self._progress = progress
        self._draining = False
        self._tasks: set[asyncio.Future[None]] = set()
        self._closers = Closers()
        self._join_s = LOADING_JOIN_S
        self.address = ""

    async def run(self, stop: asyncio.Event, drain_s: float = 10.0) -> None:
        """Serve until `stop` is set, then drain for at most `drain_s` seconds and close. EngineFault with the cause
        ENGINE_HUNG if the engine does not return: only another process can serve this stage."""
        starting = asyncio.create_task(self.start(), name="start")
        stopped = asyncio.create_task(stop.wait(), name="stop")
        try:
            # Loading takes long, and etcd may never come: a stop must not wait for either.
            await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
                settle_heap()
                ends: set[asyncio.Future[Any]] = {stopped, self.control.watch.hung}
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                if self.control.watch.hung.done():
                    self._join_s = 0.0  # what hangs is not worth waiting for
                    raise self.control.watch.hung.result()
                await self.drain(drain_s)
        finally:
            await end_tasks(starting, stopped)
            await self.close()

    async def start(self) -> None:
        """Load the engine, bind, register; returns once etcd has acknowledged the registration. After an error `close`
        ends what had begun."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        settings, self._loop = self.settings, asyncio.get_running_loop()
        check_server(settings.listen, settings.advertise, settings.metrics, settings.server_security)
        settings.client_security.credentials()
        host = parse_address(advertise_address(settings.listen, settings.advertise, 0)).host

        # the engine: built off the loop (imports take seconds), loaded on its own thread
        self.equipment = await asyncio.to_thread(equip, settings, host)
        self.core = CoreShell(StageMachine(self.incarnation, self.equipment.make_cache), self._digest_changed)
        engine = self.equipment.engine
        record = partial(record_copy, self._tracer, settings.key)
        self.copier = Copier(self.core, engine, record, f"copier-{settings.stage}")
        self._closers.push("copier", partial(asyncio.to_thread, self.copier.close, LOADING_JOIN_S))
        self.core.start_copies = self.copier.start
        self.executor = Executor(self.core, engine, self.copier, self._reported, f"executor-{settings.stage}")
        self._closers.push("executor", self._end_executor)
        self._hub = LinkHub(self.incarnation)
        self.control = ControlService(
            settings, self.equipment, self.core, self.executor, self._hub, host, self._drain_future
        )
        self._closers.push("executor watch", self.control.watch.close)
        self.observer = Observer(self.core, self.copier.counts, self._tracer, settings.key, lambda: self.control.serves)
        self._closers.push("observer", self.observer.close)
        self.fence = SelfFence(self.core, self.control, self._reborn)
        first, last = settings.band(self.equipment.model.layers)
        if not self.equipment.traits.collective:
            await self.control.load(self._first_plan(first, last), self._progress)

        self._join_s = JOIN_S

        # the server
        self.execution = ExecutionService(self.core, self.executor, self.observer, lambda: self._draining)
        self._closers.push("execution", self.execution.end)
        self.control.on_loaded, self.control.on_judged = self._loaded, self.observer.judged
        self.control.on_begin, self.control.on_leave = self.execution.begin, self.execution.end
        self.digests = DigestService(self.core)
        self._health = health.aio.HealthServicer()
        self._server = new_server()
        self._closers.push("server", partial(self._server.stop, 0.2))
        self._closers.push("tasks", self._cancel_tasks)
        self._closers.push("fence", self.fence.close)
        admission_pb2_grpc.add_StageAdmissionServicer_to_server(
            AdmissionService(self.core, self._door(), self.observer, self._superseded), self._server
        )
        digest_pb2_grpc.add_StageDigestServicer_to_server(self.digests, self._server)
        execution_pb2_grpc.add_StageExecutionServicer_to_server(self.execution, self._server)
        execution_pb2_grpc.add_StageLinkServicer_to_server(self._hub, self._server)
        control_pb2_grpc.add_StageControlServicer_to_server(self.control, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if settings.reflection:
            serve_reflection(self._server, *(module.DESCRIPTOR for module in SERVED))
        if settings.metrics is not None:
            self.observer.serve(settings.metrics)
        self._spawn(self.observer.report_health(self._health), "health")  # before anybody can ask
        port = bind_server(self._server, settings.listen, settings.server_security)
        await self._server.start()
        self.address = advertise_address(settings.listen, settings.advertise, port)
        self._spawn(probe_loop(self.observer.loop_delayed), "loop-probe")

        # membership: from here the controller may call
        self.record = self._member_record(first, last)
        self._registrar = Registrar(self._store, self.record)
        self._registrar.start()
        self._closers.push("registrar", self._registrar.close)
        self._closers.push("health", self._health.enter_graceful_shutdown)
        await self._registrar.registered.wait()
        log.info("registered", stage=settings.stage, address=self.address, incarnation=self.incarnation)

    def _door(self) -> CacheDoor:
        return CacheDoor(self.core, self.executor, self.equipment.traits)

    def _first_plan(self, first: int, last: int) -> EnginePlan:
        settings = self.settings
        return EnginePlan(
            settings.model, settings.stage, settings.stages, first, last,
            settings.block_tokens, settings.pool_blocks, settings.wave_tokens, settings.lanes,
            settings.host_pool_blocks, self._state_slots(first, last), settings.rank, settings.ranks,
        )  # fmt: skip

    def _state_slots(self, first: int, last: int) -> int:
        """Slots are for recurrent layers: 0 where [first, last) has none."""
        recurrent = CacheGroup.RECURRENT in self.equipment.model.groups_of(first, last)
        return self.settings.state_slots if recurrent else 0

    def _member_record(self, first: int, last: int) -> MemberRecord:
        settings = self.settings
        model = self.equipment.model
        return MemberRecord(
            cluster=settings.cluster,
            key=settings.key,
            incarnation=self.incarnation,
            stages=settings.stages,
            ranks=settings.ranks,
            address=self.address,
            link_address=self.equipment.link_address,
            engine=self.equipment.engine.name,
            model=model,
            first_layer=first,
            last_layer=last,
            block_tokens=settings.block_tokens,
            pool_blocks=settings.pool_blocks,
            host_pool_blocks=settings.host_pool_blocks,
            protocol=limits.PROTOCOL_VERSION,
            groups=model.groups_of(first, last),
            # of any band: a reform may move recurrent layers to a stage that began without
            state_slots=self._state_slots(0, model.layers),
            engine_load=self.control.engine_load,
            gpu=self.equipment.gpu,
            numerics=self.equipment.numerics,
            adapters=self.equipment.traits.adapters,
            pid=os.getpid(),
            version=__version__,
        )

    async def drain(self, within_s: float) -> bool:
        """Ask the controller (by heartbeat) to admit nothing new; True once nothing is held."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self.control.idle.wait()
        return self.control.plan is None

    def _drain_future(self, within_s: float) -> asyncio.Future[bool]:
        return asyncio.ensure_future(self.drain(within_s))

    async def close(self) -> None:
        """Leave membership, stop serving, end the executor, as far as they were begun. Idempotent; every wait is
        bounded."""
        served, self.address = bool(self.address), ""
        await self._closers.close()
        if served:
            log.info("closed", stage=self.settings.stage)

    async def _end_executor(self) -> None:
        self.executor.close()
        await asyncio.to_thread(self.executor.join, self._join_s)

    async def _cancel_tasks(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=JOIN_S)

    # --- glue between the threads ----------------------------------------------------------------

    def _digest_changed(self) -> None:
        self._loop.call_soon_threadsafe(self._notify_digest)

    def _notify_digest(self) -> None:
        if hasattr(self, "digests"):
            self.digests.notify()

    def _reported(self, report: Report) -> None:
        """On the executor thread: record spans, hand the report to the loop."""
        self.observer.executed(report)
        self._loop.call_soon_threadsafe(self._send_report, report)

    def _send_report(self, report: Report) -> None:
        self.observer.reported(report)
        plan = self.control.plan
        if plan is not None and plan.fence.formation == report.formation:
            self.execution.send(wave_report(plan, report))
        if report.error is not None and self.equipment.traits.collective and self.executor.engine_failed:
            self.fence.fence_engine(report.error.message)

    def _superseded(self, formation: int) -> None:
        """A newer authority took over: nothing of its predecessor's formation goes on."""
        plan = self.control.plan
        if plan is not None and plan.fence.formation == formation:
            log.info("formation ended", formation=formation, cause="another controller leads")
            self._keep(self.control.leave())

    def _reborn(self, incarnation: Incarnation) -> None:
        """Everybody who shows the incarnation shows the new one; the controller learns it from the record."""
        if self.control.fenced:
            self.control.unload()
        else:
            self.observer.fenced()
        self.incarnation = self._hub.incarnation = incarnation
        self.digests.notify()  # its reader speaks to who we were
        if hasattr(self, "record"):
            self.record = replace(self.record, incarnation=incarnation, engine_load=self.control.engine_load)
            self._registrar.update(self.record)

    def _loaded(self) -> None:
        self._loop.call_soon_threadsafe(self._show_load)

    def _show_load(self) -> None:
        """What the engine has loaded is another load, or nothing any more: the next join's plans must say so."""
        if hasattr(self, "record") and self.record.engine_load != self.control.engine_load:
            self.record = replace(self.record, engine_load=self.control.engine_load)
            self._registrar.update(self.record)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._keep(asyncio.create_task(work, name=name))

    def _keep(self, task: asyncio.Future[None]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
