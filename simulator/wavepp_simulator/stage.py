"""A stage daemon in virtual time: the real stage core in a shell that follows `wavepp_stage.runtime`.

Owns one process: its core, executor, copy thread, engine, the formation it serves and the links to its
neighbours. The order of a join is the daemon's: fence and install, wait for the executor, load what changed,
reach the next stage, begin. A core that fences itself is taken through to its next incarnation. Does not own
streams (`session`) or faults (`mishaps`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from wavepp_proto.errors import ENGINE_HUNG, JoinRefused, WaveppError
from wavepp_proto.terms import (
    CacheGroup,
    ErrorInfo,
    Fence,
    Heartbeat,
    HoldKey,
    Inventory,
    JoinPlan,
    JoinReply,
    MemberRecord,
    WaveCommand,
    WaveOrdinal,
    WaveReport,
)
from wavepp_simulator import mishaps
from wavepp_simulator.copier import SimCopier
from wavepp_simulator.engine import EngineShape, Outcome, Payload, SimEngine
from wavepp_simulator.executor import Costs, SimExecutor
from wavepp_simulator.fence_watch import FenceWatch
from wavepp_simulator.ledger import Violation
from wavepp_simulator.neighbours import Neighbours
from wavepp_simulator.process import Process
from wavepp_simulator.report_log import ReportLog
from wavepp_stage.core import events as ev
from wavepp_stage.core.machine import StageMachine
from wavepp_stage.core.work import WaveWork

if TYPE_CHECKING:
    from wavepp_simulator.session import DigestReader, Session
    from wavepp_simulator.world import World

RECONNECT_S = 0.1
HUNG_S, GRACE_S = 40.0, 1.0
"""How long an ended formation may keep the executor before the process exits, and beyond a wave's own limit."""
RESTART_S = 1.0
"""Until the supervisor starts it again."""
Answer = Callable[[JoinReply | WaveppError], None]


class SimStage:
    def __init__(self, world: World, record: MemberRecord, costs: Costs) -> None:
        self.world = world
        self.record = record
        self.place = world.place_of(record.key)
        """Among all daemons."""
        self.name = record.key.short
        self.touches = 0
        """Events that its core took."""
        self.process = Process(f"s{self.name}", world.agenda)
        self.machine = StageMachine(record.incarnation, most_announced=world.shape.most_announced)
        self.copier = SimCopier(self, costs, Random(f"{world.shape.seed}-{record.incarnation}"))
        self.executor = SimExecutor(self, costs)
        self.engine = self._load(_shape_of(record))
        self._outdated = False
        """The core has another pool than the engine, which is loaded anew once the executor has stopped."""
        self.neighbours = Neighbours(self)
        self.plan: JoinPlan | None = None
        """The formation this daemon serves; None between formations."""
        self.reports = ReportLog(record.stages)
        """Of that formation."""
        self.fence_watch = FenceWatch(self.name)
        self.draining = False
        self.readers: list[DigestReader] = []
        self._session: Session | None = None
        """The one whose wave stream was opened last."""
        self._joins = 0
        self._joining = False

    @property
    def now(self) -> float:
        return self.world.agenda.now

    # --- the core ---------------------------------------------------------------------------------

    def post(self, event: ev.Event) -> list[ev.Action]:
        """One event for the core; raises its typed refusals. A broken invariant is a violation."""
        actions = self._perform(self.machine.handle(event))
        self.fence_watch.saw(event, actions, self.plan)
        return actions

    def owns(self, key: HoldKey) -> bool:
        return any(hold.key == key and hold.owned_blocks for hold in self.machine.inventory().holds)

    def _perform(self, actions: list[ev.Action]) -> list[ev.Action]:
        self.world.touched(self)
        for action in actions:
            match action:
                case ev.CoreError(error):
                    raise Violation("core", f"stage {self.name}: {error.message} {error.fields}")
                case ev.DigestChanged():
                    for reader in self.readers:
                        reader.changed()
                case ev.FormationStarted(rebuild=rebuild):
                    self._outdated = self._outdated or rebuild
                case ev.StartCopies(lot):
                    self.copier.start(lot)
                case ev.SelfFenced(silent_s):
                    fenced = next((a.formation for a in actions if isinstance(a, ev.FormationEnded)), 0)
                    self.process.after(0.0, partial(self._fenced, fenced))
                    self.world.note(self.process.name, f"fences itself after {silent_s * 1e3:.0f} ms", "stage")
        return actions

    # --- control ----------------------------------------------------------------------------------

    def take_inventory(self, fence: Fence) -> Inventory | WaveppError:
        try:
            actions = self.post(ev.InventoryAsked(fence, self.now))
        except WaveppError as error:
            return error
        if any(isinstance(action, ev.FormationEnded) for action in actions):
            self._leave(lambda: None)
        return next(action.inventory for action in actions if isinstance(action, ev.InventoryTaken))

    def join(self, plan: JoinPlan, answer: Answer) -> None:
        """Raises nothing: a refusal is the answer."""
        try:
            self.post(ev.JoinAsked(plan, self.now))
        except WaveppError as error:
            answer(error)
            return
        self._joins += 1
        self._joining, number = True, self._joins

        def answered(reply: JoinReply | WaveppError) -> None:
            if number == self._joins:
                self._joining = False
            answer(reply)

        self._leave(lambda: self._reach(plan, number, answered))

    def _reach(self, plan: JoinPlan, number: int, answer: Answer) -> None:
        """The executor let go of the earlier formation: load what changed, dial the next stage."""
        if number != self._joins:
            answer(JoinRefused("a later join came meanwhile", field="formation", value=plan.fence.formation))
            return
        wanted = EngineShape(plan.groups, plan.pool_blocks, plan.block_tokens, plan.host_pool_blocks, plan.state_slots)
        if self._outdated or self.engine.shape != wanted:
            self.engine, self._outdated = self._load(wanted), False
        following = self.neighbours.following
        if following is None:
            self._begin(plan, answer)
        elif following.process.alive:
            rtt = self.neighbours.dial(plan)
            self.process.after(rtt, lambda: self._begin(plan, answer) if number == self._joins else None)
        else:
            self.process.after(RECONNECT_S, lambda: self._reach(plan, number, answer), background=True)

    def _begin(self, plan: JoinPlan, answer: Answer) -> None:
        try:
            self.post(ev.ControllerHeard(plan.fence, self.now))
        except WaveppError as error:  # the formation ended while it was joined
            answer(error)
            return
        self.executor.begin(plan)
        self.plan, self.reports = plan, ReportLog(plan.stages)
        self._watch_silence(plan)
        capacity = self.machine.capacity()
        pools, states = plan.pool_blocks, plan.state_slots
        costs = self.executor.costs
        allowed = math.ceil(1e3 * (costs.wave_s + costs.token_s * plan.wave_tokens))
        answer(
            JoinReply(
                plan.fence, plan.key, pools, False, plan.groups, 2, 8, capacity, state_slots=states,
                wave_allowance_ms=allowed,
            )
        )  # fmt: skip

    def end_formation(self, fence: Fence, cause: ErrorInfo) -> WaveppError | None:
        """End the formation that `fence` names, if it is still the present one."""
        try:
            actions = self.post(ev.FormationEnd(fence, self.now))
        except WaveppError as error:
            return error
        if any(isinstance(action, ev.FormationEnded) for action in actions):
            told, key = dict(cause.fields), self.record.key
            mine = (told.get("cause"), told.get("stage"), told.get("rank"))
            self._leave(lambda: None, blamed=mine == (ENGINE_HUNG, str(key.stage), str(key.rank)))
        return None

    def _leave(self, done: Callable[[], None], *, blamed: bool = False) -> None:
        """The core has ended the formation: stop serving it. `done` once nothing of it touches a block."""
        left, self.plan = self.plan, None
        if left is not None:
            self.world.note(self.process.name, f"ends formation {left.fence.formation}", "stage")
            if self._session is not None:
                self._session.formation_ended(left.fence.formation)
        self.neighbours.close()
        waiting = [done]
        self.executor.end(lambda: waiting.pop()())
        if waiting:
            wave = self.executor.executing
            if wave is not None:
                left_s = 0.0 if blamed else max(0.0, self.executor.executing_until - self.now)
                self.process.after(
                    left_s + GRACE_S,
                    lambda: self._exit() if waiting and self.executor.executing == wave else None,
                    background=True,
                )
            self.process.after(HUNG_S, lambda: self._exit() if waiting else None, background=True)

    def _exit(self) -> None:
        """Its executor does not come back: the process ends, and its supervisor starts another."""
        self.world.note(self.process.name, f"exits: wave {self.executor.executing} does not end", "stage")
        self.process.kill()
        self.world.agenda.at(self.now + RESTART_S, self._succeed)

    def _succeed(self) -> None:
        if self.world.stages[self.place] is self:
            mishaps.restart_stage(self.world, self.place)

    def supersede(self, session: Session) -> None:
        """A new wave stream closes its predecessor."""
        before, self._session = self._session, session
        if before is not None:
            before.closed()

    # --- the silence of a controller --------------------------------------------------------------

    def _watch_silence(self, plan: JoinPlan) -> None:
        """Once the core's deadline has passed and nothing came that it could refuse, the timer tells."""
        if self.plan is not plan:
            return
        self._perform(self.machine.fence_if_silent(self.now))
        deadline = self.machine.fence_deadline()
        if deadline is not None:
            self.process.after(max(0.0, deadline - self.now), lambda: self._watch_silence(plan), background=True)

    def _fenced(self, formation: int) -> None:
        if self.plan is not None and self.plan.fence.formation == formation:
            self._leave(self._reincarnate)

    def _reincarnate(self) -> None:
        """Nothing old runs any more: be somebody new, unless a controller was faster."""
        if self._joining:
            self.process.after(RECONNECT_S, self._reincarnate, background=True)
        elif self.plan is None and not self.draining:
            self.record = replace(self.record, incarnation=self.world.next_incarnation())
            self.post(ev.Reincarnate(self.record.incarnation, self.now))
            self.world.note(self.process.name, f"is incarnation {self.record.incarnation} from now on", "stage")
            self.world.registry.register(self.record, self.process)

    # --- what it says -----------------------------------------------------------------------------

    def compute(self, fence: Fence, work: WaveWork, payload: Payload | None) -> Outcome:
        """Run one wave; blocks that it writes after its formation ended must be in quarantine (I3)."""
        outcome = self.engine.run(fence, work, payload)
        found = self.machine.inventory()
        running = {hold.key for hold in found.holds if hold.owned_blocks}
        size = self.record.block_tokens
        orphans = [row for row in work.rows if not row.void and row.key not in running]
        written = 0 if self._outdated else sum(len(row.blocks) - row.start // size for row in orphans)
        if written > found.quarantined_blocks:
            what = f"{written} blocks of {work.ordinal}"
            raise Violation("I3", f"stage {self.name} wrote {what} that nobody owns, {found.quarantined_blocks} wait")
        return outcome

    def executed(self, plan: JoinPlan, command: WaveCommand) -> None:
        fence = plan.fence
        self.world.ledger.executed(fence.epoch, fence.formation, self.name, command.ordinal, command.rows)

    def report(self, plan: JoinPlan, ordinal: WaveOrdinal, done: ev.WaveDone | None, error: ErrorInfo | None) -> None:
        if self.plan is None or self.plan.fence != plan.fence:
            return
        fence = replace(plan.fence, ordinal=ordinal)
        report = WaveReport(
            fence=fence,
            done=done is not None,
            void_bitmap=done.void_bitmap if done else 0,
            running_hash=done.running_hash if done else b"",
            times=self.world.no_times,
            results=done.results if done else (),
            faults=done.faults if done else (),
            capacity=done.capacity if done else None,
            error=None if done else error,
        )
        self.reports.add(report)
        if self._session is not None:
            self._session.report(report)

    def heartbeat(self, fence: Fence, count: int) -> Heartbeat:
        return Heartbeat(
            fence=Fence(fence.epoch, fence.formation, fence.incarnation),
            count=count,
            executing_wave=self.executor.executing,
            executing_ms=int((self.now - self.executor.executing_since) * 1e3) if self.executor.executing else 0,
            queued_waves=len(self.executor.serving.queue) if self.executor.serving else 0,
            capacity=self.machine.capacity(),
            draining=self.draining,
        )

    def _load(self, shape: EngineShape) -> SimEngine:
        return SimEngine(self.name, self.place, shape, self.owns)


def _shape_of(record: MemberRecord) -> EngineShape:
    slots = record.state_slots if CacheGroup.RECURRENT in record.groups else 0
    return EngineShape(record.groups, record.pool_blocks, record.block_tokens, record.host_pool_blocks, slots)
