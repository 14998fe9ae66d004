"""The controller's way to one daemon in one formation, as `wavepp_controller.runtime.daemon_link` keeps it.

Owns the opening of streams, from join over any number of breaks to the end of the formation; everything heard
becomes an event, and the first stream of an opening that breaks, and only the first, becomes StreamLost. The
daemon's end is `session`. Decides nothing but whether what ended a stream leaves anything to resume.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from wavepp_controller.core import events as ev
from wavepp_controller.core.riding import Riding
from wavepp_proto.errors import StageLost, StaleMessage, WaveppError
from wavepp_proto.limits import CALL_DEADLINE_MS
from wavepp_proto.terms import (
    AnnounceFrame,
    ErrorInfo,
    Fence,
    Heartbeat,
    HoldKey,
    Inventory,
    JoinPlan,
    JoinReply,
    Round,
    WaveCommand,
    WaveOrdinal,
)
from wavepp_simulator.ledger import Violation
from wavepp_simulator.opening import Opening

if TYPE_CHECKING:
    from wavepp_simulator.controller import SimController
    from wavepp_simulator.stage import SimStage

T = TypeVar("T")
END_DEADLINE_S = 1.0
REOPEN_PAUSE_S = 0.1
"""Between two tries to open broken streams again."""
CONNECT_S = 1e9
"""A daemon that cannot be reached is tried until the link is closed."""


class SimLink:
    def __init__(self, controller: SimController, plan: JoinPlan) -> None:
        self.plan = plan
        self.controller = controller
        self.world = controller.world
        self._opening: Opening | None = None
        self._lost = False
        """A stream has ended: nothing is sent until the streams are open again."""
        self._closed = False
        self._reopening = False
        """Nothing is sent before the daemon has answered on new streams."""
        self._reported = WaveOrdinal(0)
        """What the core had heard when it asked for them."""
        self._riding = Riding[AnnounceFrame]()
        self._promised: set[HoldKey] = set()
        """The core counts on the daemon knowing these once it is asked about them: they must leave in time."""

    @property
    def name(self) -> str:
        return self.plan.key.short

    @property
    def stage(self) -> SimStage:
        return self.world.stages[self.world.place_of(self.plan.key)]

    @property
    def settled(self) -> bool:
        """Everything that the daemon's digest says was heard."""
        return self._opening is not None and not self._lost and not self._reopening and self._opening.digests_settled

    # --- joining ----------------------------------------------------------------------------------

    def join(self) -> None:
        """Inventory first (it fences the controller before us), then Join; answers Joined or JoinFailed."""
        self._call(
            lambda answer: answer(self.stage.take_inventory(self.plan.fence)), self._join, CALL_DEADLINE_MS / 1e3
        )

    def _join(self, found: Inventory | WaveppError) -> None:
        if isinstance(found, WaveppError):
            self._fail(found)
            return
        within = self.plan.deadline_ms / 1e3 + 1
        self._call(lambda answer: self.stage.join(self.plan, answer), self._joined, within)

    def _joined(self, reply: JoinReply | WaveppError) -> None:
        if isinstance(reply, WaveppError):
            self._fail(reply)
        elif not self._closed:
            self._opening = Opening(self)
            self._opening.begin(WaveOrdinal(0))
            self._opening.watch(0)
            self.controller.post(ev.Joined(self.plan.key, self.plan.fence.formation, reply, self.controller.now))

    def _fail(self, error: WaveppError) -> None:
        if not self._closed:
            self._closed = True
            self.controller.drop(self)
            failed = ev.JoinFailed(self.plan.key, self.plan.fence.formation, error.info(), self.controller.now)
            self.controller.post(failed)

    # --- sending ----------------------------------------------------------------------------------

    def announce(self, frames: list[AnnounceFrame]) -> None:
        if (opening := self._usable) is not None:
            opening.announce(frames)

    @property
    def riding(self) -> Riding[AnnounceFrame] | None:
        """What waits to go with the next round; None while nothing can be sent."""
        return None if self._usable is None else self._riding

    def take_along(self, frame: AnnounceFrame, size: int) -> None:
        """Send the only frame of a request in front of the next round."""
        self._riding.put(frame.key, frame, size)
        self._promised.add(frame.key)

    def send_round(self, asked: Round) -> None:
        if (opening := self._usable) is None:
            return
        ended = [release.key for release in asked.releases if release.ended]
        announces = tuple(replace(frame, fence=asked.fence) for frame in self._riding.take(ended))
        self._keep_promises(asked, ended, announces)
        opening.say("rounds", lambda session: session.round(asked, announces))

    def _keep_promises(self, asked: Round, ended: list[HoldKey], announces: tuple[AnnounceFrame, ...]) -> None:
        """Nobody is asked to prepare what was to ride to them and never left."""
        self._promised.difference_update(ended, (frame.key for frame in announces))
        late = [prepare.key for prepare in asked.prepares if prepare.key in self._promised]
        if late:
            raise Violation("shell", f"stage {self.name} is asked for {late}, which were to ride and did not leave")
        if announces:
            names = " ".join(f"{frame.key.request_id}.{frame.key.attempt}" for frame in announces)
            self.world.note(
                f"c>s{self.name}", f"announced in front of round {asked.fence.ordinal}: {names}", "announce"
            )

    def send_wave(self, command: WaveCommand) -> None:
        if (opening := self._usable) is not None:
            opening.say("waves", lambda session: session.wave(command))

    def watch_digest(self, from_seq: int) -> None:
        """Ask for what follows `from_seq`, 0 for a snapshot and what follows; replaces an earlier watch."""
        if (opening := self._usable) is not None:
            opening.watch(from_seq)

    def ask_inventory(self, fence: Fence) -> None:
        """Answers InventoryArrived, or nothing if it does not come."""
        self._call(lambda answer: answer(self.stage.take_inventory(fence)), self._took, CALL_DEADLINE_MS / 1e3)

    def heartbeat(self, count: int, reported_wave: WaveOrdinal | None = None) -> Heartbeat:
        fence = self.plan.fence
        reported = self.controller.reported_wave(self.plan.key) if reported_wave is None else reported_wave
        return Heartbeat(Fence(fence.epoch, fence.formation, fence.incarnation), count, reported_wave=reported)

    @property
    def _usable(self) -> Opening | None:
        return None if self._lost or self._closed or self._reopening else self._opening

    def _took(self, found: Inventory | WaveppError) -> None:
        if isinstance(found, Inventory) and not self._closed:
            self.controller.post(ev.InventoryArrived(self.plan.key, found, self.controller.now))

    # --- breaking and opening again ---------------------------------------------------------------

    def lose(self, opening: Opening, error: WaveppError) -> None:
        """A stream of `opening` ended, for whatever cause."""
        if opening is not self._opening or self._lost or self._closed:
            return
        self._lost = True
        if self._reopening and _resumable(error):
            self.controller.process.after(REOPEN_PAUSE_S, self._connect)
            return
        self._post_lost(error, resumable=_resumable(error))

    def reopen(self, reported_wave: WaveOrdinal) -> None:
        """Open all streams again; answers StreamsReopened once the daemon has said something, or StreamLost."""
        if self._closed or self._reopening:
            return
        self._reopening = True
        self._reported = reported_wave
        self._connect()

    def _connect(self) -> None:
        """What the streams before still carry is heard no more: a word on them would pass for the new ones' answer."""
        if not self._closed:
            if self._opening is not None:
                self._opening.cancel()
                self._opening = None
            self._call(self._accept, self._connected, CONNECT_S, faulty=False)

    def _accept(self, answer: Callable[[None], None]) -> None:
        answer(None)

    def _connected(self, refused: WaveppError | None) -> None:
        if self._closed:
            return
        if refused is not None:
            self._reopening, self._lost = False, True
            self._post_lost(refused, resumable=False)
            return
        self._opening, self._lost = Opening(self), False
        self._opening.begin(self._reported)

    def heard_first(self, opening: Opening) -> None:
        """The daemon answers on an opening's wave stream."""
        if self._reopening and opening is self._opening:
            self._reopening = False
            self.controller.post(ev.StreamsReopened(self.plan.key, self.plan.fence.formation, self.controller.now))

    def hears(self, opening: Opening) -> bool:
        """Whether what comes through `opening` still counts."""
        return opening is self._opening and not self._lost and not self._closed

    def cut(self) -> None:
        """A fault of the network: whatever is under way is lost, both ends hear of it."""
        if self._opening is not None:
            self._opening.cut()

    def _post_lost(self, error: WaveppError, *, resumable: bool) -> None:
        self._reopening = False
        key, fence = self.plan.key, self.plan.fence
        now = self.controller.now
        self.controller.post(
            ev.StreamLost(key, fence.incarnation, fence.formation, error.info(), now, resumable=resumable)
        )

    # --- the end ----------------------------------------------------------------------------------

    def end(self, fence: Fence | None, cause: ErrorInfo) -> None:
        """Tell the daemon that its formation ended (best effort, bounded), then close."""
        self._closed = True
        if fence is None:
            self.close()
            return
        self._call(lambda answer: answer(self.stage.end_formation(fence, cause)), self._told, END_DEADLINE_S)

    def _told(self, _: WaveppError | None) -> None:
        self.close()

    def close(self) -> None:
        """Close every stream. Idempotent."""
        self._closed = True
        if self._opening is not None:
            self._opening.cancel()

    def _call(
        self,
        ask: Callable[[Callable[[T | WaveppError], None]], None],
        answered: Callable[[T | WaveppError], None],
        within_s: float,
        *,
        faulty: bool = True,
    ) -> None:
        network, name = self.world.network, f"c>s{self.name}/control"
        network.call(self.controller.process, lambda: self.stage.process, name, ask, answered, within_s, faulty=faulty)


def _resumable(error: WaveppError) -> bool:
    """The connection broke, or a message was missing: the daemon may be alive and in its formation."""
    if isinstance(error, StaleMessage):
        return ("field", "ordinal") in error.info().fields
    return isinstance(error, StageLost)
