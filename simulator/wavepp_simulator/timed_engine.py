"""One stage of a planned deployment: the real stage core, an executor and a copy thread that only take time.

Owns what is queued, prepared and arrived, and the log of what ran when. Waves and copies last as long as the
profile says; there are no tokens, canaries or faults (the fault simulator has those). A step follows
`wavepp_stage.runtime.executor`: prepare ahead while there is nothing to run, run, publish, send on, report.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple, Protocol

from wavepp_proto.errors import InternalError
from wavepp_proto.profile import StageProfile
from wavepp_proto.terms import (
    AnnounceAck,
    AnnounceFrame,
    DaemonKey,
    Digest,
    Incarnation,
    JoinPlan,
    JoinReply,
    Round,
    Row,
    RowResult,
    StageTimes,
    Votes,
    WaveCommand,
    WaveOrdinal,
    WaveReport,
)
from wavepp_simulator.agenda import Agenda
from wavepp_stage.core import events as ev
from wavepp_stage.core.machine import StageMachine
from wavepp_stage.core.work import CopyLot

MATERIALISE_AHEAD = 4
DIGEST_COALESCE_S = 0.002


class Ran(NamedTuple):
    """One wave on one stage."""

    start_s: float
    end_s: float
    ordinal: int
    tokens: int
    rows: tuple[Row, ...]


class Surroundings(Protocol):
    """Where a stage's messages go."""

    agenda: Agenda

    def reported(self, key: DaemonKey, report: WaveReport) -> None: ...
    def passed_on(self, key: DaemonKey, ordinal: WaveOrdinal, tokens: int) -> None: ...
    def digested(self, key: DaemonKey, digest: Digest) -> None: ...


class TimedStage:
    def __init__(self, around: Surroundings, key: DaemonKey, profile: StageProfile, prepare_s: float) -> None:
        self.key = key
        self.ran: list[Ran] = []
        self.copied_blocks = 0
        self.waits_for_copies = 0
        self._around, self._agenda = around, around.agenda
        self._profile, self._prepare_s = profile, prepare_s
        self._machine = StageMachine(Incarnation(key.stage + 1))
        self._plan: JoinPlan | None = None
        self._queue: deque[WaveCommand] = deque()
        self._prepared: set[WaveOrdinal] = set()
        self._arrived: set[WaveOrdinal] = set()
        self._to_prepare: deque[WaveCommand] = deque()
        self._busy = False
        self._copies_awaited = False
        self._lots: deque[CopyLot] = deque()
        self._copying = False
        self._digest_seq = 0
        self._digest_due = True
        self._prepared_s = 0.0
        """Spent on preparing since the last wave."""

    # --- what the controller sends ----------------------------------------------------------------

    def join(self, plan: JoinPlan) -> JoinReply:
        self._post(ev.InventoryAsked(plan.fence, self._agenda.now))
        self._post(ev.JoinAsked(plan, self._agenda.now))
        self._plan = plan
        capacity = self._machine.capacity()
        groups, states = plan.groups, plan.state_slots
        return JoinReply(plan.fence, plan.key, plan.pool_blocks, False, groups, 2, 8, capacity, state_slots=states)

    def announce(self, frame: AnnounceFrame) -> AnnounceAck:
        for action in self._post(ev.Announced(frame, self._agenda.now)):
            if isinstance(action, ev.SendAck):
                return action.ack
        raise InternalError("an announcement in one frame was not acknowledged", field="announce", value=str(frame.key))

    def round(self, asked: Round) -> Votes:
        for action in self._post(ev.RoundArrived(asked, self._agenda.now)):
            if isinstance(action, ev.SendVotes):
                return action.votes
        raise InternalError("a round was not answered", field="round", value=asked.fence.ordinal)

    def enqueue(self, command: WaveCommand) -> None:
        self._post(ev.WaveArrived(command, self._agenda.now))
        self._queue.append(command)
        self._to_prepare.append(command)
        self._wake()

    def watch(self, seq: int) -> None:
        """Send what the digest says after `seq`, from now on."""
        self._digest_seq = seq
        self._send_digests()

    # --- the executor -----------------------------------------------------------------------------

    def arrive(self, ordinal: WaveOrdinal) -> None:
        """The previous stage's activations of a wave are here."""
        self._arrived.add(ordinal)
        self._wake()

    def _wake(self) -> None:
        if self._busy or not self._queue:
            return
        head = self._queue[0].ordinal
        if head in self._prepared and (self.key.stage == 0 or head in self._arrived):
            self._compute()
        elif self._to_prepare and len(self._prepared) <= MATERIALISE_AHEAD and not self._copies_awaited:
            self._busy = True
            self._prepared_s += self._prepare_s
            self._agenda.at(self._agenda.now + self._prepare_s, self._prepare)

    def _prepare(self) -> None:
        """One slice: a wave is prepared, or waits for copies, or needs another slice."""
        ordinal = self._to_prepare[0].ordinal
        for action in self._post(ev.PrepareWave(ordinal, self._agenda.now)):
            if isinstance(action, ev.WavePrepared):
                if action.faults:
                    raise InternalError("a row was voided", field="faults", value=str(action.faults[0].error))
                self._prepared.add(ordinal)
                self._to_prepare.popleft()
            elif isinstance(action, ev.WaveWaits):
                self._copies_awaited = True
                self.waits_for_copies += 1
        self._busy = False
        self._wake()

    def _compute(self) -> None:
        command = self._queue[0]
        seconds = self._profile.costs.wave_us((row.start, row.length) for row in command.rows) / 1e6
        self._busy = True
        start = self._agenda.now
        self._agenda.at(start + seconds, lambda: self._retire(command, start))

    def _retire(self, command: WaveCommand, start: float) -> None:
        """Publish, then send on: whoever hears of this wave may count on what it published."""
        plan, ordinal, now = self._serving, command.ordinal, self._agenda.now
        last = self.key.stage == plan.stages - 1
        results = tuple(RowResult(i, 0) for i, row in enumerate(command.rows) if row.final) if last else ()
        actions = self._post(ev.WaveRetired(ordinal, 0, (), results, now))
        done = next(action for action in actions if isinstance(action, ev.WaveDone))
        times = self._times(start, now)
        self._queue.popleft()
        self._prepared.discard(ordinal)
        self._arrived.discard(ordinal)
        tokens = sum(row.length for row in command.rows)
        self.ran.append(Ran(start, now, ordinal, tokens, command.rows))
        if not last:
            self._around.passed_on(self.key, ordinal, tokens)
        report = WaveReport(command.fence, True, 0, done.running_hash, times, results, (), done.capacity)
        self._around.reported(self.key, report)
        self._busy = False
        self._wake()

    def _times(self, start: float, end: float) -> StageTimes:
        since = self.ran[-1].end_s if self.ran else start
        preparing, self._prepared_s = self._prepared_s, 0.0
        gap = max(0.0, start - since - preparing)
        idle, waiting = (gap, 0.0) if self.key.stage == 0 else (0.0, gap)
        return StageTimes(
            round((end - start) * 1e6), round(waiting * 1e6), 0, round(preparing * 1e6), round(idle * 1e6)
        )

    # --- the core, its copies and its digest ------------------------------------------------------

    @property
    def _serving(self) -> JoinPlan:
        if self._plan is None:
            raise InternalError("the stage serves no formation", field="stage", value=self.key.stage)
        return self._plan

    def _post(self, event: ev.Event) -> list[ev.Action]:
        actions = self._machine.handle(event)
        for action in actions:
            if isinstance(action, ev.DigestChanged):
                self._changed()
            elif isinstance(action, ev.StartCopies):
                self._lots.append(action.lot)
                self._copy()
            elif isinstance(action, ev.CoreError):
                raise InternalError(action.error.message, field="stage", value=self.key.stage)
        return actions

    def _copy(self) -> None:
        if self._copying or not self._lots:
            return
        self._copying, lot = True, self._lots.popleft()
        self.copied_blocks += len(lot)
        self._agenda.at(self._agenda.now + self._profile.copy_us * len(lot) / 1e6, lambda: self._copied(lot))

    def _copied(self, lot: CopyLot) -> None:
        self._post(ev.CopiesEnded(lot.number, True, self._agenda.now))
        self._copying = False
        self._copy()
        self._copies_awaited = False
        self._wake()

    def _changed(self) -> None:
        if not self._digest_due:
            self._digest_due = True
            self._agenda.at(self._agenda.now + DIGEST_COALESCE_S, self._send_digests)

    def _send_digests(self) -> None:
        self._digest_due = False
        for digest in self._machine.digests_since(self._digest_seq):
            self._digest_seq = digest.seq
            self._around.digested(self.key, digest)
