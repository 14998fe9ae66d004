"""The simulated cluster: one controller, P stages and their clients on one virtual clock.

Owns the processes and the checks after every event: each core's own, the ledger's, that every request
ends in time and that something runs while something waits (I5). Both cores are the real ones. One seed
is one history: nothing here reads a clock or an unseeded chance. What goes wrong is in `mishaps`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import TypeVar

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
    Numerics,
    PipelineId,
    Rank,
    StageIndex,
    StageTimes,
)
from wavepp_simulator.agenda import Agenda
from wavepp_simulator.clients import Clients
from wavepp_simulator.controller import SimController
from wavepp_simulator.engine import DTYPE, VOCABULARY
from wavepp_simulator.executor import Costs
from wavepp_simulator.ledger import Ledger, Violation, check_admitted, check_drained, check_sums
from wavepp_simulator.network import Network
from wavepp_simulator.omniscient import Omniscient
from wavepp_simulator.registry import Registry
from wavepp_simulator.stage import SimStage
from wavepp_simulator.story import Story
from wavepp_stage.core.announcements import MAX_ANNOUNCED

T = TypeVar("T")
SILENT_S = 10.0
"""In a calm history somebody who waits sees progress far sooner; a stalled controller says so before."""
PIPELINE = PipelineId("p")


@dataclass(frozen=True, slots=True)
class Shape:
    """What a cluster is made of."""

    pools: tuple[int, ...] = (64, 64, 64)
    """Device blocks of each daemon, stage by stage."""
    ranks: int = 1
    """Daemons of each stage."""
    host_pools: tuple[int, ...] = ()
    """Host blocks of each daemon; none where the tuple ends."""
    groups: tuple[str, ...] = ()
    """Layers of each stage, a letter for each: `a` attends, `r` is recurrent. One that attends where the tuple ends."""
    state_slots: tuple[int, ...] = ()
    """Slots of each daemon that has a recurrent layer; the last one is that of all behind it."""
    block_tokens: int = 16
    window: int = 4096
    latency_s: float = 0.0002
    jitter: float = 0.0
    """Spread of latencies, as a share of them on top."""
    costs: Costs = field(default_factory=Costs)
    config: ControllerConfig = field(default_factory=lambda: ControllerConfig(wave_tokens=64, link=LinkKind.GRPC))
    riding_bytes: int = 0
    """Announcements of so many bytes ride in front of a round; 0 = none does."""
    most_announced: int = MAX_ANNOUNCED
    """Requests that a stage hears of at once; a controller's queue is shorter than a real one."""
    check_every: int = 1
    """Events of one core between two of its own checks from first principles; sums are checked after each."""
    seed: int = 0
    """Of the network's chances: jitter and struck messages."""

    @property
    def stages(self) -> int:
        return len(self.pools) // self.ranks


class World:
    no_times = StageTimes()

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.agenda = Agenda()
        self.story = Story()
        self.network = Network(
            self.agenda,
            shape.latency_s,
            shape.jitter,
            Random(shape.seed),
            lambda what: self.note("network", what, "network"),
        )
        self.registry = Registry(self.network)
        self.ledger = Ledger()
        self.omniscient = Omniscient(self)
        self.clients = Clients(self)
        self.faulted_at: float | None = None
        """When the last fault was made; None as long as the history is calm."""
        self.harmed = False
        """A fault was made that may cost requests."""
        self.copies_failed = False
        self.unlike = False
        """A stage was given another dtype."""
        self.broken_rows: set[str] = set()
        """Requests that an engine was told to find wrong."""
        self.events = 0
        self._touched: dict[SimStage | SimController, None] = {}
        self._incarnations = 0
        self.stages = [self.new_stage(place) for place in range(len(shape.pools))]
        """Every daemon, stage by stage."""
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
        try:
            self.agenda.step()
        except Violation:
            raise
        except Exception as error:  # a core raised what its shell cannot answer: a finding like any other
            raise Violation("crash", f"{type(error).__name__}: {error}") from error
        self.events += 1
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
        self.advance_to(self.agenda.now + seconds)

    def advance_to(self, end: float) -> None:
        """Do everything that is due until then."""
        while (at := self.agenda.next_at) is not None and at <= end:
            self.step()
        self.agenda.now = end

    @property
    def idle(self) -> bool:
        """Every request ended, nothing is under way and no wave runs."""
        quiet = self.agenda.foreground == 0 and not self.network.partitioned and not self.clients.waiting
        working = (stage for stage in self.stages if stage.process.alive and not stage.process.paused)
        return quiet and all(stage.executor.idle and stage.copier.idle for stage in working)

    # --- what nodes tell the world ----------------------------------------------------------------

    def note(self, who: str, what: str, kind: str) -> None:
        self.story.note(self.agenda.now, who, kind, what)

    def touched(self, node: SimStage | SimController) -> None:
        """Its core took an event: check it before the next."""
        self._touched[node] = None

    # --- nodes ------------------------------------------------------------------------------------

    def next_incarnation(self) -> Incarnation:
        self._incarnations += 1
        return Incarnation(self._incarnations)

    def place_of(self, key: DaemonKey) -> int:
        """Index of a daemon in `stages`."""
        return key.stage * self.shape.ranks + key.rank

    def place_named(self, name: str) -> int:
        """The same of `1`, or of `1.1` for its second rank. ValueError if there is none."""
        for stage in self.stages:
            if stage.record.key.short == name:
                return stage.place
        raise ValueError(f"no stage {name}")

    def new_stage(self, place: int, dtype: str = DTYPE) -> SimStage:
        """A new process at a place; the caller registers it."""
        shape, stages = self.shape, self.shape.stages
        number, rank = divmod(place, shape.ranks)
        key = DaemonKey(PIPELINE, StageIndex(number), Rank(rank))
        bands = [_at(shape.groups, stage, "a") or "a" for stage in range(stages)]
        layers = "".join(bands)
        model = ModelFacts(
            "emulated",
            "simulated",
            layers=len(layers),
            vocabulary=VOCABULARY,
            window=shape.window,
            recurrent_layers=tuple(layer for layer, kind in enumerate(layers) if kind == "r"),
        )
        first = len("".join(bands[:number]))
        last = first + len(bands[number])
        groups = model.groups_of(first, last)
        slots = _at(shape.state_slots, place, shape.state_slots[-1] if shape.state_slots else 0)
        record = MemberRecord(
            cluster="simulated",
            key=key,
            incarnation=self.next_incarnation(),
            stages=stages,
            ranks=shape.ranks,
            address=f"s{key.short}:1",
            link_address="",
            engine="emulated",
            model=model,
            first_layer=first,
            last_layer=last,
            block_tokens=shape.block_tokens,
            pool_blocks=shape.pools[place],
            host_pool_blocks=_at(shape.host_pools, place, 0),
            protocol=limits.PROTOCOL_VERSION,
            groups=groups,
            # as a daemon does: a reform may bring recurrent layers to any stage of a hybrid model
            state_slots=slots if model.recurrent_layers else 0,
            numerics=Numerics(dtype=dtype),
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
        self._check_core(self.controller)
        self.omniscient.drains(self.controller)
        for stage in self.stages:
            if stage.process.alive and not stage.process.paused:
                self._check_core(stage)
                check_drained(stage.name, stage.machine.inventory())

    def _check(self, node: SimStage | SimController) -> None:
        """After each event of a core: the sums (I2), and every so often all that it knows about itself."""
        if isinstance(node, SimStage):
            check_sums(node.name, node.machine.inventory())
        node.touches += 1
        if node.touches % self.shape.check_every == 0:
            self._check_core(node)

    def _check_core(self, node: SimStage | SimController) -> None:
        try:
            node.machine.check()
        except InternalError as error:
            raise Violation("core", f"{node.process.name}: {error.message} {error.fields}") from error

    def check_progress(self, controller: SimController) -> None:
        """I5 and I6, at each tick of a controller."""
        now = self.agenda.now
        if self.faulted_at is None and self.clients.waiting and now - self.clients.last_told > SILENT_S:
            what = f"nobody was told anything for {SILENT_S:g} s, and somebody waits"
            raise Violation("I6" if controller.machine.ready else "I5", what)
        for pipeline in controller.machine.pipelines.values():
            if pipeline.stalled(now):
                raise Violation("I5", f"nothing runs or is held, and something waits: {pipeline.id}")
            late = [request.id for request in pipeline.book if now > request.deadline]
            if late:
                raise Violation("I5", f"{' '.join(late)} lived through a tick past the deadline")

    def check_admitted(self, controller: SimController, event: Admitted, prompt_tokens: int) -> None:
        """On every stage that is still in the controller's formation, as it tells a client."""
        for key, link in controller.links.items():
            stage = self.stages[self.place_of(key)]
            if stage.process.alive and stage.plan is not None and stage.plan.fence == link.plan.fence:
                check_admitted(stage.name, stage.machine, event, prompt_tokens, self.shape.block_tokens)


def _at(values: tuple[T, ...], place: int, default: T) -> T:
    """The value for a stage; the tuple may end before it."""
    return values[place] if place < len(values) else default
