"""The controller's streams to one daemon in one formation, as `wavepp_controller.runtime` keeps them.

Owns the wires in both directions from join to the end of the formation; everything heard becomes an
event, and the first stream that breaks, and only the first, becomes StreamLost. The daemon's end is
`session`. Nothing here decides anything.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from wavepp_controller.core import events as ev
from wavepp_proto.errors import StageLost, WaveppError
from wavepp_proto.limits import CALL_DEADLINE_MS
from wavepp_proto.terms import (
    AnnounceAck,
    AnnounceFrame,
    Digest,
    ErrorInfo,
    Fence,
    Heartbeat,
    Inventory,
    JoinPlan,
    JoinReply,
    Round,
    Votes,
    WaveCommand,
    WaveReport,
)
from wavepp_simulator.network import Wire
from wavepp_simulator.session import Session

if TYPE_CHECKING:
    from wavepp_simulator.controller import SimController
    from wavepp_simulator.stage import SimStage

T = TypeVar("T")
STREAMS = ("announce", "rounds", "waves", "digest")
END_DEADLINE_S = 1.0
Message = AnnounceAck | Votes | WaveReport | Heartbeat | Digest


class SimLink:
    def __init__(self, controller: SimController, plan: JoinPlan) -> None:
        self.plan = plan
        self._controller = controller
        self._world = controller.world
        self._lost = False
        """Nothing that is heard counts any more."""
        self._session: Session | None = None
        self._up: dict[str, Wire] = {}
        """To the daemon, by stream."""
        self._down: dict[str, Wire] = {}
        self._watch = 0
        self._beats = 0

    @property
    def place(self) -> int:
        return self.plan.key.stage

    @property
    def _stage(self) -> SimStage:
        return self._world.stages[self.place]

    # --- joining ----------------------------------------------------------------------------------

    def join(self) -> None:
        """Inventory first (it fences the controller before us), then Join; answers Joined or JoinFailed."""
        self._call(
            lambda answer: answer(self._stage.take_inventory(self.plan.fence)), self._join, CALL_DEADLINE_MS / 1e3
        )

    def _join(self, found: Inventory | WaveppError) -> None:
        if isinstance(found, WaveppError):
            self._fail(found)
            return
        within = self.plan.deadline_ms / 1e3 + 1
        self._call(lambda answer: self._stage.join(self.plan, answer), self._joined, within)

    def _joined(self, reply: JoinReply | WaveppError) -> None:
        if isinstance(reply, WaveppError):
            self._fail(reply)
        elif not self._lost:
            self._serve()
            self._controller.post(ev.Joined(self.plan.key, self.plan.fence.formation, reply, self._controller.now))

    def _fail(self, error: WaveppError) -> None:
        if not self._lost:
            self._lost = True
            self._controller.drop(self)
            failed = ev.JoinFailed(self.plan.key, self.plan.fence.formation, error.info(), self._controller.now)
            self._controller.post(failed)

    def _serve(self) -> None:
        """Open all streams to the process that is there now."""
        stage, network = self._stage, self._world.network
        session = self._session = Session(stage, self)
        for stream in STREAMS:
            self._up[stream] = Wire(network, f"c>s{self.place}/{stream}", stage.process)
            self._down[stream] = Wire(network, f"s{self.place}>c/{stream}", self._controller.process)
        stage.process.on_death(lambda: self.broke(f"stage {self.place} closed the connection"))
        self._controller.process.on_death(lambda: self._up["waves"].send(session.closed))
        self._up["waves"].send(session.open_waves)
        self._beat()
        self.watch_digest()

    # --- sending ----------------------------------------------------------------------------------

    def announce(self, frames: list[AnnounceFrame]) -> None:
        session = self._session
        if session is not None:
            for frame in frames:
                self._up["announce"].send(partial(session.announce, frame))

    def send_round(self, asked: Round) -> None:
        session = self._session
        if session is not None:
            self._up["rounds"].send(lambda: session.round(asked))

    def send_wave(self, command: WaveCommand) -> None:
        session = self._session
        if session is not None:
            self._up["waves"].send(lambda: session.wave(command))

    def watch_digest(self) -> None:
        """Ask for a snapshot and what follows; replaces an earlier watch."""
        session = self._session
        if session is not None:
            self._watch += 1
            self._up["digest"].send(lambda: session.watch(self.plan.fence, 0))

    def _beat(self) -> None:
        session = self._session
        if session is None or self._lost:
            return
        self._beats += 1
        fence = self.plan.fence
        beat = Heartbeat(Fence(fence.epoch, fence.formation, fence.incarnation), self._beats)
        self._up["waves"].send(lambda: session.wave(beat), background=True)
        self._controller.process.after(self.plan.heartbeat_ms / 1e3, self._beat, background=True)

    # --- hearing (called by the session, in the daemon) -------------------------------------------

    def answer(self, stream: str, message: Message, watch: int | None = None) -> None:
        """Something from the daemon; digests of an earlier watch vanish with it."""
        background = isinstance(message, Heartbeat)
        self._down[stream].send(lambda: self._hear(message, watch), background=background)

    def stream_ended(self, stream: str, error: WaveppError | None) -> None:
        lost = error or StageLost(f"stage {self.place} closed a stream", stage=self.place)
        self._down[stream].send(lambda: self._lose(lost.info()))

    def broke(self, why: str) -> None:
        """The connection: both ends hear of it."""
        if not self._down:
            return
        delay = self._world.network.delay(f"s{self.place}>c")
        self._controller.process.after(delay, lambda: self._lose(StageLost(why, stage=self.place).info()))

    def cut(self) -> None:
        """A fault of the network: whatever is under way is lost, both ends hear of it."""
        self.broke(f"the connection to stage {self.place} broke")
        for wire in (*self._up.values(), *self._down.values()):
            wire.cut()
        if self._session is not None:
            self._stage.process.run(self._session.closed)

    def _hear(self, message: Message, watch: int | None) -> None:
        if self._lost or (watch is not None and watch != self._watch):
            return
        key, now = self.plan.key, self._controller.now
        match message:
            case AnnounceAck():
                self._controller.post(ev.AnnounceAcked(key, message, now))
            case Votes():
                self._controller.post(ev.VotesArrived(key, message, now))
            case Digest():
                self._controller.post(ev.DigestArrived(key, message, now))
            case WaveReport():
                self._controller.post(ev.ReportArrived(key, message, now))
            case Heartbeat():
                self._controller.post(ev.BeatArrived(key, message, now))

    def _lose(self, error: ErrorInfo) -> None:
        if not self._lost:
            self._lost = True
            fence = self.plan.fence
            lost = ev.StreamLost(self.plan.key, fence.incarnation, fence.formation, error, self._controller.now)
            self._controller.post(lost)

    # --- the end ----------------------------------------------------------------------------------

    def end(self, fence: Fence | None) -> None:
        """Tell the daemon that its formation ended (best effort, bounded), then close."""
        self._lost = True
        if fence is None:
            self.close()
            return
        self._call(lambda answer: answer(self._stage.end_formation(fence)), self._told, END_DEADLINE_S)

    def _told(self, _: WaveppError | None) -> None:
        self.close()

    def close(self) -> None:
        """Close every stream. Idempotent."""
        self._lost = True
        session, self._session = self._session, None
        if session is not None:
            self._up["waves"].send(session.closed)

    def _call(
        self,
        ask: Callable[[Callable[[T | WaveppError], None]], None],
        answered: Callable[[T | WaveppError], None],
        within_s: float,
    ) -> None:
        network, name = self._world.network, f"c>s{self.place}/control"
        network.call(self._controller.process, lambda: self._stage.process, name, ask, answered, within_s)
