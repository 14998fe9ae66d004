"""A stage daemon in virtual time: the real stage core in a shell that follows `wavepp_stage.runtime`.

Owns one incarnation: its process, its core, executor, engine, the formation it joined and the links to
its neighbours. The order of a join is the daemon's: fence and install, wait for the executor, load what
changed, reach the next stage, begin. Does not own streams (`session`) or faults (`world`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from wavepp_proto.errors import JoinRefused, WaveppError
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
from wavepp_simulator.engine import Outcome, Payload, SimEngine
from wavepp_simulator.executor import Costs, SimExecutor
from wavepp_simulator.ledger import Violation
from wavepp_simulator.network import Wire
from wavepp_simulator.process import Process
from wavepp_stage.core import events as ev
from wavepp_stage.core.machine import StageMachine
from wavepp_stage.core.work import WaveWork
from wavepp_stage.engine.base import WaveHeader

if TYPE_CHECKING:
    from wavepp_simulator.session import Session
    from wavepp_simulator.world import World

RECONNECT_S = 0.1
Answer = Callable[[JoinReply | WaveppError], None]


class SimStage:
    def __init__(self, world: World, record: MemberRecord, costs: Costs) -> None:
        self.world = world
        self.record = record
        self.place = record.key.stage
        self.process = Process(f"s{self.place}", world.agenda)
        self.machine = StageMachine(record.incarnation)
        self.executor = SimExecutor(self, costs)
        self.engine = self._load(record.pool_blocks, record.block_tokens)
        self.plan: JoinPlan | None = None
        """The formation this daemon serves; None between formations."""
        self.draining = False
        self.sessions: list[Session] = []
        """Streams that are open to this daemon."""
        self._session: Session | None = None
        """The one whose wave stream was opened last."""
        self._joins = 0
        self._link: tuple[Fence, Wire] | None = None
        """Wire to the next stage, in the formation of this fence."""

    @property
    def now(self) -> float:
        return self.world.agenda.now

    # --- the core ---------------------------------------------------------------------------------

    def post(self, event: ev.Event) -> list[ev.Action]:
        """One event for the core; raises its typed refusals. A broken invariant is a violation."""
        actions = self.machine.handle(event)
        for action in actions:
            if isinstance(action, ev.CoreError):
                raise Violation("core", f"stage {self.place}: {action.error.message} {action.error.fields}")
            if isinstance(action, ev.DigestChanged):
                for session in self.sessions:
                    session.digest_changed()
        self.world.touched(self)
        return actions

    def owns(self, key: HoldKey) -> bool:
        return any(hold.key == key and hold.owned_blocks for hold in self.machine.inventory().holds)

    # --- control ----------------------------------------------------------------------------------

    def take_inventory(self, fence: Fence) -> Inventory | WaveppError:
        try:
            actions = self.post(ev.InventoryAsked(fence, self.now))
        except WaveppError as error:
            return error
        return next(action.inventory for action in actions if isinstance(action, ev.InventoryTaken))

    def join(self, plan: JoinPlan, answer: Answer) -> None:
        """Raises nothing: a refusal is the answer."""
        try:
            self.post(ev.JoinAsked(plan, self.now))
        except WaveppError as error:
            answer(error)
            return
        self._joins += 1
        self.plan, number = None, self._joins
        self._close_link()
        self.executor.end(lambda: self._reach(plan, number, answer))

    def _reach(self, plan: JoinPlan, number: int, answer: Answer) -> None:
        """The executor let go of the earlier formation: load what changed, dial the next stage."""
        if number != self._joins:
            answer(JoinRefused("a later join came meanwhile", field="formation", value=plan.fence.formation))
            return
        if self.engine.shape != (plan.pool_blocks, plan.block_tokens):
            self.engine = self._load(plan.pool_blocks, plan.block_tokens)
        if plan.key.stage == plan.stages - 1:
            self._begin(plan, answer)
            return
        following = self.world.stages[plan.key.stage + 1]
        if following.process.alive:
            name = f"s{self.place}>s{self.place + 1}"
            wire = Wire(self.world.network, name, following.process)
            self._link = (plan.fence, wire)
            following.process.on_death(lambda: self._link_broke(plan.fence, "the next stage is gone"))
            self.process.on_death(lambda: wire.send(lambda: following.upstream_closed(plan.fence)))
            rtt = 2 * self.world.network.delay(name)
            self.process.after(rtt, lambda: self._begin(plan, answer) if number == self._joins else None)
        else:
            self.process.after(RECONNECT_S, lambda: self._reach(plan, number, answer), background=True)

    def _begin(self, plan: JoinPlan, answer: Answer) -> None:
        if self.machine.standing.formation != plan.fence.formation or self.machine.standing.epoch != plan.fence.epoch:
            answer(JoinRefused("the formation ended while it was joined", field="formation"))
            return
        self.executor.begin(plan)
        self.plan = plan
        groups, capacity = (CacheGroup.ATTENTION,), self.machine.capacity()
        answer(JoinReply(plan.fence, plan.key, plan.pool_blocks, False, groups, 2, 8, capacity))

    def end_formation(self, fence: Fence) -> WaveppError | None:
        """End the formation that `fence` names, if it is still the present one."""
        try:
            actions = self.post(ev.FormationEnd(fence, self.now))
        except WaveppError as error:
            return error
        if any(isinstance(action, ev.FormationEnded) for action in actions):
            self.plan = None
            self.world.note(self.process.name, f"ends formation {fence.formation}", "stage")
            self._close_link()
            self.executor.end(lambda: None)
        return None

    def orphaned(self, fence: Fence) -> None:
        if self.plan is not None and self.plan.fence == fence:
            self.end_formation(fence)

    def supersede(self, session: Session) -> None:
        """A new wave stream closes its predecessor."""
        before, self._session = self._session, session
        if before is not None:
            before.closed()

    # --- links to the neighbours ------------------------------------------------------------------

    def send_on(self, header: WaveHeader, payload: Payload) -> None:
        if self._link is not None:
            fence, wire = self._link
            following = self.world.stages[self.place + 1]
            wire.send(lambda: following.activation(self, fence, header, payload))

    def activation(self, sender: SimStage, fence: Fence, header: WaveHeader, payload: Payload) -> None:
        ours = self.machine.standing
        if self.executor.serving is None or (ours.epoch, ours.formation) != (fence.epoch, fence.formation):
            back = self.world.network.delay(f"s{self.place}>s{sender.place}")
            sender.process.after(back, lambda: sender._link_broke(fence, "activations of no present formation"))
            return
        self.executor.arrive(header, payload)

    def upstream_closed(self, fence: Fence) -> None:
        serving = self.executor.serving
        if serving is not None and serving.plan.fence.epoch == fence.epoch:
            self.executor.lose_link(fence.formation, f"stage {self.place - 1} closed the link")

    def _link_broke(self, fence: Fence, reason: str) -> None:
        if self._link is not None and self._link[0] == fence:
            self.process.after(self.world.network.delay("link"), lambda: self._lose_link(fence, reason))

    def _lose_link(self, fence: Fence, reason: str) -> None:
        serving = self.executor.serving
        if serving is not None and serving.plan.fence == fence:
            self.executor.lose_link(fence.formation, reason)

    def _close_link(self) -> None:
        if self._link is not None:
            (fence, wire), self._link = self._link, None
            following = self.world.stages[self.place + 1]
            wire.send(lambda: following.upstream_closed(fence))

    # --- what it says -----------------------------------------------------------------------------

    def compute(self, fence: Fence, work: WaveWork, payload: Payload | None) -> Outcome:
        """Run one wave; blocks that it writes after its formation ended must be in quarantine (I3)."""
        outcome = self.engine.run(fence, work, payload)
        found = self.machine.inventory()
        running = {hold.key for hold in found.holds if hold.owned_blocks}
        size = self.record.block_tokens
        orphans = [row for row in work.rows if not row.void and row.key not in running]
        written = sum(len(row.blocks) - row.start // size for row in orphans)
        if written > found.quarantined_blocks:
            what = f"{written} blocks of {work.ordinal}"
            raise Violation("I3", f"stage {self.place} wrote {what} that nobody owns, {found.quarantined_blocks} wait")
        return outcome

    def executed(self, plan: JoinPlan, command: WaveCommand) -> None:
        fence = plan.fence
        self.world.ledger.executed(fence.epoch, fence.formation, self.place, command.ordinal, command.rows)

    def report(self, plan: JoinPlan, ordinal: WaveOrdinal, done: ev.WaveDone | None, error: ErrorInfo | None) -> None:
        if self.plan is None or self.plan.fence != plan.fence or self._session is None:
            return
        fence = Fence(plan.fence.epoch, plan.fence.formation, self.record.incarnation, ordinal)
        self._session.report(
            WaveReport(
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
        )

    def heartbeat(self, fence: Fence, count: int) -> Heartbeat:
        return Heartbeat(
            fence=Fence(fence.epoch, fence.formation, fence.incarnation),
            count=count,
            executing_wave=self.executor.executing,
            queued_waves=len(self.executor.serving.queue) if self.executor.serving else 0,
            capacity=self.machine.capacity(),
            draining=self.draining,
        )

    def _load(self, pool_blocks: int, block_tokens: int) -> SimEngine:
        return SimEngine(self.place, pool_blocks, block_tokens, self.owns)
