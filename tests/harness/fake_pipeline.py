"""A pipeline of made-up daemons around the real controller core, on a clock that tests move.

Owns the answers that daemons would give to the core's actions. Tests hold answers back by action type
(`hold`), change what a daemon says (`FakeDaemon` fields), and read every action in `log`. The core's
invariants are checked after every event.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from wavepp_controller.core.config import ControllerConfig
from wavepp_controller.core.events import (
    Action,
    AnnounceAcked,
    AnnounceRequest,
    AskInventory,
    BeatArrived,
    Cancel,
    DigestArrived,
    Emit,
    EndFormation,
    Event,
    FormPipeline,
    Hashed,
    HashPrompt,
    InventoryArrived,
    Joined,
    LeadershipWon,
    MemberUp,
    ReopenStreams,
    ReportArrived,
    SendRound,
    SendWave,
    StreamLost,
    StreamsReopened,
    Submit,
    Tick,
    VotesArrived,
    WatchAgain,
)
from wavepp_controller.core.machine import ControllerMachine
from wavepp_proto import limits
from wavepp_proto.digest import checksum, pack_hashes, unpack_hashes
from wavepp_proto.hashing import hash_blocks
from wavepp_proto.terms import (
    Admitted,
    AnnounceAck,
    CacheGroup,
    Capacity,
    DaemonKey,
    Digest,
    DigestKind,
    Epoch,
    ErrorInfo,
    Failed,
    Fence,
    Finished,
    GroupBlocks,
    GroupDigest,
    GroupEndpoint,
    Heartbeat,
    HoldKey,
    HoldState,
    Incarnation,
    Inventory,
    JoinPlan,
    JoinReply,
    MemberRecord,
    ModelFacts,
    PipelineId,
    PrefillEvent,
    PrefillRequest,
    Progress,
    Queued,
    Rank,
    RequestId,
    Round,
    RoundOrdinal,
    Row,
    RowFault,
    RowResult,
    StageIndex,
    StageTimes,
    Vote,
    VoteOutcome,
    Votes,
    WaveOrdinal,
    WaveReport,
)

BLOCK = 16
VOCABULARY = 1000
WINDOW = 100_000
PIPELINE = PipelineId("p")
A = TypeVar("A")
E = TypeVar("E", Queued, Admitted, Progress, Finished, Failed)


def tokens(count: int, seed: int = 0) -> bytes:
    """Packed prompt of `count` tokens; equal seeds share every prefix."""
    return np.random.default_rng(seed).integers(0, VOCABULARY, count).astype("<i4").tobytes()


def request(name: str, count: int, seed: int = 0, **fields: Any) -> PrefillRequest:
    return replace(PrefillRequest(RequestId(name), tokens(count, seed)), **fields)


def record(
    stage: int, stages: int = 2, incarnation: int = 1, rank: int = 0, ranks: int = 1, **fields: Any
) -> MemberRecord:
    place = f"{stage}r{rank}" if rank else f"{stage}"
    made = MemberRecord(
        cluster="c",
        key=DaemonKey(PIPELINE, StageIndex(stage), Rank(rank)),
        incarnation=Incarnation(incarnation),
        stages=stages,
        ranks=ranks,
        address=f"host{place}:1",
        link_address=f"host{place}:2",
        engine="fake",
        model=ModelFacts("m", "f1", layers=2 * stages, vocabulary=VOCABULARY, window=WINDOW),
        first_layer=2 * stage,
        last_layer=2 * stage + 2,
        block_tokens=BLOCK,
        pool_blocks=10_000,
        host_pool_blocks=0,
        protocol=limits.PROTOCOL_VERSION,
    )
    return replace(made, **fields)


@dataclass
class FakeDaemon:
    """Answers the way the contract says; its fields make it answer otherwise."""

    plan: JoinPlan
    free: int
    hits: dict[str, int] = field(default_factory=dict)
    """Own hit by request id (tokens); 0 for others."""
    announced: set[HoldKey] = field(default_factory=set)
    over: set[HoldKey] = field(default_factory=set)
    """Tombstones of releases that came before their announcement."""
    holds: dict[HoldKey, int] = field(default_factory=dict)
    """Endpoint by hold."""
    short: dict[str, int] = field(default_factory=dict)
    """Requests that find no capacity, with the shortfall in blocks."""
    revise_short: set[str] = field(default_factory=set)
    faults: dict[str, str] = field(default_factory=dict)
    """Requests whose rows are voided here, with the reason."""
    lower: dict[str, list[int]] = field(default_factory=dict)
    """Endpoints to which successive revises of a request fall further."""
    prompts: dict[HoldKey, int] = field(default_factory=dict)
    seq: int = 1
    digest_seq: int = 0
    short_groups: dict[str, tuple[GroupBlocks, ...]] = field(default_factory=dict)
    """The same with what is missing by group."""
    group_hits: dict[str, dict[CacheGroup, int]] = field(default_factory=dict)
    """Own hits by request id and group (tokens), as votes tell them."""
    snapshots: dict[str, list[int]] = field(default_factory=dict)
    """Positions at which the stage has recurrent snapshots of a request: holds fall to the next lower one."""
    state_slots: tuple[int, int, int] = (0, 0, 0)
    """Recurrent slots free, evictable and escrowed, as capacities tell them."""
    running: bytes = b""
    rounds: list[Round] = field(default_factory=list)
    answered: dict[int, Votes] = field(default_factory=dict)
    """Votes by round ordinal: a round that comes again is answered alike."""
    last_wave: int = 0

    def forget(self) -> None:
        """A formation ended: nothing that was said in it means anything any more."""
        self.answered.clear()
        self.last_wave, self.running = 0, b""
        self.holds.clear()
        self.announced.clear()
        self.over.clear()

    def capacity(self) -> Capacity:
        free, evictable, escrowed = self.state_slots
        return Capacity(
            self.seq,
            self.free,
            0,
            recurrent_free=free,
            recurrent_evictable=evictable,
            recurrent_escrowed=escrowed,
        )

    def fence(self, ordinal: int) -> Fence:
        return replace(self.plan.fence, ordinal=ordinal)

    def inventory(self, fence: Fence) -> Inventory:
        holds = tuple(HoldState(key, "committed", endpoint, 0, 0, 0) for key, endpoint in self.holds.items())
        last_round, last_wave = RoundOrdinal(max(self.answered, default=0)), WaveOrdinal(self.last_wave)
        announced = tuple(self.announced)
        return Inventory(fence, holds, announced, last_round, last_wave, self.running, self.capacity(), 0, 0, 0)

    def vote(self, asked: Round) -> Votes:
        ordinal = asked.fence.ordinal
        if ordinal not in self.answered:
            self.answered[ordinal] = self._vote(asked)
        return self.answered[ordinal]

    def _vote(self, asked: Round) -> Votes:
        self.rounds.append(asked)
        self.seq += 1
        for release in asked.releases:
            self.holds.pop(release.key, None)
            if release.ended and release.key in self.announced:
                self.announced.discard(release.key)
            elif release.ended:
                self.over.add(release.key)
        votes = [self._revise(entry.key, entry.endpoint) for entry in asked.revises]
        votes += [self._prepare(entry.key, entry.candidate) for entry in asked.prepares]
        return Votes(asked.fence, tuple(votes), self.capacity())

    def _prepare(self, key: HoldKey, candidate: int) -> Vote:
        if key not in self.announced:
            return Vote(key, VoteOutcome.NOT_ANNOUNCED, 0, 0)
        hit = self.hits.get(key.request_id, 0)
        if key.request_id in self.short_groups:
            return Vote(key, VoteOutcome.NO_CAPACITY, 0, hit, shortfall=self.short_groups[key.request_id])
        if key.request_id in self.short:
            missing = GroupBlocks(CacheGroup.ATTENTION, self.short[key.request_id])
            return Vote(key, VoteOutcome.NO_CAPACITY, 0, hit, shortfall=(missing,))
        self.holds[key] = self._fall(key, min(candidate, hit))
        outcome = VoteOutcome.COMMITTED if self.holds[key] == candidate else VoteOutcome.LOWER
        return Vote(key, outcome, self.holds[key], hit, self._groups(key))

    def _revise(self, key: HoldKey, endpoint: int) -> Vote:
        if key not in self.holds:
            return Vote(key, VoteOutcome.NO_HOLD, 0, 0)
        if key.request_id in self.revise_short:
            missing = GroupBlocks(CacheGroup.ATTENTION, 1)
            return Vote(key, VoteOutcome.NO_CAPACITY, self.holds[key], 0, shortfall=(missing,))
        falls = self.lower.get(key.request_id)
        self.holds[key] = self._fall(key, min(endpoint, falls.pop(0)) if falls else endpoint)
        outcome = VoteOutcome.COMMITTED if self.holds[key] == endpoint else VoteOutcome.LOWER
        return Vote(key, outcome, self.holds[key], 0)

    def _fall(self, key: HoldKey, endpoint: int) -> int:
        """The deepest snapshot of at most `endpoint` tokens, where the stage needs one."""
        if key.request_id not in self.snapshots:
            return endpoint
        return max((place for place in self.snapshots[key.request_id] if place <= endpoint), default=0)

    def _groups(self, key: HoldKey) -> tuple[GroupEndpoint, ...]:
        return tuple(GroupEndpoint(group, hit) for group, hit in self.group_hits.get(key.request_id, {}).items())

    def report(self, wave: SendWave, ordinal_fence: Fence, void: int, last: bool) -> WaveReport:
        self.last_wave = wave.ordinal
        self.running = hashlib.sha256(self.running + repr(wave.rows).encode()).digest()
        faults = []
        for index, row in enumerate(wave.rows):
            if row.key.request_id in self.faults and not void >> index & 1:
                error = fault(self.faults[row.key.request_id])
                faults.append(RowFault(index, error))
                void |= 1 << index
        results = tuple(
            RowResult(index, token_id=7)
            for index, row in enumerate(wave.rows)
            if last and row.final and not void >> index & 1
        )
        return WaveReport(ordinal_fence, True, void, self.running, StageTimes(compute_us=5), results, tuple(faults))


def fault(reason: str) -> ErrorInfo:
    return ErrorInfo(reason, f"made-up {reason}")


class FakePipeline:
    """Feeds the machine and answers its actions until nothing is left to answer."""

    needs_tokens = False
    """Caches are the engines' own, and match on tokens."""

    def __init__(
        self,
        stages: int = 2,
        config: ControllerConfig | None = None,
        *,
        start: bool = True,
        sharing: bool = False,
        members: Sequence[MemberRecord] = (),
        ranks: int = 1,
    ) -> None:
        config = config or ControllerConfig(wave_tokens=64, floor_blocks=0)
        # Prompts of one seed share a prefix, and would wait for each other where a test is about something else.
        self.machine = ControllerMachine(config if sharing else replace(config, share_tokens=0))
        self.members = members or [
            record(stage, stages, rank=rank, ranks=ranks) for stage in range(stages) for rank in range(ranks)
        ]
        self.stages = self.members[0].stages
        self.now = 100.0
        self.log: list[Action] = []
        self.events: list[PrefillEvent] = []
        self.hold: set[type] = set()
        """Action types that nobody answers by itself."""
        self.held: list[Action] = []
        self.devices: dict[int, str] = {}
        """What a stage says in its next Join that it computes on."""
        self.made: dict[int, dict[str, Any]] = {}
        """What a stage says in its next Join otherwise than planned, by field."""
        self.deaf: set[int] = set()
        """Stages that answer nothing and send no heartbeat."""
        self.deaf_places: set[tuple[int, int]] = set()
        """The same by stage and rank."""
        self.executing: dict[int, tuple[int, float]] = {}
        """Which wave a stage's heartbeats name, and since when (event time)."""
        self.daemons: dict[DaemonKey, FakeDaemon] = {}
        self._queue: deque[Action] = deque()
        if start:
            self.start()

    # --- driving --------------------------------------------------------------------------------

    def start(self) -> None:
        self.post(LeadershipWon(Epoch(1), self.now))
        for member in self.members:
            self.post(MemberUp(member, self.now))

    def post(self, event: Event) -> list[Action]:
        """Handle one event, then everything that follows from answering."""
        actions = self._handle(event)
        self._drain()
        return actions

    def submit(self, name: str, count: int, seed: int = 0, **fields: Any) -> None:
        self.post(Submit(request(name, count, seed, **fields), self.now))

    def cancel(self, name: str) -> None:
        self.post(Cancel(RequestId(name), self.now))

    def release_held(self, kind: type | None = None) -> None:
        """Answer what was held back (of one type, or all)."""
        taken = [action for action in self.held if kind is None or isinstance(action, kind)]
        self.held = [action for action in self.held if action not in taken]
        self._queue.extend(taken)
        self._drain()

    def _drain(self) -> None:
        while self._queue:
            self._answer(self._queue.popleft())

    def pass_time(self, seconds: float) -> None:
        """Tick every 50 ms; daemons beat meanwhile."""
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now = min(end, self.now + 0.05)
            for daemon in self.daemons.values():
                if self.hears(daemon.plan.key):
                    self.post(BeatArrived(daemon.plan.key, self.beat(daemon), self.now))
            self.post(Tick(self.now))

    def beat(self, daemon: FakeDaemon) -> Heartbeat:
        key = daemon.plan.key
        beat = Heartbeat(daemon.fence(0), 1, queued_waves=self.queued_waves(key))
        if key.stage not in self.executing:
            return beat
        wave, since = self.executing[key.stage]
        return replace(beat, executing_wave=WaveOrdinal(wave), executing_ms=round((self.now - since) * 1e3))

    def report_wave(self, wave: SendWave, stage: int) -> None:
        """One stage is done with a wave that the test holds back."""
        daemon = self.daemon(stage)
        fence = daemon.fence(wave.ordinal)
        report = daemon.report(wave, fence, 0, self.tells_tokens(daemon.plan.key))
        self.post(ReportArrived(daemon.plan.key, report, self.now))

    def queued_waves(self, key: DaemonKey) -> int:
        """What a heartbeat says; waves that the test holds back count as arrived."""
        return sum(isinstance(action, SendWave) and key in dict(action.targets) for action in self.held)

    def hears(self, key: DaemonKey) -> bool:
        """Whether what is sent to the daemon arrives, and it answers."""
        return key.stage not in self.deaf and (key.stage, key.rank) not in self.deaf_places

    def daemon(self, stage: int, rank: int = 0) -> FakeDaemon:
        return self.daemons[DaemonKey(PIPELINE, StageIndex(stage), Rank(rank))]

    def lose(self, stage: int, rank: int = 0) -> None:
        plan = self.daemon(stage, rank).plan
        event = StreamLost(plan.key, plan.fence.incarnation, plan.fence.formation, fault("STAGE_LOST"), self.now)
        self.post(event)

    def digest(
        self, stage: int, hashes: bytes, snapshots: Sequence[int] = (), blocks: int | None = None, rank: int = 0
    ) -> None:
        """The stage announces packed 32-byte hashes as resident (the first `blocks`, or all), in one snapshot; and,
        if it has recurrent layers, their states at the given positions (tokens)."""
        daemon = self.daemon(stage, rank)
        daemon.digest_seq += 1
        shorts = unpack_hashes(hashes)[::4]
        states = shorts[np.array([place // BLOCK - 1 for place in snapshots], dtype=int)]
        told = {CacheGroup.ATTENTION: shorts[:blocks], CacheGroup.RECURRENT: states}
        groups = tuple(
            GroupDigest(group, pack_hashes(told[group]), b"", len(told[group]), checksum(told[group]))
            for group in daemon.plan.groups
        )
        incarnation = daemon.plan.fence.incarnation
        made = Digest(incarnation, daemon.digest_seq, DigestKind.SNAPSHOT, groups, daemon.capacity())
        self.post(DigestArrived(daemon.plan.key, made, self.now))

    # --- reading --------------------------------------------------------------------------------

    def of(self, kind: type[A]) -> list[A]:
        return [action for action in self.log if isinstance(action, kind)]

    def waves(self) -> list[tuple[Row, ...]]:
        return [action.rows for action in self.log if isinstance(action, SendWave)]

    def outcome(self, name: str) -> Finished | Failed:
        """The one terminal event of a request."""
        found = [e for e in self.events if e.request_id == name and isinstance(e, Finished | Failed)]
        assert len(found) == 1, found
        return found[0]

    def reason(self, name: str) -> str:
        outcome = self.outcome(name)
        assert isinstance(outcome, Failed)
        return outcome.error.reason

    def of_request(self, name: str, kind: type[E]) -> list[E]:
        return [event for event in self.events if event.request_id == name and isinstance(event, kind)]

    def state(self, name: str) -> str:
        return next(r.state for r in self.machine.status().requests if r.request_id == name)

    def counter(self, name: str) -> int:
        return self.machine.status().counters.get(name, 0)

    def nothing_held(self) -> bool:
        """No daemon holds or remembers anything."""
        return not any(daemon.holds or daemon.announced for daemon in self.daemons.values())

    # --- answering ------------------------------------------------------------------------------

    def _handle(self, event: Event) -> list[Action]:
        actions = self.machine.handle(event)
        self.machine.check()
        self.log += actions
        self.events += [action.event for action in actions if isinstance(action, Emit)]
        for action in actions:
            if type(action) in self.hold:
                self.held.append(action)
            else:
                self._queue.append(action)
        return actions

    def _answer(self, action: Action) -> None:
        match action:
            case FormPipeline():
                self.daemons = {
                    plan.key: self.daemons[plan.key]
                    if plan.key in self.daemons
                    and self.daemons[plan.key].plan.fence.incarnation == plan.fence.incarnation
                    else FakeDaemon(plan, plan.pool_blocks)
                    for plan in action.plans
                }
                for plan in action.plans:
                    self._join(plan)
            case EndFormation():
                for key, _ in action.targets:
                    if key in self.daemons:
                        self.daemons[key].forget()
            case HashPrompt():
                hashes = hash_blocks(action.scope, action.token_ids, action.block_tokens)
                self._handle(Hashed(action.request_id, hashes, action.life, self.now))
            case AnnounceRequest():
                for key, fence, _ in action.targets:
                    if self.hears(key) and action.key not in self.daemons[key].over:
                        self.daemons[key].announced.add(action.key)
                        self._handle(AnnounceAcked(key, AnnounceAck(fence, action.key), self.now))
            case SendRound():
                if self.hears(action.key) and action.key in self.daemons:
                    self._handle(VotesArrived(action.key, self.daemons[action.key].vote(action.round), self.now))
            case SendWave():
                self._run(action)
            case ReopenStreams():
                if self.hears(action.key):
                    self._handle(StreamsReopened(action.key, action.fence.formation, self.now))
            case AskInventory():
                if self.hears(action.key) and action.key in self.daemons:
                    inventory = self.daemons[action.key].inventory(action.fence)
                    self._handle(InventoryArrived(action.key, inventory, self.now))
            case WatchAgain():
                pass

    def _join(self, plan: JoinPlan) -> None:
        daemon = self.daemons[plan.key]
        daemon.plan = plan
        daemon.forget()
        if not self.hears(plan.key):
            return
        reply = JoinReply(
            plan.fence,
            plan.key,
            plan.pool_blocks,
            self.needs_tokens,
            plan.groups,
            8,
            64,
            daemon.capacity(),
            device=self.devices.get(plan.key.stage, ""),
            state_slots=plan.state_slots,
        )
        reply = replace(reply, **self.made.get(plan.key.stage, {}))
        self._handle(Joined(plan.key, plan.fence.formation, reply, self.now))

    def tells_tokens(self, key: DaemonKey) -> bool:
        return key.stage == self.stages - 1 and key.rank == 0

    def _run(self, wave: SendWave) -> None:
        voids: dict[int, int] = {}
        """By rank: each has its own chain of links."""
        for key, fence in sorted(wave.targets):
            if not self.hears(key):
                return
            if wave.ordinal <= self.daemons[key].last_wave:
                continue  # sent again
            report = self.daemons[key].report(
                wave, replace(fence, ordinal=wave.ordinal), voids.get(key.rank, 0), self.tells_tokens(key)
            )
            voids[key.rank] = report.void_bitmap
            self._handle(ReportArrived(key, report, self.now))
