"""The simulated cluster: one controller, P stages and their clients on one virtual clock.

Owns the processes and the checks after every event: each core's own, the ledger's, that every request
ends in time and that something runs while something waits (I5). Both cores are the real ones. One seed
is one history: nothing here reads a clock or an unseeded chance. What goes wrong is in `mishaps`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from wavepp_controller.core.config import ControllerConfig
from wavepp_proto import limits
from wavepp_proto.errors import InternalError
from wavepp_proto.terms import (
    Admitted,
    DaemonKey,
    Epoch,
    Incarnation,
    LinkKind,
    MemberRecord,
    ModelFacts,
    PipelineId,
    StageIndex,
    StageTimes,
)
from wavepp_simulator.agenda import Agenda
from wavepp_simulator.clients import Clients
from wavepp_simulator.controller import SimController
from wavepp_simulator.engine import VOCABULARY
from wavepp_simulator.executor import Costs
from wavepp_simulator.ledger import Ledger, Violation, check_admitted, check_drained, check_sums
from wavepp_simulator.network import Network
from wavepp_simulator.registry import Registry
from wavepp_simulator.stage import SimStage
from wavepp_simulator.story import Story

PIPELINE = PipelineId("p")


@dataclass(frozen=True, slots=True)
class Shape:
    """What a cluster is made of."""

    pools: tuple[int, ...] = (64, 64, 64)
    """Blocks of each stage."""
    block_tokens: int = 16
    window: int = 4096
    latency_s: float = 0.0002
    jitter: float = 0.0
    """Spread of latencies, as a share of them on top."""
    costs: Costs = field(default_factory=Costs)
    config: ControllerConfig = field(default_factory=lambda: ControllerConfig(wave_tokens=64, link=LinkKind.GRPC))
    check_every: int = 1
    """Events between two checks of the cores."""


class World:
    no_times = StageTimes()

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        self.shape = shape
        self.agenda = Agenda()
        self.network = Network(self.agenda, shape.latency_s, shape.jitter, Random(seed))
        self.registry = Registry(self.network)
        self.story = Story()
        self.ledger = Ledger()
        self.clients = Clients(self)
        self.faulted_at: float | None = None
        """When the last fault was made."""
        self.events = 0
        self._touched: dict[SimStage | SimController, None] = {}
        self._incarnations = 0
        self.stages = [self.new_stage(place) for place in range(len(shape.pools))]
        self.controller = SimController(self, Epoch(1), shape.config)
        self.deposed: list[SimController] = []
        """Controllers before this one, dead or not."""

    # --- running ----------------------------------------------------------------------------------

    def start(self) -> None:
        for stage in self.stages:
            self.registry.register(stage.record, stage.process)
        self.controller.start()

    def step(self) -> None:
        """One event and the checks after it; raises Violation."""
        self.agenda.step()
        self.events += 1
        if self.events % self.shape.check_every == 0:
            for node in self._touched:
                self._check(node)
            self._touched.clear()

    def run(self, until: Callable[[], bool], within_s: float) -> None:
        """Step until the condition holds; Violation of I5 if it does not within that much virtual time."""
        end = self.agenda.now + within_s
        while not until():
            at = self.agenda.next_at
            if at is None or at > end:
                waiting = " ".join(asked.request.request_id for asked in self.clients.waiting)
                raise Violation("I5", f"not reached within {within_s:g} s; waiting: {waiting or 'nobody'}")
            self.step()

    def advance(self, seconds: float) -> None:
        end = self.agenda.now + seconds
        while (at := self.agenda.next_at) is not None and at <= end:
            self.step()
        self.agenda.now = end

    @property
    def idle(self) -> bool:
        """Every request ended, nothing is under way and no wave runs."""
        executors = (stage.executor for stage in self.stages if stage.process.alive and not stage.process.paused)
        return self.agenda.foreground == 0 and not self.clients.waiting and all(e.idle for e in executors)

    # --- what nodes tell the world ----------------------------------------------------------------

    def note(self, who: str, what: str, kind: str) -> None:
        self.story.note(self.agenda.now, who, kind, what)

    def touched(self, node: SimStage | SimController) -> None:
        """Its core took an event: check it before the next."""
        self._touched[node] = None

    # --- nodes ------------------------------------------------------------------------------------

    def new_stage(self, place: int) -> SimStage:
        """The next incarnation of a place; the caller registers it."""
        self._incarnations += 1
        shape, stages = self.shape, len(self.shape.pools)
        record = MemberRecord(
            cluster="simulated",
            key=DaemonKey(PIPELINE, StageIndex(place)),
            incarnation=Incarnation(self._incarnations),
            stages=stages,
            ranks=1,
            address=f"s{place}:1",
            link_address="",
            engine="emulated",
            model=ModelFacts("emulated", "simulated", layers=stages, vocabulary=VOCABULARY, window=shape.window),
            first_layer=place,
            last_layer=place + 1,
            block_tokens=shape.block_tokens,
            pool_blocks=shape.pools[place],
            host_pool_blocks=0,
            protocol=limits.PROTOCOL_VERSION,
        )
        return SimStage(self, record, shape.costs)

    def replace_controller(self) -> None:
        """Another controller wins the election; the one before hears of it when it can hear again."""
        before = self.controller
        self.deposed.append(before)
        before.process.after(self.network.delay("etcd"), before.depose)
        self.controller = SimController(self, Epoch(self.controller.epoch + 1), self.shape.config)
        self.controller.start()

    # --- checks -----------------------------------------------------------------------------------

    def check_drained(self) -> None:
        """I2: call when idle. A paused stage has not heard yet that everything ended."""
        for stage in self.stages:
            if stage.process.alive and not stage.process.paused:
                check_drained(stage.place, stage.machine.inventory())

    def _check(self, node: SimStage | SimController) -> None:
        try:
            node.machine.check()
        except InternalError as error:
            raise Violation("core", f"{node.process.name}: {error.message} {error.fields}") from error
        if isinstance(node, SimStage):
            check_sums(node.place, node.machine.inventory())

    def check_progress(self, controller: SimController) -> None:
        """I5, at each tick of a controller."""
        now = self.agenda.now
        for pipeline in controller.machine.pipelines.values():
            if pipeline.stalled(now):
                raise Violation("I5", f"nothing runs or is held, and something waits: {pipeline.id}")
            late = [request.id for request in pipeline.book if now > request.deadline]
            if late:
                raise Violation("I5", f"{' '.join(late)} lived through a tick past the deadline")

    def check_admitted(self, controller: SimController, event: Admitted, prompt_tokens: int) -> None:
        """On every stage that is still in the controller's formation, as it tells a client."""
        for key, link in controller.links.items():
            stage = self.stages[key.stage]
            if stage.process.alive and stage.plan is not None and stage.plan.fence == link.plan.fence:
                check_admitted(stage.place, stage.machine, event, prompt_tokens, self.shape.block_tokens)
