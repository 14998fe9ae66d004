"""The daemon's end of one opening of a controller's streams: what `wavepp_stage.runtime`'s services do with it.

Owns the four streams of one opening as they are served (announcements, rounds, waves with heartbeats, the
digest). A refusal ends its stream with the typed error; a newer opening supersedes this one. A stream that
breaks ends nothing here: the formation stays until its controller has been silent for too long (`stage`). The
controller's end is `link`; what the messages mean is the core's business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wavepp_proto.errors import FormationEnded, StaleMessage, WaveppError
from wavepp_proto.terms import AnnounceFrame, Fence, Heartbeat, JoinPlan, Round, WaveCommand, WaveReport
from wavepp_simulator.ledger import check_known
from wavepp_stage.core import events as ev

if TYPE_CHECKING:
    from wavepp_simulator.opening import Opening
    from wavepp_simulator.stage import SimStage

DIGEST_COALESCE_S = 0.002


class Session:
    def __init__(self, stage: SimStage, opening: Opening) -> None:
        self._stage, self._opening = stage, opening
        self._plan: JoinPlan | None = None
        """Of the formation that the wave stream was opened in; None until then, and once it ended."""
        self._beats = 0
        self._closed = False

    # --- streams, as the controller opens and uses them -----------------------------------------

    def open_waves(self, beat: Heartbeat) -> None:
        """Take over from an earlier stream: what its controller has not heard is said again."""
        try:
            self._check_open(beat.fence)
            plan = self._present()
            self._hear(beat)
            reports = self._stage.reports.after(beat.reported_wave)
        except WaveppError as error:
            self._abort("waves", error)
            return
        self._stage.supersede(self)
        self._plan = plan
        self._beat(plan)
        for report in reports:
            self.report(report)

    def announce(self, frame: AnnounceFrame) -> None:
        for action in self._post("announce", ev.Announced(frame, self._stage.now), frame.fence):
            if isinstance(action, ev.SendAck):
                self._opening.answer("announce", action.ack)

    def round(self, asked: Round, announces: tuple[AnnounceFrame, ...] = ()) -> None:
        for action in self._post("rounds", ev.RoundArrived(asked, self._stage.now, announces), asked.fence):
            if isinstance(action, ev.SendVotes):
                check_known(self._stage.name, self._stage.machine, action.votes)
                self._opening.answer("rounds", action.votes)

    def wave(self, message: WaveCommand | Heartbeat) -> None:
        if self._plan is None:
            return
        if isinstance(message, Heartbeat):
            try:
                self._check_open(message.fence)
                self._present()
                self._hear(message)
            except WaveppError as error:
                self._abort("waves", error)
            return
        for action in self._post("waves", ev.WaveArrived(message, self._stage.now), message.fence):
            if isinstance(action, ev.WaveQueued):
                self._stage.executor.enqueue(action.command)

    def closed(self) -> None:
        """The controller closed the streams, or the connection broke, or a newer opening took over."""
        self._closed = True
        self._plan = None

    # --- what the daemon sends by itself ----------------------------------------------------------

    def report(self, report: WaveReport) -> None:
        if self._plan is not None:
            self._opening.answer("waves", report)

    def formation_ended(self, formation: int) -> None:
        """Said on the wave stream, behind the reports."""
        if self._plan is not None:
            self._abort("waves", FormationEnded(f"formation {formation} has ended", formation=formation))

    def _beat(self, plan: JoinPlan) -> None:
        """Beats until the stream ends."""
        if self._plan is not plan:
            return
        self._beats += 1
        self._opening.answer("waves", self._stage.heartbeat(plan.fence, self._beats))
        self._stage.process.after(plan.heartbeat_ms / 1e3, lambda: self._beat(plan), background=True)

    # --- parts ------------------------------------------------------------------------------------

    def _check_open(self, fence: Fence) -> None:
        if self._closed:
            raise StaleMessage("a newer stream took over", field="stream", value="superseded")
        self._stage.machine.check_reader(fence)

    def _present(self) -> JoinPlan:
        if self._stage.plan is None:
            raise FormationEnded("this daemon serves no formation", field="formation", value="none")
        return self._stage.plan

    def _hear(self, beat: Heartbeat) -> None:
        """The controller lives, unless the beat waited while this process was frozen: the core tells."""
        actions = self._stage.post(ev.ControllerHeard(beat.fence, self._stage.now))
        if any(isinstance(action, ev.SelfFenced) for action in actions):
            raise FormationEnded("this daemon has fenced itself", field="formation", value=beat.fence.formation)
        self._stage.reports.acknowledge(beat.reported_wave)

    def _post(self, stream: str, event: ev.Event, fence: Fence) -> list[ev.Action]:
        """Hand one message to the core; a refusal ends its stream."""
        try:
            self._check_open(fence)
            return self._stage.post(event)
        except WaveppError as error:
            self._abort(stream, error)
            return []

    def _abort(self, stream: str, error: WaveppError) -> None:
        if not self._closed:
            self._opening.ended(stream, error)
        if stream == "waves":
            self._plan = None


class DigestReader:
    """One watch of a stage's digest, until a newer one takes its place. Changes of one wave travel together."""

    def __init__(self, stage: SimStage, opening: Opening, watch: int) -> None:
        self._stage, self._opening, self._watch = stage, opening, watch
        self.seq = 0
        """Last one sent."""
        self._open = False
        self.due = True
        """Something was not sent yet."""

    def open(self, fence: Fence, seq: int) -> None:
        try:
            self._stage.machine.check_reader(fence)
        except WaveppError as error:
            self._opening.ended("digest", error)
            return
        self._open, self.seq = True, seq
        self._stage.readers.append(self)
        self._send()

    def close(self) -> None:
        self._open = False
        if self in self._stage.readers:
            self._stage.readers.remove(self)

    def changed(self) -> None:
        if not self.due:
            self.due = True
            self._stage.process.after(DIGEST_COALESCE_S, self._send)

    def _send(self) -> None:
        if not self._open:
            return
        self.due = False
        for digest in self._stage.machine.digests_since(self.seq):
            self.seq = digest.seq
            self._opening.digest(digest, self._watch)
