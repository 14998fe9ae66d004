"""A stage machine under a careless controller: nothing leaks, whatever arrives in whichever order.

Announces, rounds, waves, releases, heartbeats, formation ends, rebirths, executor events and ends of
copies come in any order, doubled, late and for unknown requests; typed refusals are fine, CoreErrors
and broken invariants are not. StageMemory proves that no row reads a block or a state that was never
written, belongs to another prompt or is on the other tier. What must hold of every shape of stage runs
here; exact outcomes are the unit tests'.
"""

from __future__ import annotations

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.harness.stage_core import B, StageDriver, join_plan, key
from tests.harness.stage_memory import StageMemory
from wavepp_proto.errors import WaveppError
from wavepp_proto.terms import (
    CacheGroup,
    Epoch,
    Fence,
    Formation,
    HoldKey,
    Incarnation,
    JoinPlan,
    Prepare,
    Release,
    Revise,
    Round,
    Row,
    WaveCommand,
    WaveOrdinal,
)
from wavepp_stage.core import events as ev
from wavepp_stage.core.machine import StageMachine

NAMES = st.sampled_from("abcdef")
SHAPES = st.sampled_from(
    [
        ((CacheGroup.ATTENTION,), 0),
        ((CacheGroup.RECURRENT,), 5),
        ((CacheGroup.ATTENTION, CacheGroup.RECURRENT), 4),
        ((CacheGroup.ATTENTION, CacheGroup.RECURRENT), 9),
    ]
)
MARKS = st.sets(st.integers(1, 4), max_size=3)
"""Blocks at whose end a row takes a snapshot, where they lie in it."""
RARELY = st.sampled_from([False] * 9 + [True])
REPLAYED = 4


def prompt(name: str) -> list[int]:
    """Prompts share prefixes: a with b, c with d, and all six their first block."""
    index = "abcdef".index(name)
    return [0] * B + [index // 2] * (2 * B) + [index] * (index + 1)


class StageFuzz(RuleBasedStateMachine):
    @initialize(shape=SHAPES, pool_blocks=st.integers(6, 10), host_pool_blocks=st.sampled_from([0, 3, 12]))
    def join(self, shape: tuple[tuple[CacheGroup, ...], int], pool_blocks: int, host_pool_blocks: int) -> None:
        self.groups, self.state_slots = shape
        self.pool_blocks, self.host_pool_blocks = pool_blocks, host_pool_blocks
        self.epoch, self.formation, self.incarnation = 1, 1, 7
        self.driver = StageDriver(StageMachine(Incarnation(self.incarnation)), self.plan())
        self.attempts = dict.fromkeys("abcdef", 1)
        self.memory = StageMemory(attention=CacheGroup.ATTENTION in self.groups)
        self.ended: list[int] = []
        self.serving = False
        self.begin()

    def plan(self) -> JoinPlan:
        return join_plan(
            epoch=self.epoch,
            formation=self.formation,
            incarnation=self.incarnation,
            pool_blocks=self.pool_blocks,
            floor_blocks=1,
            host_pool_blocks=self.host_pool_blocks,
            state_slots=self.state_slots,
            groups=self.groups,
        )

    def begin(self) -> None:
        """Join the next formation."""
        self.attempts = {name: attempt + 1 for name, attempt in self.attempts.items()}
        self.next_start: dict[HoldKey, int] = {}
        self.prepared: dict[int, ev.WavePrepared] = {}
        self.sent: list[ev.WaveArrived] = []
        self.rounds: deque[tuple[ev.RoundArrived, ev.SendVotes]] = deque(maxlen=REPLAYED)
        self.retired, self.preparing = 0, 1
        assert isinstance(self.driver.rejoin(self.plan())[0], ev.FormationStarted)
        self.serving = True

    def key(self, name: str) -> HoldKey:
        return key(name, self.attempts[name])

    def post(self, event: ev.Event) -> list[ev.Action]:
        """Refusals are typed; a CoreError is a bug."""
        before = self.driver.machine.standing
        try:
            actions = self.driver.post(event)
        except WaveppError:
            self.driver.machine.check()
            assert self.driver.machine.standing == before
            return []
        self._note(actions)
        return actions

    def _note(self, actions: list[ev.Action]) -> None:
        assert not any(isinstance(action, ev.CoreError) for action in actions), actions
        for action in actions:
            if isinstance(action, ev.FormationEnded):
                assert action.formation == self.formation
                self.ended.append(self.formation)
                self.serving = False
                found = self.driver.machine.inventory()
                assert (found.holds, found.announced) == ((), ())
        fenced = any(isinstance(action, ev.SelfFenced) for action in actions)
        assert not fenced or not self.serving

    # --- the controller ---------------------------------------------------------------------------

    @rule(name=NAMES)
    def announce(self, name: str) -> None:
        now = self.driver.now
        self.post(ev.Announced(self.driver.frame(name, prompt(name), attempt=self.attempts[name]), now))

    @rule(names=st.lists(NAMES, min_size=1, max_size=3, unique=True), snapshots=st.integers(0, 3))
    def admit(self, names: list[str], snapshots: int) -> None:
        """Announce, then commit at the stage's own hit, as a careful controller does."""
        for name in names:
            self.announce(name)
            self._send_round(prepares=(Prepare(self.key(name), 0, (), snapshots),))
            self._send_round(prepares=(Prepare(self.key(name), self._own_hit(name), (), snapshots),))

    def _own_hit(self, name: str) -> int:
        votes = self.rounds[-1][1].votes.votes if self.rounds else ()
        return next((vote.own_hit for vote in votes if vote.key == self.key(name)), 0)

    @rule(
        prepares=st.lists(st.tuples(NAMES, st.integers(0, 4), st.integers(0, 3), st.booleans()), max_size=3),
        revises=st.lists(st.tuples(NAMES, st.integers(0, 3), st.integers(0, 3)), max_size=2),
        releases=st.lists(NAMES, max_size=1),
    )
    def send_round(
        self, prepares: list[tuple[str, int, int, bool]], revises: list[tuple[str, int, int]], releases: list[str]
    ) -> None:
        self._send_round(
            tuple(self._release(name, False) for name in releases),
            tuple(Revise(self.key(name), blocks * B, (), snapshots) for name, blocks, snapshots in revises),
            tuple(Prepare(self.key(name), blocks * B, (), marks, over) for name, blocks, marks, over in prepares),
        )

    def _send_round(
        self,
        releases: tuple[Release, ...] = (),
        revises: tuple[Revise, ...] = (),
        prepares: tuple[Prepare, ...] = (),
    ) -> None:
        event = self.driver.next_round(releases=releases, revises=revises, prepares=prepares)
        for action in self.post(event):
            if isinstance(action, ev.SendVotes):
                self.rounds.append((event, action))
                running = self._running()
                for vote in action.votes.votes:
                    if vote.key not in running:
                        self.next_start[vote.key] = vote.endpoint

    @rule()
    def send_old_rounds_again(self) -> None:
        if self._acts():
            for event, votes in self.rounds:
                assert votes in self.post(event)

    @rule(gap=st.integers(2, 5))
    def lose_a_round(self, gap: int) -> None:
        """A round behind a gap changes nothing, whatever it asks."""
        if not self._acts() or not self.rounds:
            return
        before = self.driver.machine.inventory()
        keys = [hold.key for hold in before.holds]
        ordinal = self.driver.round_ordinal + gap
        asked = Round(self.driver.fence(ordinal), 1, tuple(Release(hold, None, True) for hold in keys))
        assert self.post(ev.RoundArrived(asked, self.driver.now)) == []
        assert self.driver.machine.inventory() == before

    @rule(
        rows=st.lists(
            st.tuples(NAMES, st.integers(1, 19), MARKS), min_size=1, max_size=4, unique_by=lambda row: row[0]
        ),
        careless=st.sampled_from([False, False, False, True]),
    )
    def send_wave(self, rows: list[tuple[str, int, set[int]]], careless: bool) -> None:
        made = []
        for name, length, marks in rows:
            start, total = self.next_start.get(self.key(name), 0), len(prompt(name))
            if careless:  # wrong places, requests that hold nothing, prompts that are done
                start = max(0, start - length % 3)
            elif self.key(name) not in self._held() or start == total:
                continue
            length = min(length, max(1, total - start))
            snapshots = tuple(mark * B for mark in sorted(marks) if start < mark * B <= start + length)
            made.append(Row(self.key(name), start, length, start + length == total, snapshots))
        self.driver.wave_ordinal += 1
        event = ev.WaveArrived(WaveCommand(self.driver.fence(self.driver.wave_ordinal), tuple(made)), self.driver.now)
        if made and any(isinstance(action, ev.WaveQueued) for action in self.post(event)):
            for row in made:
                self.next_start[row.key] = row.start + row.length
            self.sent.append(event)
        else:
            self.driver.wave_ordinal -= 1

    @rule()
    def send_old_waves_again(self) -> None:
        if self._acts():
            for event in self.sent:
                assert not any(isinstance(action, ev.WaveQueued) for action in self.post(event))

    @rule(names=st.lists(NAMES, min_size=1, max_size=4), chunk=st.integers(4, 18), marks=MARKS, broken=RARELY)
    def serve(self, names: list[str], chunk: int, marks: set[int], broken: bool) -> None:
        """Whole requests, one behind the other, as a careful controller and a healthy stage do."""
        for name in names:
            self.admit([name], len(marks))
            while self.key(name) in self._held() and self.next_start[self.key(name)] < len(prompt(name)):
                sent = self.driver.wave_ordinal
                self.send_wave([(name, chunk, marks)], careless=False)
                if self.driver.wave_ordinal == sent:
                    break
            self.run_everything(broken)
            self.release(name, ended=True)

    @rule(name=NAMES, ended=st.booleans())
    def release(self, name: str, ended: bool) -> None:
        self.post(ev.ReleaseArrived(self.driver.fence(), self._release(name, ended), self.driver.now))
        if ended:
            self.attempts[name] += 1

    # --- time and authority -----------------------------------------------------------------------

    @rule()
    def hear(self) -> None:
        self.post(ev.ControllerHeard(self.driver.fence(), self.driver.now))

    @rule(seconds=st.sampled_from([0.25, 0.25, 1.0, 2.0]))
    def pass_time(self, seconds: float) -> None:
        self.driver.now += seconds

    @rule()
    def look_at_the_timer(self) -> None:
        lapsed = self._acts() and not self._acts(reached=True)
        actions = self.driver.machine.fence_if_silent(self.driver.now)
        assert not lapsed or ev.FormationEnded(self.formation) in actions
        self.driver.machine.check()
        self._note(actions)

    @rule(now=RARELY)
    def join_again(self, now: bool) -> None:
        if now or not self.serving:
            if self.serving:
                self.ended.append(self.formation)
            self.formation += 1
            self.begin()

    @rule(now=RARELY)
    def be_led_anew(self, now: bool) -> None:
        """Another controller takes inventory: it finds nothing held, and the older one is fenced."""
        if now:
            old, self.epoch = self.driver.fence(1), self.epoch + 1
            fence = Fence(Epoch(self.epoch), Formation(0), Incarnation(self.incarnation))
            actions = self.post(ev.InventoryAsked(fence, self.driver.now))
            (found,) = [action.inventory for action in actions if isinstance(action, ev.InventoryTaken)]
            assert (found.holds, found.announced, self.serving) == ((), (), False)
            assert self.post(ev.RoundArrived(Round(old, 1), self.driver.now)) == []
            self.formation += 1
            self.begin()

    @rule(now=RARELY)
    def be_reborn(self, now: bool) -> None:
        if now:
            self.incarnation += 1
            self.post(ev.Reincarnate(Incarnation(self.incarnation), self.driver.now))
            assert not self.serving
            self.formation += 1
            self.begin()

    # --- the executor and the copy thread ---------------------------------------------------------

    @rule()
    def prepare_wave(self) -> None:
        for action in self.post(ev.PrepareWave(WaveOrdinal(self.preparing), self.driver.now, self.formation)):
            if isinstance(action, ev.WavePrepared):
                self.prepared[self.preparing] = action
                self.preparing += 1
            if isinstance(action, ev.WaveWaits):
                assert self.driver.lots, "a wave waits for copies and none is under way"

    @rule(ok=st.sampled_from([True, True, True, False]))
    def end_copies(self, ok: bool) -> None:
        if self.driver.lots:
            lot = self.driver.lots.popleft()
            self.memory.copy(lot, ok)
            self.post(ev.CopiesEnded(lot.number, ok, self.driver.now))

    @rule(void=st.sampled_from([0, 0, 0, 1, 2]))
    def run_wave(self, void: int) -> None:
        """Read and write as an engine does, then retire."""
        ordinal = self.retired + 1
        wave = self.prepared.get(ordinal)
        if wave is None or not self.serving:
            return
        void = (void | self.driver.machine.void_bitmap(WaveOrdinal(ordinal))) & (2 ** len(wave.work.rows) - 1)
        for index, row in enumerate(wave.work.rows):
            if not row.void and not void >> index & 1:
                assert (row.state is not None) == (CacheGroup.RECURRENT in self.groups)
                self.memory.compute(row, prompt(row.key.request_id))
        self.post(ev.WaveRetired(WaveOrdinal(ordinal), void, wave.faults, (), self.driver.now, self.formation))
        self.retired = ordinal

    @rule(broken=RARELY)
    def run_everything(self, broken: bool) -> None:
        """Every wave that was sent comes to its end: copies, slices and voids block nobody."""
        for _ in range(self.driver.wave_ordinal - self.retired):
            while self.serving and self.preparing <= self.retired + 1:
                self.prepare_wave()
                self.end_copies(not broken)
            self.run_wave(0)

    @rule()
    def stop_old_executors(self) -> None:
        """No wave and no copy of the formations that ended touches a block any more."""
        while self.ended and self.driver.lots:
            self.end_copies(True)
        while self.ended:
            self.post(ev.ExecutorStopped(self.ended.pop(), self.driver.now))

    # --- parts ------------------------------------------------------------------------------------

    def _acts(self, *, reached: bool = False) -> bool:
        """The stage still does what its controller wants, now."""
        deadline, now = self.driver.machine.fence_deadline(), self.driver.now
        return self.serving and (deadline is None or now < deadline or (now == deadline and not reached))

    def _held(self) -> set[HoldKey]:
        return {hold.key for hold in self.driver.machine.inventory().holds}

    def _running(self) -> set[HoldKey]:
        return {hold.key for hold in self.driver.machine.inventory().holds if hold.phase == "owned"}

    def _release(self, name: str, ended: bool) -> Release:
        last = [wave.command.ordinal for wave in self.sent if self.key(name) in {row.key for row in wave.command.rows}]
        return Release(self.key(name), last[-1] if last else None, ended)

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.post(ev.FormationEnd(self.driver.fence(), self.driver.now))
        self.stop_old_executors()
        inventory = self.driver.machine.inventory()
        assert (inventory.holds, inventory.announced) == ((), ())
        assert (inventory.quarantined_blocks, inventory.quarantined_states) == (0, 0)
        room = inventory.capacity
        assert (room.free_blocks + room.evictable_blocks, room.escrowed_blocks) == (self.pool_blocks, 0)
        assert (room.recurrent_free + room.recurrent_evictable, room.recurrent_escrowed) == (self.state_slots, 0)


TestStageFuzz = StageFuzz.TestCase
TestStageFuzz.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
