"""A stage machine under a careless controller: nothing leaks, whatever arrives in whichever order.

Announces, rounds, waves, releases, formation ends and executor events come in any order, doubled,
late and for unknown requests; typed refusals are fine, CoreErrors and broken invariants are not. A
canary per block proves that no row reads a block that was never written or belongs to another prompt.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from tests.harness.stage_core import B, StageDriver, join_plan, key
from wavepp_proto.errors import WaveppError
from wavepp_proto.terms import HoldKey, Prepare, Release, Revise, Round, Row, WaveCommand, WaveOrdinal
from wavepp_stage.core import events as ev
from wavepp_stage.core.work import RowWork

NAMES = st.sampled_from("abcdef")
Prefix = tuple[int, ...]


def prompt(name: str) -> list[int]:
    """Prompts share prefixes: a with b, c with d, and all six their first block."""
    index = "abcdef".index(name)
    return [0] * B + [index // 2] * (2 * B) + [index] * (index + 1)


class StageFuzz(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.driver = StageDriver.joined(join_plan(pool_blocks=12, floor_blocks=1))
        self.formation = 1
        self.attempts = dict.fromkeys("abcdef", 1)
        self.next_start: dict[HoldKey, int] = {}
        self.prepared: dict[int, ev.WavePrepared] = {}
        self.retired = 0
        self.preparing = 1
        self.canary: dict[int, Prefix] = {}
        self.ended: list[int] = []
        self.sent: list[ev.Event] = []

    def key(self, name: str) -> HoldKey:
        return key(name, self.attempts[name])

    def post(self, event: ev.Event) -> list[ev.Action]:
        """Refusals are typed; a CoreError is a bug."""
        try:
            actions = self.driver.post(event)
        except WaveppError:
            self.driver.machine.check()
            return []
        assert not any(isinstance(action, ev.CoreError) for action in actions), actions
        return actions

    # --- the controller ---------------------------------------------------------------------------

    @rule(name=NAMES)
    def announce(self, name: str) -> None:
        self.post(ev.Announced(self.driver.frame(name, prompt(name), attempt=self.attempts[name]), 0.0))

    @rule(names=st.lists(NAMES, min_size=1, max_size=3, unique=True))
    def admit(self, names: list[str]) -> None:
        """Announce, then commit at the stage's own hit, as a careful controller does."""
        for name in names:
            self.announce(name)
            own_hit = self._prepare(name, 0)
            if own_hit:
                self._prepare(name, own_hit)

    def _prepare(self, name: str, candidate: int) -> int:
        if self.key(name) in self._running():
            return 0
        vote = self.driver.prepare(self.key(name), candidate)
        self.next_start[vote.key] = vote.endpoint
        return vote.own_hit

    @rule(
        prepares=st.lists(st.tuples(NAMES, st.integers(0, 4)), max_size=3),
        revises=st.lists(st.tuples(NAMES, st.integers(0, 3)), max_size=2),
        releases=st.lists(NAMES, max_size=1),
        twice=st.booleans(),
    )
    def send_round(
        self, prepares: list[tuple[str, int]], revises: list[tuple[str, int]], releases: list[str], twice: bool
    ) -> None:
        self.driver.round_ordinal += 1
        asked = Round(
            self.driver.fence(self.driver.round_ordinal),
            1,
            tuple(self._release(name, False) for name in releases),
            tuple(Revise(self.key(name), blocks * B) for name, blocks in revises),
            tuple(Prepare(self.key(name), blocks * B) for name, blocks in prepares),
        )
        first = self.post(ev.RoundArrived(asked, 0.0))
        for action in first:
            if isinstance(action, ev.SendVotes):
                for vote in action.votes.votes:
                    self.next_start.setdefault(vote.key, vote.endpoint)
                    if vote.key not in self._running():
                        self.next_start[vote.key] = vote.endpoint
        if twice:
            again = self.post(ev.RoundArrived(asked, 0.0))
            assert [a for a in again if isinstance(a, ev.SendVotes)] == [
                a for a in first if isinstance(a, ev.SendVotes)
            ]

    @rule(
        rows=st.lists(st.tuples(NAMES, st.integers(1, 19)), min_size=1, max_size=4, unique_by=lambda row: row[0]),
        careless=st.sampled_from([False, False, False, True]),
    )
    def send_wave(self, rows: list[tuple[str, int]], careless: bool) -> None:
        made = []
        for name, length in rows:
            start, total = self.next_start.get(self.key(name), 0), len(prompt(name))
            if careless:  # wrong places, requests that hold nothing, prompts that are done
                start = max(0, start - length % 3)
            elif self.key(name) not in self._held() or start == total:
                continue
            length = min(length, max(1, total - start))
            made.append(Row(self.key(name), start, length, final=start + length == total))
        self.driver.wave_ordinal += 1
        event = ev.WaveArrived(WaveCommand(self.driver.fence(self.driver.wave_ordinal), tuple(made)), 0.0)
        if made and any(isinstance(action, ev.WaveQueued) for action in self.post(event)):
            for row in made:
                self.next_start[row.key] = row.start + row.length
            self.sent.append(event)
        else:
            self.driver.wave_ordinal -= 1

    @rule()
    def send_old_waves_again(self) -> None:
        for event in self.sent:
            assert self.post(event) == []

    @rule(name=NAMES, ended=st.booleans())
    def release(self, name: str, ended: bool) -> None:
        self.post(ev.ReleaseArrived(self.driver.fence(), self._release(name, ended), 0.0))
        if ended:
            self.attempts[name] += 1

    @rule(luck=st.integers(0, 9))
    def join_again(self, luck: int) -> None:
        if luck:
            return
        self.ended.append(self.formation)
        self.formation += 1
        self.attempts = {name: attempt + 1 for name, attempt in self.attempts.items()}
        self.next_start, self.prepared, self.sent = {}, {}, []
        self.retired, self.preparing = 0, 1
        plan = join_plan(formation=self.formation, pool_blocks=12, floor_blocks=1)
        assert self.driver.rejoin(plan)[0] == ev.FormationStarted(plan, rebuild=False, ended=self.formation - 1)

    # --- the executor -----------------------------------------------------------------------------

    @rule()
    def prepare_wave(self) -> None:
        for action in self.post(ev.PrepareWave(WaveOrdinal(self.preparing), 0.0, self.formation)):
            if isinstance(action, ev.WavePrepared):
                self.prepared[self.preparing] = action
                self.preparing += 1

    @rule(void=st.sampled_from([0, 0, 0, 1, 2]))
    def run_wave(self, void: int) -> None:
        """Read and write canaries as an engine does, then retire."""
        ordinal = self.retired + 1
        wave = self.prepared.get(ordinal)
        if wave is None:
            return
        void = (void | self.driver.machine.void_bitmap(WaveOrdinal(ordinal))) & (2 ** len(wave.work.rows) - 1)
        for index, row in enumerate(wave.work.rows):
            if not row.void and not void >> index & 1:
                self._compute(row)
        self.post(ev.WaveRetired(WaveOrdinal(ordinal), void, wave.faults, (), 0.0, self.formation))
        self.retired = ordinal

    @rule()
    def run_everything(self) -> None:
        for _ in range(self.driver.wave_ordinal - self.retired):
            while self.preparing <= self.retired + 1:
                self.prepare_wave()
            self.run_wave(0)

    @rule()
    def stop_old_executors(self) -> None:
        while self.ended:
            self.post(ev.ExecutorStopped(self.ended.pop(), 0.0))

    def _compute(self, row: RowWork) -> None:
        tokens = prompt(row.key.request_id)
        end = row.start + row.length
        for at in range(row.start // B):
            assert self.canary[int(row.blocks[at])] == tuple(tokens[: (at + 1) * B])
        if row.start % B:
            assert self.canary[int(row.blocks[row.start // B])] == tuple(tokens[: row.start])
        for at in range(row.start // B, len(row.blocks)):
            self.canary[int(row.blocks[at])] = tuple(tokens[: min(end, (at + 1) * B)])

    # --- parts ------------------------------------------------------------------------------------

    def _held(self) -> set[HoldKey]:
        return {hold.key for hold in self.driver.machine.inventory().holds}

    def _running(self) -> set[HoldKey]:
        return {hold.key for hold in self.driver.machine.inventory().holds if hold.phase == "owned"}

    def _release(self, name: str, ended: bool) -> Release:
        waves = [wave.command for wave in self.sent if isinstance(wave, ev.WaveArrived)]
        last = [wave.ordinal for wave in waves if any(row.key == self.key(name) for row in wave.rows)]
        return Release(self.key(name), last[-1] if last else None, ended)

    def teardown(self) -> None:
        self.post(ev.FormationEnd(self.driver.fence(), 0.0))
        for formation in (*self.ended, self.formation):
            self.post(ev.ExecutorStopped(formation, 0.0))
        inventory = self.driver.machine.inventory()
        assert (inventory.holds, inventory.announced, inventory.quarantined_blocks) == ((), (), 0)
        capacity = inventory.capacity
        assert (capacity.free_blocks + capacity.evictable_blocks, capacity.escrowed_blocks) == (12, 0)


TestStageFuzz = StageFuzz.TestCase
TestStageFuzz.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
