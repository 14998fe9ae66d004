"""The daemon's end of one controller's streams: what `wavepp_stage.runtime`'s services do with them.

Owns the four streams of one link as they are served (announcements, rounds, waves with heartbeats, the
digest) and when the controller counts as gone. A refusal ends its stream with the typed error. The
controller's end is `link`; what the messages mean is the core's business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wavepp_proto.errors import StaleMessage, WaveppError
from wavepp_proto.terms import AnnounceFrame, Fence, Heartbeat, Round, WaveCommand, WaveReport
from wavepp_stage.core import events as ev

if TYPE_CHECKING:
    from wavepp_simulator.link import SimLink
    from wavepp_simulator.stage import SimStage

DIGEST_COALESCE_S = 0.002


class Session:
    def __init__(self, stage: SimStage, link: SimLink) -> None:
        self._stage, self._link = stage, link
        self._fence: Fence | None = None
        """Of the formation that the wave stream was opened in; None until then, and once it ended."""
        self._last_heard = 0.0
        self._beats = 0
        self._heartbeat_s = self._silence_s = 0.0
        self._watched: int | None = None
        """Seq that the reader of the digest has; None while nobody reads."""
        self._watch = 0
        """Which opening of the digest stream counts."""
        self._due = False
        self._closed = False
        stage.sessions.append(self)

    # --- streams, as the controller opens and uses them -----------------------------------------

    def open_waves(self) -> None:
        plan = self._stage.plan
        if plan is None:
            error = StaleMessage("this daemon serves no formation", field="formation", value="none")
            self._abort("waves", error)
            return
        self._stage.supersede(self)
        self._fence = plan.fence
        self._heartbeat_s, self._silence_s = plan.heartbeat_ms / 1e3, plan.silence_ms / 1e3
        self._last_heard = self._stage.now
        self._beat(plan.fence)

    def announce(self, frame: AnnounceFrame) -> None:
        for action in self._post("announce", ev.Announced(frame, self._stage.now)):
            if isinstance(action, ev.SendAck):
                self._link.answer("announce", action.ack)

    def round(self, asked: Round) -> None:
        for action in self._post("rounds", ev.RoundArrived(asked, self._stage.now)):
            if isinstance(action, ev.SendVotes):
                self._link.answer("rounds", action.votes)

    def wave(self, message: WaveCommand | Heartbeat) -> None:
        if self._fence is None:
            return
        self._last_heard = self._stage.now
        if isinstance(message, Heartbeat):
            return
        for action in self._post("waves", ev.WaveArrived(message, self._stage.now)):
            if isinstance(action, ev.WaveQueued):
                self._stage.executor.enqueue(action.command)

    def watch(self, fence: Fence, seq: int) -> None:
        """A newer watch closes the one before."""
        try:
            self._stage.machine.check_reader(fence)
        except WaveppError as error:
            self._abort("digest", error)
            return
        self._watch += 1
        self._watched = seq
        self._send_digests()

    def closed(self) -> None:
        """The controller closed the streams, or its process died, or the connection broke."""
        if self in self._stage.sessions:
            self._stage.sessions.remove(self)
        self._closed, self._watched = True, None
        self.end_waves()

    def end_waves(self) -> None:
        """Nothing of the formation may stay held here once the wave stream is gone."""
        fence, self._fence = self._fence, None
        if fence is not None:
            self._stage.orphaned(fence)

    # --- what the daemon sends by itself ----------------------------------------------------------

    def report(self, report: WaveReport) -> None:
        if self._fence is not None:
            self._link.answer("waves", report)

    def digest_changed(self) -> None:
        """Changes of one wave travel in one message."""
        if self._watched is not None and not self._due:
            self._due, watch = True, self._watch
            self._stage.process.after(DIGEST_COALESCE_S, lambda: self._flush(watch))

    def _flush(self, watch: int) -> None:
        self._due = False
        if watch == self._watch:
            self._send_digests()

    def _send_digests(self) -> None:
        if self._watched is None:
            return
        watch = self._watch
        for digest in self._stage.machine.digests_since(self._watched):
            self._watched = digest.seq
            self._link.answer("digest", digest, watch)

    def _beat(self, fence: Fence) -> None:
        """Beats until the stream ends, or the controller has been silent for too long."""
        if self._fence != fence:
            return
        if self._stage.now - self._last_heard > self._silence_s:
            self.end_waves()
            self._link.stream_ended("waves", None)
            return
        self._beats += 1
        self._link.answer("waves", self._stage.heartbeat(fence, self._beats))
        self._stage.process.after(self._heartbeat_s, lambda: self._beat(fence), background=True)

    def _post(self, stream: str, event: ev.Event) -> list[ev.Action]:
        """Hand one message to the core; a refusal ends its stream."""
        try:
            return self._stage.post(event)
        except WaveppError as error:
            self._abort(stream, error)
            return []

    def _abort(self, stream: str, error: WaveppError) -> None:
        if not self._closed:
            self._link.stream_ended(stream, error)
        if stream == "waves":
            self.end_waves()
