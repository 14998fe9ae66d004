"""A fake pipeline whose streams break: messages are lost, come twice, and are sent again.

Owns what stands between the core and its fake daemons: which daemons can be reached, waves accepted and executed
in order by each, and reports that a daemon keeps until the controller says that it has them. A daemon refuses what
skips a message, as the real one does. Tests break streams (`cut`), lose or double single messages (`lose_next`,
`double`), and plant what inventories must find.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tests.harness.fake_pipeline import FakeDaemon, FakePipeline, fault
from wavepp_controller.core.config import ControllerConfig
from wavepp_controller.core.events import (
    Action,
    AnnounceAcked,
    AnnounceRequest,
    EndFormation,
    Event,
    FormPipeline,
    ReopenStreams,
    ReportArrived,
    SendRound,
    SendWave,
    StreamLost,
    StreamsReopened,
    VotesArrived,
)
from wavepp_proto.errors import StaleMessage
from wavepp_proto.terms import AnnounceAck, DaemonKey, ErrorInfo, WaveReport


@dataclass
class Wire:
    """Streams to one daemon in one formation, and what lies at its end."""

    open: bool = True
    round: int = 0
    """The last round applied."""
    accepted: dict[int, SendWave] = field(default_factory=dict)
    reports: dict[int, WaveReport] = field(default_factory=dict)
    """Of every wave executed, in order."""


def missing(ordinal: int) -> ErrorInfo:
    return StaleMessage("a message is missing", field="ordinal", value=ordinal).info()


class FlakyPipeline(FakePipeline):
    def __init__(self, stages: int = 2, config: ControllerConfig | None = None, *, ranks: int = 1) -> None:
        self.wires: dict[DaemonKey, Wire] = {}
        self.unreachable: set[int] = set()
        """Stages whose streams cannot be opened."""
        self.lose_next: set[tuple[int, type]] = set()
        """The next message of this type, action or event, to or from this stage never arrives."""
        self.double: set[type] = set()
        """Events that come twice."""
        super().__init__(stages, config, ranks=ranks)

    def hears(self, key: DaemonKey) -> bool:
        return super().hears(key) and self.wires[key].open

    def queued_waves(self, key: DaemonKey) -> int:
        wire = self.wires[key]
        return super().queued_waves(key) + len(wire.accepted) - len(wire.reports)

    def key(self, stage: int, rank: int = 0) -> DaemonKey:
        return self.daemon(stage, rank).plan.key

    def wire(self, stage: int, rank: int = 0) -> Wire:
        return self.wires[self.key(stage, rank)]

    def cut(self, stage: int, error: ErrorInfo | None = None, *, resumable: bool = True, rank: int = 0) -> None:
        """Break the streams to one daemon: what is on them is lost."""
        self._break(self.key(stage, rank), error or fault("STAGE_LOST"), resumable)
        self._drain()

    def _break(self, key: DaemonKey, cause: ErrorInfo, resumable: bool) -> None:
        plan = self.daemons[key].plan
        self.wires[plan.key].open = False
        self.held = [kept for action in self.held if (kept := _without(action, plan.key)) is not None]
        queue = [kept for action in self._queue if (kept := _without(action, plan.key)) is not None]
        self._queue.clear()
        self._queue.extend(queue)
        fence = plan.fence
        lost = StreamLost(plan.key, fence.incarnation, fence.formation, cause, self.now, resumable=resumable)
        self._handle(lost)

    # --- answering ------------------------------------------------------------------------------

    def _answer(self, action: Action) -> None:
        match action:
            case FormPipeline():
                self.wires = {plan.key: Wire() for plan in action.plans}
                super()._answer(action)
            case EndFormation():
                self.wires = {key: Wire() for key in self.wires}
                super()._answer(action)
            case AnnounceRequest():
                for key, fence, _ in action.targets:
                    if self._arrives(key, AnnounceRequest) and action.key not in self.daemons[key].over:
                        self.daemons[key].announced.add(action.key)
                        self._say(key, AnnounceAcked(key, AnnounceAck(fence, action.key), self.now))
            case SendRound():
                if self._arrives(action.key, SendRound):
                    self._vote(action)
            case SendWave():
                for key, _ in action.targets:
                    if self._arrives(key, SendWave):
                        self._accept(key, action)
                self._execute()
            case ReopenStreams():
                self._reopen(action)
            case _:
                super()._answer(action)

    def _vote(self, action: SendRound) -> None:
        wire, ordinal = self.wires[action.key], action.round.fence.ordinal
        if wire.round and ordinal > wire.round + 1:
            self._break(action.key, missing(ordinal), resumable=False)
            return
        wire.round = max(wire.round, ordinal)
        self._say(action.key, VotesArrived(action.key, self.daemons[action.key].vote(action.round), self.now))

    def _accept(self, key: DaemonKey, wave: SendWave) -> None:
        wire = self.wires[key]
        expected = max(wire.accepted, default=0) + 1
        if wave.ordinal > expected:
            self._break(key, missing(wave.ordinal), resumable=False)
        elif wave.ordinal == expected:
            wire.accepted[wave.ordinal] = wave

    def _execute(self) -> None:
        """Every wave that has come, on each stage behind the same rank of the one before it."""
        chains: dict[int, Wire] = {}
        for key, wire in sorted(self.wires.items()):
            if key not in self.daemons:
                return
            before = chains.get(key.rank)
            for ordinal in range(len(wire.reports) + 1, len(wire.accepted) + 1):
                if before is not None and ordinal not in before.reports:
                    break
                void = before.reports[ordinal].void_bitmap if before is not None else 0
                self._run_one(key, self.daemons[key], wire.accepted[ordinal], void)
            chains[key.rank] = wire

    def _run_one(self, key: DaemonKey, daemon: FakeDaemon, wave: SendWave, void: int) -> None:
        report = daemon.report(wave, daemon.fence(wave.ordinal), void, self.tells_tokens(key))
        wire = self.wires[key]
        wire.reports[wave.ordinal] = report
        if wire.open:
            self._say(key, ReportArrived(key, report, self.now))

    def _reopen(self, action: ReopenStreams) -> None:
        key, wire = action.key, self.wires.get(action.key)
        if wire is None or action.fence != self.daemons[key].plan.fence:
            return  # the formation ended meanwhile
        if key.stage in self.unreachable:
            self._break(key, fault("STAGE_LOST"), resumable=True)
            return
        wire.open = True
        self._handle(StreamsReopened(key, action.fence.formation, self.now))
        for ordinal, report in list(wire.reports.items()):
            if ordinal > action.reported_wave and wire.open and self.wires.get(key) is wire:
                self._say(key, ReportArrived(key, report, self.now))

    # --- wires ----------------------------------------------------------------------------------

    def _arrives(self, key: DaemonKey, kind: type) -> bool:
        if key not in self.daemons or not self.hears(key):
            return False
        lost = (key.stage, kind) in self.lose_next
        self.lose_next.discard((key.stage, kind))
        return not lost

    def _say(self, key: DaemonKey, event: Event) -> None:
        if not self._arrives(key, type(event)):
            return
        for _ in range(2 if type(event) in self.double else 1):
            self._handle(event)


def _without(action: Action, key: DaemonKey) -> Action | None:
    """The action as far as it is for others."""
    match action:
        case SendRound() if action.key == key:
            return None
        case SendWave():
            waves = tuple(target for target in action.targets if target[0] != key)
            return replace(action, targets=waves) if waves else None
        case AnnounceRequest():
            left = tuple(target for target in action.targets if target[0] != key)
            return replace(action, targets=left) if left else None
    return action
