"""StageControl: joining a formation, leaving it, draining.

Owns the order of a join: fence and install the plan in the core, wait until the executor has let go
of the earlier formation, load what changed, form the link, begin. One join at a time; every wait has
the plan's remaining deadline. Owns the way out, too: `leave`, whoever ended the formation. Knows whether
the engine of stages that load together is fenced: then nothing is joined before this daemon is somebody new.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from wavepp_proto import convert, limits
from wavepp_proto.errors import ENGINE_HUNG, EngineFault, JoinRefused, StaleMessage, WaveppError
from wavepp_proto.fence import check_epoch
from wavepp_proto.runtime.context import Context
from wavepp_proto.runtime.logs import get_log
from wavepp_proto.terms import NOTHING_LOADED, ErrorInfo, Fence, JoinPlan, JoinReply
from wavepp_proto.v1 import control_pb2 as pb
from wavepp_proto.v1 import control_pb2_grpc
from wavepp_stage.core.events import ControllerHeard, FormationEnd, JoinAsked
from wavepp_stage.core.join_plan import common_load
from wavepp_stage.engine.base import EngineFacts, EnginePlan, LinkPlan, StageEngine
from wavepp_stage.runtime.core_shell import CoreShell, ended_formation
from wavepp_stage.runtime.engines import Equipment, engine_plan, link_plan, load_group, make_link
from wavepp_stage.runtime.executor import Executor
from wavepp_stage.runtime.executor_watch import ExecutorWatch
from wavepp_stage.runtime.grpc_link import LinkHub
from wavepp_stage.runtime.settings import StageSettings

log = get_log("wavepp.stage.control")


class ControlService(control_pb2_grpc.StageControlServicer):
    def __init__(
        self,
        settings: StageSettings,
        equipment: Equipment,
        core: CoreShell,
        executor: Executor,
        hub: LinkHub,
        advertise_host: str,
        drain: Callable[[float], asyncio.Future[bool]],
    ) -> None:
        self._settings = settings
        self._equipment = equipment
        self._core = core
        self._executor = executor
        self._hub = hub
        self._advertise_host = advertise_host
        self._drain = drain
        self.joining = asyncio.Lock()
        """Held while this daemon's place in the pipeline changes: by a join, or by becoming somebody new."""
        self.on_begin: Callable[[JoinPlan], None] = lambda plan: None
        self.on_leave: Callable[[], None] = lambda: None
        self.on_judged: Callable[[bool], None] = lambda refused: None
        """Told when `refused` has changed."""
        self.on_loaded: Callable[[], None] = lambda: None
        """Told, on the executor's thread, whenever `engine_load` has changed."""
        self.fenced = ""
        """Why the engine is fenced; empty while it is not. Only where all stages load together."""
        self.engine_load = NOTHING_LOADED if equipment.traits.collective else 0
        """As in the member record."""
        self._loading: threading.Event | None = None
        """Tells the present load that nobody waits for it any more; None where engines load alone."""
        self._loaded: EnginePlan | None = None
        self.facts: EngineFacts | None = None
        self.refused: ErrorInfo | None = None
        """Why the controller that leads can use this daemon in no pipeline, as it said last."""
        self.plan: JoinPlan | None = None
        """The formation this daemon serves; None between formations."""
        self.watch = ExecutorWatch(executor, settings.stage)
        self.idle = asyncio.Event()
        """Set while no formation is served."""
        self.idle.set()

    async def load(self, plan: EnginePlan, progress: Callable[[int, int], None]) -> EngineFacts:
        """Load the engine unless it already serves `plan` (executor thread)."""

        def job(engine: StageEngine) -> EngineFacts:
            # Whether anybody still waits or not, what was loaded is known: a later join may find it done.
            if self.facts is None or self._loaded != plan:
                self._loaded = self.facts = None
                self._comes_from(NOTHING_LOADED)
                self.facts = engine.load(plan, progress)
                self._loaded = plan
                self._executor.engine_failed = False
                self._comes_from(plan.group.load if plan.group is not None else 0)
            return self.facts

        return await asyncio.wrap_future(self._executor.call(job))

    def _comes_from(self, load: int) -> None:
        """Where all stages load together, the others must know which load this engine comes from."""
        if self._equipment.traits.collective and load != self.engine_load:
            self.engine_load = load
            self.on_loaded()

    def unload(self) -> None:
        """What the fenced engine has loaded counts for nothing from now on."""
        self._loaded, self.fenced, self.engine_load = None, "", NOTHING_LOADED

    async def Join(self, request: pb.JoinRequest, context: Context) -> pb.JoinResponse:
        try:
            plan = convert.join_plan_from_pb(request)
            async with asyncio.timeout(plan.deadline_ms / 1000), self.joining:
                return convert.join_reply_to_pb(await self._join(plan))
        except TimeoutError:
            error = JoinRefused(
                "the join took longer than its deadline", field="deadline_ms", value=request.deadline_ms
            )
            await convert.abort(context, error)
        except WaveppError as error:
            log.warning("join refused", reason=error.reason, error=error.message)
            await convert.abort(context, error)
        except Exception as error:
            # The controller decides by the type whether to try again, and shows the operator this message.
            log.exception("join failed", error)
            fault = EngineFault(f"the join failed: {type(error).__name__}: {error}", stage=self._settings.stage)
            await convert.abort(context, fault)
        raise AssertionError("abort raises")

    async def _join(self, plan: JoinPlan) -> JoinReply:
        self._check(plan)
        self._core.post(JoinAsked(plan, time.monotonic()))
        await self.watch.stopped(self.leave())
        self._refuse_fenced()  # the end of the formation before may have shown that the engine is broken
        facts = await self.load(self._engine_plan(plan), lambda done, total: None)
        formation = plan.fence.formation
        timeouts = (plan.deadline_ms / 1000, limits.WAVE_TIMEOUT_MS / 1000)
        planned: LinkPlan = link_plan(plan, self._advertise_host, *timeouts)
        link = make_link(
            planned,
            self._equipment.engine,
            self._executor.listener(formation),
            self._hub,
            self._settings.client_security,
            asyncio.get_running_loop(),
        )
        if link is not None:
            try:
                await asyncio.to_thread(link.open)
            except BaseException:
                link.close()
                raise
        try:
            # The formation may have ended while its link was made: then nothing of it may begin.
            self._core.post(ControllerHeard(plan.fence, time.monotonic()))
        except WaveppError:
            if link is not None:
                link.close()
            raise
        self._executor.begin(plan, link, facts.hidden)
        self._judged(None)
        self.plan = plan
        self.idle.clear()
        self.on_begin(plan)
        log.info("formation joined", formation=formation, stage=plan.key.stage, link=plan.link.value)
        return JoinReply(
            fence=plan.fence,
            key=plan.key,
            pool_blocks=self._core.read(lambda machine: machine.pool_blocks),
            needs_tokens=self._equipment.traits.needs_tokens,
            groups=facts.groups,
            hidden=facts.hidden,
            bytes_per_block=facts.bytes_per_block,
            capacity=self._core.read(lambda machine: machine.capacity()),
            device=facts.device,
            loaded_layers=facts.loaded_layers,
            state_slots=plan.state_slots,
            bytes_per_state=facts.bytes_per_state,
            engine_load=self.engine_load,
            wave_allowance_ms=math.ceil(facts.wave_allowance_s * 1000),
            host_pool_blocks=self._core.read(lambda machine: machine.host_pool_blocks),
        )

    def _engine_plan(self, plan: JoinPlan) -> EnginePlan:
        made = engine_plan(plan, self._settings.model)
        if not self._equipment.traits.collective:
            return made
        group = load_group(plan)
        if group.load == common_load(plan) != self.engine_load:
            raise StaleMessage(
                "the plan is of a load that is over", field="engine_load", value=group.load, limit=self.engine_load
            )
        self._loading = group.abandoned
        return replace(made, group=group)

    def _check(self, plan: JoinPlan) -> None:
        """Refuse by name what this daemon is not, and everything while its engine is fenced."""
        self._refuse_fenced()
        mine = self._equipment.model
        pairs = (
            ("pipeline", plan.key.pipeline, self._settings.pipeline),
            ("stage", plan.key.stage, self._settings.stage),
            ("ranks", plan.ranks, self._settings.ranks),
            ("rank", plan.key.rank, self._settings.rank),
            ("model_fingerprint", plan.model_fingerprint, mine.fingerprint),
        )
        for field, got, want in pairs:
            if got != want:
                raise JoinRefused(f"{field} {got} is not {want}", field=field, value=got, limit=want)
        if not 0 <= plan.first_layer < plan.last_layer <= mine.layers:
            band = f"{plan.first_layer}:{plan.last_layer}"
            raise JoinRefused(f"band {band} is not in the model", field="band", value=band, limit=f"0:{mine.layers}")

    def _refuse_fenced(self) -> None:
        if self.fenced:
            raise EngineFault(f"the engine is fenced: {self.fenced}", field="engine", value="fenced")

    @property
    def serves(self) -> bool:
        """A formation is served, and the engine gets on with its wave; may be asked from any thread."""
        return self.plan is not None and self.watch.gets_on(self.facts)

    def leave(self, *, blamed: bool = False) -> asyncio.Future[None]:
        """The core has ended the formation: stop serving it, at once. The answer comes when no wave and no copy
        of it can touch a block any more; EngineFault if a copy hangs. `blamed`: because this engine hangs."""
        left, self.plan = self.plan, None
        if self._loading is not None:
            self._loading.set()
        self.idle.set()
        if left is not None:
            self.on_leave()
        stopped = asyncio.wrap_future(self._executor.end())
        if left is not None:
            self.watch.ending(stopped, self.facts, blamed=blamed)
        # Shielded: whoever stops waiting must not take the end away from the others who wait.
        return asyncio.shield(stopped)

    async def EndFormation(self, request: pb.EndFormationRequest, context: Context) -> pb.EndFormationResponse:
        try:
            fence, cause = convert.end_formation_from_pb(request)
            # One that waited here while this process was frozen comes from a controller that has given it up: only
            # as somebody new is it taken again at once.
            self._core.fence_if_silent(time.monotonic())
            await self.end_formation(fence, cause.message if cause else "", blamed=self._is_blamed(cause))
        except WaveppError as error:
            await convert.abort(context, error)
        return pb.EndFormationResponse(fence=request.fence)

    def _is_blamed(self, cause: ErrorInfo | None) -> bool:
        """Whether the formation ended because the engine here hangs."""
        told = {} if cause is None else dict(cause.fields)
        key = self._settings.key
        return (told.get("cause"), told.get("stage"), told.get("rank")) == (ENGINE_HUNG, str(key.stage), str(key.rank))

    async def end_formation(self, fence: Fence, why: str, *, blamed: bool = False) -> None:
        """End the formation that `fence` names, if it is still the present one."""
        actions = self._core.post(FormationEnd(fence, time.monotonic()))
        if ended_formation(actions):
            stopped = self.leave(blamed=blamed)
            log.info("formation ended", formation=fence.formation, cause=why)
            await stopped

    async def Refuse(self, request: pb.RefuseRequest, context: Context) -> pb.RefuseResponse:
        try:
            fence, error = convert.refuse_from_pb(request)
            self._core.read(lambda machine: check_epoch(fence, machine.standing))
        except WaveppError as stale:
            await convert.abort(context, stale)
        self._judged(error)
        return pb.RefuseResponse()

    def _judged(self, error: ErrorInfo | None) -> None:
        if error == self.refused:
            return
        self.refused = error
        self.on_judged(error is not None)
        if error is None:
            log.info("refused no more", stage=self._settings.stage)
            return
        said = {**dict(error.fields), "reason": error.reason, "error": error.message, "stage": self._settings.stage}
        log.warning("refused: no pipeline forms with this stage as it is", **said)

    async def DrainStage(self, request: pb.DrainStageRequest, context: Context) -> pb.DrainStageResponse:
        try:
            fence, deadline_ms = convert.drain_stage_from_pb(request)
            self._core.read(lambda machine: machine.check_reader(fence))
            drained = await self._drain(deadline_ms / 1000)
        except WaveppError as error:
            await convert.abort(context, error)
        return pb.DrainStageResponse(drained=drained)
