"""All streams of one link, from their opening to the first that breaks.

Owns the wires in both directions, the controller's heartbeat and the watch of the digest. Everything heard
goes to the link as an event, as long as this opening is the link's present one. The daemon's end is `session`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from wavepp_controller.core import events as ev
from wavepp_proto.errors import StageLost, WaveppError
from wavepp_proto.terms import AnnounceAck, AnnounceFrame, Digest, Heartbeat, Votes, WaveOrdinal, WaveReport
from wavepp_simulator.network import Wire
from wavepp_simulator.session import DigestReader, Session

if TYPE_CHECKING:
    from wavepp_simulator.link import SimLink

STREAMS = ("announce", "rounds", "waves", "digest")
Message = AnnounceAck | Votes | WaveReport | Heartbeat


class Opening:
    def __init__(self, link: SimLink) -> None:
        """To the process that is there now."""
        self._link = link
        self._stage, network = link.stage, link.world.network
        self._session = Session(self._stage, self)
        self._up = {name: Wire(network, f"c>s{link.name}/{name}", self._stage.process) for name in STREAMS}
        self._down = {name: Wire(network, f"s{link.name}>c/{name}", link.controller.process) for name in STREAMS}
        self._reader: DigestReader | None = None
        self._watches = 0
        self._heard_seq = 0
        """Last digest of the present watch that arrived."""
        self._beats = 0
        self._heard = self._cancelled = False
        if self._stage.process.alive:
            self._stage.process.on_death(lambda: self._broke(f"stage {link.name} closed the connection"))
        else:
            self._broke(f"stage {link.name} closed the connection")
        link.controller.process.on_death(self._close_there)

    @property
    def digests_settled(self) -> bool:
        """The daemon has sent everything, and the last of it arrived."""
        return self._reader is not None and not self._reader.due and self._heard_seq == self._reader.seq

    # --- towards the daemon -----------------------------------------------------------------------

    def begin(self, reported_wave: WaveOrdinal) -> None:
        """The first message on the wave stream says what was heard so far."""
        opening = self._link.heartbeat(self._next_beat(), reported_wave)
        self._up["waves"].send(lambda: self._session.open_waves(opening))
        self._link.controller.process.after(self._link.plan.heartbeat_ms / 1e3, self._beat, background=True)

    def say(self, stream: str, what: Callable[[Session], None], *, background: bool = False) -> None:
        self._up[stream].send(lambda: what(self._session), background=background, faulty=True)

    def announce(self, frames: list[AnnounceFrame]) -> None:
        """Frame by frame, so that a connection may break between them; in one message where messages are struck."""
        messages = [frames] if self._link.world.network.faults.active else [[frame] for frame in frames]
        for message in messages:
            self.say("announce", partial(_announce, message))

    def watch(self, from_seq: int) -> None:
        """Replaces an earlier watch."""
        before, self._watches, self._heard_seq = self._reader, self._watches + 1, 0
        reader = self._reader = DigestReader(self._stage, self, self._watches)
        fence = self._link.plan.fence

        def arrive() -> None:
            if before is not None:
                before.close()
            reader.open(fence, from_seq)

        self._up["digest"].send(arrive)

    def cancel(self) -> None:
        """The controller lets go of all streams; what it said before may still arrive."""
        if not self._cancelled:
            self._cancelled = True
            self._close_there()

    def cut(self) -> None:
        """The connection breaks: whatever is under way is lost, both ends hear of it."""
        for wire in (*self._up.values(), *self._down.values()):
            wire.cut()
        self._broke(f"the connection to stage {self._link.name} broke")
        self._stage.process.run(self._end_there)

    def _beat(self) -> None:
        if not self._link.hears(self):
            return
        beat = self._link.heartbeat(self._next_beat())
        self.say("waves", lambda session: session.wave(beat), background=True)
        self._link.controller.process.after(self._link.plan.heartbeat_ms / 1e3, self._beat, background=True)

    def _next_beat(self) -> int:
        self._beats += 1
        return self._beats

    def _close_there(self) -> None:
        self._up["waves"].send(self._end_there)

    def _end_there(self) -> None:
        self._session.closed()
        if self._reader is not None:
            self._reader.close()

    # --- from the daemon (called by the session) --------------------------------------------------

    def answer(self, stream: str, message: Message) -> None:
        background = isinstance(message, Heartbeat)
        self._down[stream].send(partial(self._hear, message), background=background, faulty=True)

    def digest(self, digest: Digest, watch: int) -> None:
        """Digests of an earlier watch vanish with it."""
        self._down["digest"].send(partial(self._hear_digest, digest, watch), faulty=True)

    def ended(self, stream: str, error: WaveppError) -> None:
        """The daemon refused something."""
        self._down[stream].send(lambda: self._link.lose(self, error))

    def _broke(self, why: str) -> None:
        controller, name = self._link.controller, f"s{self._link.name}>c"
        delay = self._link.world.network.delay(name)
        error = StageLost(why, stage=self._link.plan.key.stage)
        controller.process.after(delay, lambda: self._link.lose(self, error))

    def _hear(self, message: Message) -> None:
        link = self._link
        if not link.hears(self):
            return
        if not self._heard and isinstance(message, Heartbeat | WaveReport):
            self._heard = True
            link.heard_first(self)
        key, controller = link.plan.key, link.controller
        match message:
            case AnnounceAck():
                controller.post(ev.AnnounceAcked(key, message, controller.now))
            case Votes():
                controller.post(ev.VotesArrived(key, message, controller.now))
            case WaveReport():
                controller.post(ev.ReportArrived(key, message, controller.now))
            case Heartbeat():
                controller.post(ev.BeatArrived(key, message, controller.now))

    def _hear_digest(self, digest: Digest, watch: int) -> None:
        if self._link.hears(self) and watch == self._watches:
            if digest.last_page:
                self._heard_seq = digest.seq
            controller = self._link.controller
            controller.post(ev.DigestArrived(self._link.plan.key, digest, controller.now))


def _announce(frames: list[AnnounceFrame], session: Session) -> None:
    for frame in frames:
        session.announce(frame)
