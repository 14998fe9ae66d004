"""The controller process: bind, lead, watch members, serve, drain, close.

Owns start-up and shutdown order; `run` reads top to bottom. A controller that is not the leader
listens and answers, but forms no pipeline until it leads.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from wavepp_controller.core import events as ev
from wavepp_controller.core.machine import ControllerMachine
from wavepp_controller.runtime.admin_service import AdminService
from wavepp_controller.runtime.model_file import ModelFile
from wavepp_controller.runtime.observability import Observer
from wavepp_controller.runtime.prefill_service import PrefillService
from wavepp_controller.runtime.refusals import Refusals
from wavepp_controller.runtime.request_spans import RequestSpans
from wavepp_controller.runtime.settings import ControllerSettings
from wavepp_controller.runtime.shell import ControllerShell
from wavepp_proto.runtime.channels import advertise_address, bind_server, check_server, new_server, pipeline_service
from wavepp_proto.runtime.closers import Closers, end_tasks
from wavepp_proto.runtime.election import Authority, Leadership
from wavepp_proto.runtime.logs import get_log
from wavepp_proto.runtime.loop_probe import probe_loop
from wavepp_proto.runtime.membership import MemberUp, MemberWatch
from wavepp_proto.runtime.process import settle_heap
from wavepp_proto.runtime.reflection import serve_reflection
from wavepp_proto.runtime.store import MembershipStore
from wavepp_proto.runtime.tracing import Tracer, TraceSettings
from wavepp_proto.v1 import admin_pb2, admin_pb2_grpc, prefill_pb2, prefill_pb2_grpc

log = get_log(__name__)

OUTDATED_PAUSE_S = 1.0
"""Before campaigning again when a daemon has seen a newer authority."""


class Controller:
    """One life of a controller. `start` then `close`, or `run` for both."""

    def __init__(self, settings: ControllerSettings, store: MembershipStore, tracer: Tracer | None = None) -> None:
        self.settings = settings
        self._store = store
        self._tracer = tracer or Tracer(TraceSettings("wavepp-controller"))
        self._tasks: list[asyncio.Task[None]] = []
        self._models: ModelFile | None = None
        self._closers = Closers()
        self.address = ""

    async def run(self, stop: asyncio.Event, drain_s: float = 10.0) -> None:
        """Serve until `stop` is set or the core fails, then drain for at most `drain_s` seconds."""
        stopped = asyncio.create_task(stop.wait(), name="stop")
        try:
            await self.start()
            settle_heap()
            ends: set[asyncio.Future[Any]] = {stopped, self.shell.failure}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self.shell.failure.done():
                raise self.shell.failure.result()
            await self.drain(drain_s)
        finally:
            stopped.cancel()
            await self.close()

    async def start(self) -> None:
        """Bind, serve and begin to campaign; returns at once, leadership comes when it comes. After an error `close`
        ends what had begun."""
        settings = self.settings
        check_server(settings.listen, settings.advertise, settings.metrics, settings.server_security)
        settings.client_security.credentials()
        spans = RequestSpans(self._tracer)
        self.machine = ControllerMachine(replace(settings.config, traced=self._tracer.recording))
        if settings.model_file is not None:
            self._models = ModelFile(settings.model_file, self.machine.latency_models)
            self.machine.seed_latency(self._models.read())
        self.observer = Observer(self.machine, self._tracer)
        self._closers.push("observer", self.observer.close)
        self.shell = ControllerShell(self.machine, settings.client_security, spans, self.observer)
        self._refusals = Refusals(settings.client_security)

        # the server
        self._health = health.aio.HealthServicer()
        await self._health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)  # it is born serving
        self._server = new_server()
        self._closers.push("server", partial(self._server.stop, 0.5))
        self._admin = AdminService(self)
        self._prefill = PrefillService(self.shell, spans)
        prefill_pb2_grpc.add_PrefillServicer_to_server(self._prefill, self._server)
        admin_pb2_grpc.add_AdminServicer_to_server(self._admin, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if settings.reflection:
            serve_reflection(self._server, prefill_pb2.DESCRIPTOR, admin_pb2.DESCRIPTOR, health_pb2.DESCRIPTOR)
        if settings.metrics is not None:
            self.observer.serve(settings.metrics)
        port = bind_server(self._server, settings.listen, settings.server_security)
        await self._server.start()
        self.address = advertise_address(settings.listen, settings.advertise, port)

        # leadership, membership, the clock
        self.leadership = Leadership(self._store, settings.cluster, self.address)
        self.members = MemberWatch(self._store, settings.cluster)
        self._closers.push("leadership", self.leadership.resign)
        self._closers.push("streams", self._prefill.close)
        self._closers.push("shell", self.shell.close)
        self._closers.push("refusals", self._refusals.close)
        if self._models is not None:
            self._closers.push("latency models", self._models.save)
        self._closers.push("tasks", self._cancel_tasks)
        self._closers.push("health", self._health.enter_graceful_shutdown)
        if settings.metrics is not None:
            self._spawn(partial(probe_loop, self.observer.loop_delayed), "loop-probe")
        for loop, name in (
            (self._lead, "lead"),
            (self._watch_members, "members"),
            (self.shell.tick, "tick"),
            (self._report_health, "health"),
        ):
            self._spawn(loop, name)
        if self._models is not None:
            self._spawn(self._models.keep, "latency-models")
        log.info("listening", address=self.address, cluster=settings.cluster)

    async def drain(self, within_s: float) -> int:
        """Refuse new requests; how many were still live after `within_s` seconds."""
        self.shell.post(ev.DrainAsked(time.monotonic()))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while self.machine.live_requests and not self.shell.closed:
                    await self.shell.changed_within(within_s)
        return self.machine.live_requests

    async def close(self) -> None:
        """Give up leadership, end formations, stop serving, as far as they were begun. Idempotent; every wait is
        bounded."""
        served, self.address = bool(self.address), ""
        await self._closers.close()
        if served:
            log.info("closed", cluster=self.settings.cluster)

    async def _cancel_tasks(self) -> None:
        await end_tasks(*self._tasks)

    # --- loops --------------------------------------------------------------------------------------

    async def _lead(self) -> None:
        while True:
            authority = await self.leadership.campaign()
            # Without the members it would answer that a pipeline does not exist, which no client tries again.
            await self.members.listed.wait()
            self.shell.post(ev.LeadershipWon(authority.epoch, time.monotonic()))
            self._tell_refused()
            await self._until_deposed(authority)
            log.warning("leadership lost", epoch=authority.epoch)
            await self.shell.stand_down()
            self._tell_refused()

    async def _until_deposed(self, authority: Authority) -> None:
        """Until etcd names another leader, or a daemon has seen a newer one."""
        self.shell.outdated.clear()
        ends = [asyncio.create_task(event.wait()) for event in (authority.lost, self.shell.outdated)]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in ends:
                task.cancel()
        if self.shell.outdated.is_set():
            # Not at once: a store that lost its history would have us campaign in a tight loop.
            await asyncio.sleep(OUTDATED_PAUSE_S)

    async def _watch_members(self) -> None:
        async for change in self.members.changes():
            now = time.monotonic()
            if isinstance(change, MemberUp):
                self.shell.post(ev.MemberUp(change.record, now))
            else:
                self.shell.post(ev.MemberGone(change.key, change.incarnation, now))
            self._tell_refused()

    def _tell_refused(self) -> None:
        """Membership or authority has changed: who is refused now learns it, and so does the log."""
        refused = self.machine.status(requests=False).refused
        self.observer.members_refused(refused)
        self._refusals.tell(self.machine.epoch, refused, self.members.members)

    async def _report_health(self) -> None:
        """Readiness is to serve now and to get on (invariant I6), not a living process: of each pipeline, of any."""
        frozen = False
        while True:
            pipelines = {pipeline_service(name): ready for name, ready in self.machine.ready_pipelines().items()}
            state = health_pb2.HealthCheckResponse
            for service, ready in {**pipelines, "": any(pipelines.values())}.items():
                await self._health.set(service, state.SERVING if ready else state.NOT_SERVING)
            if self.members.frozen != frozen:
                frozen = self.members.frozen
                self.shell.post(ev.MembershipFrozen(frozen, time.monotonic()))
            if await self.shell.changed_within(1.0):
                await asyncio.sleep(0.1)

    def _spawn(self, loop: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        async def guarded() -> None:  # calls it itself: a task cancelled before its first step awaits nothing
            try:
                await loop()
            except asyncio.CancelledError:
                raise
            except Exception as error:  # a loop that ends would leave the controller deaf
                log.exception("a controller loop failed", error=error, loop=name)
                if not self.shell.failure.done():
                    self.shell.failure.set_result(error)

        self._tasks.append(asyncio.create_task(guarded(), name=name))
