"""A controller and P stage daemons as objects in one process, over real gRPC on loopback.

Owns their life and the check of invariants I1, I2, I4 and I5 at the end: `async with Cluster(...)`
fails the test that leaked. Membership is the in-memory store; everything else is the product. With
`proxied`, the controller reaches stage 0 (which no other stage dials) through a proxy that can fail.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from tests.harness.eventually import eventually
from tests.harness.ports import free_port
from tests.harness.proxy import Proxy
from tests.harness.stage_processes import StageProcesses
from tests.harness.thread_bound import thread_bound
from tests.harness.variant import choose, in_processes
from wavepp import AsyncClient
from wavepp_controller.core.config import ControllerConfig
from wavepp_controller.core.events import ReformAsked, StageShape
from wavepp_controller.runtime.controller import Controller
from wavepp_controller.runtime.settings import ControllerSettings
from wavepp_proto.runtime.memory_store import MemoryStore
from wavepp_proto.runtime.store import MembershipStore
from wavepp_proto.runtime.tracing import Tracer
from wavepp_proto.terms import LinkKind
from wavepp_stage.runtime.daemon import StageDaemon
from wavepp_stage.runtime.settings import StageSettings

EMULATED = "emulated:layers=8,vocabulary=1000,window=65536"
PROCESSES_START_S = 90.0
"""Each imports torch and loads a model, on a machine that does other things."""
PATIENT_MS = 10_000
"""Heartbeat silence for tests that are not about it: a busy machine must not look like a dead host."""


class Cluster:
    """`async with Cluster(stages=4) as cluster`; `cluster.client` speaks to it."""

    def __init__(
        self,
        stages: int = 2,
        model: str = EMULATED,
        engine: str = "emulated",
        pool_blocks: Sequence[int] = (256,),
        host_pool_blocks: int = 0,
        state_slots: int = 64,
        layers: Sequence[tuple[int, int]] = (),
        block_tokens: int = 16,
        wave_tokens: int = 128,
        link: LinkKind | None = None,
        tracers: Callable[[str], Tracer] | None = None,
        metrics: str | None = None,
        reflection: bool = False,
        proxied: bool = False,
        **config: Any,
    ) -> None:
        self.stages = stages
        self._proxied = proxied
        self._stack = AsyncExitStack()
        self._chosen = chosen = choose(engine, model, wave_tokens)
        self.store: MembershipStore = MemoryStore()
        self._tracers: Callable[[str], Tracer | None] = tracers or (lambda service: None)
        self._config = ControllerConfig(
            wave_tokens=wave_tokens, link=link, **{"silence_ms": PATIENT_MS, "round_deadline_ms": PATIENT_MS, **config}
        )
        self._controller_settings = ControllerSettings(
            self._config, listen="127.0.0.1:0", metrics=metrics, reflection=reflection
        )
        self.settings = [
            StageSettings(
                stage=stage,
                stages=stages,
                model=chosen.model,
                engine=chosen.engine,
                device=chosen.device,
                layers=layers[stage] if layers else None,
                block_tokens=block_tokens,
                pool_blocks=pool_blocks[stage] if len(pool_blocks) > 1 else pool_blocks[0],
                host_pool_blocks=host_pool_blocks,
                state_slots=state_slots,
                wave_tokens=wave_tokens,
                threads=1,
                metrics=metrics,
                reflection=reflection,
            )
            for stage in range(stages)
        ]
        self.daemons: list[StageDaemon] = []
        """Empty where stages are processes."""
        self.processes: StageProcesses | None = None

    async def __aenter__(self) -> Self:
        if in_processes():
            self.processes = await self._stack.enter_async_context(StageProcesses(self.settings, self._chosen))
            self.store = self.processes.store
        self.controller = Controller(self._controller_settings, self.store, self._tracers("wavepp-controller"))
        await self.controller.start()
        if self._proxied:
            await self._put_proxy()
        if self.processes is not None:
            await self.processes.start()
            await self.serving(within=PROCESSES_START_S)
        else:
            await self._start_daemons()
        self.client = AsyncClient(self.controller.address)
        return self

    async def _start_daemons(self) -> None:
        if "cache_thread=engine" in self._chosen.model:
            self._stack.enter_context(thread_bound())
        self.daemons = [StageDaemon(settings, self.store, self._tracers("wavepp-stage")) for settings in self.settings]
        await asyncio.gather(*(daemon.start() for daemon in self.daemons))
        await self.serving()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                await self.check()
        finally:
            await self.client.close()
            await self.controller.close()
            await asyncio.gather(*(daemon.close() for daemon in self.daemons))
            await self._stack.__aexit__(kind, error, trace)

    async def _put_proxy(self) -> None:
        place = f"127.0.0.1:{free_port()}"
        self.proxy = await self._stack.enter_async_context(Proxy(place))
        self.settings[0] = replace(self.settings[0], listen=place, advertise=self.proxy.address)

    @property
    def formation(self) -> int:
        """Number of the serving formation, 0 for none."""
        (pipeline,) = self.controller.machine.status().pipelines
        return pipeline.formation if pipeline.state == "serving" else 0

    async def serving(self, formation: int = 1, within: float = 30.0) -> None:
        """Until the pipeline serves in at least the given formation, and every stage's first digest has come:
        before that, hints count the stage as empty."""

        def ready() -> bool:
            status = self.controller.machine.status()
            return any(
                p.state == "serving" and p.formation >= formation and all(d.digest_in_sync for d in p.daemons)
                for p in status.pipelines
            )

        await eventually(ready, within, about="the pipeline to serve")

    async def reform(self, shapes: tuple[StageShape, ...], wave_tokens: int | None = None) -> None:
        """Ask for other bands, pools or budget; raises what the core refuses it with."""
        pipeline = self.controller.machine.status().pipelines[0].pipeline
        event = ReformAsked(pipeline, shapes, None, wave_tokens, time.monotonic())
        await self.controller.shell.reform(event)

    async def restart(self, stage: int) -> StageDaemon:
        """A new incarnation of one stage (the old one must be closed)."""
        daemon = self.daemons[stage] = StageDaemon(self.settings[stage], self.store, self._tracers("wavepp-stage"))
        await daemon.start()
        return daemon

    async def check(self) -> None:
        """After drain: nothing held anywhere, pools complete, all stages ran the same rows."""
        await eventually(lambda: not self.controller.machine.live_requests, about="every request to end")
        if self.processes is not None:
            await self.processes.nothing_held(self.controller.address)
        await eventually(self._nothing_held, about="every hold to be released")
        self.controller.machine.check()
        hashes = set()
        for daemon in self.daemons:
            core = daemon.core
            core.read(lambda machine: machine.check())
            inventory = core.read(lambda machine: machine.inventory())
            assert inventory.holds == ()
            assert inventory.announced == ()
            capacity = inventory.capacity
            assert capacity.escrowed_blocks == 0
            assert capacity.recurrent_escrowed == 0
            assert capacity.recurrent_free + inventory.cached_states + inventory.quarantined_states == (
                inventory.state_slots
            )
            assert (
                capacity.free_blocks + inventory.cached_blocks + inventory.quarantined_blocks == inventory.pool_blocks
            )
            if daemon.control.plan is not None:
                hashes.add(inventory.running_hash)
        assert len(hashes) <= 1, "stages executed different rows (I1)"

    def _nothing_held(self) -> bool:
        inventories = [daemon.core.read(lambda machine: machine.inventory()) for daemon in self.daemons]
        quiet = all(
            not found.holds and not found.announced and not found.quarantined_blocks and not found.quarantined_states
            for found in inventories
        )
        return quiet and len({found.last_wave for found in inventories}) <= 1
