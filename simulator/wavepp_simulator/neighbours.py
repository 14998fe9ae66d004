"""One stage's links to the stage before it and the stage behind it, for one formation at a time.

Follows the activation links of `wavepp_stage.runtime`: payloads in order, nothing lost while the link lives; a link
that breaks, or on which a wave is missing or comes again, is a fault of its formation. Called by `stage` and
`executor`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from wavepp_proto.errors import LinkFault
from wavepp_proto.terms import Fence, JoinPlan
from wavepp_simulator.engine import Payload
from wavepp_simulator.ledger import Violation
from wavepp_simulator.network import Wire
from wavepp_stage.engine.base import WaveHeader

if TYPE_CHECKING:
    from wavepp_simulator.stage import SimStage


class Neighbours:
    def __init__(self, stage: SimStage) -> None:
        self._stage = stage
        self._link: tuple[Fence, Wire, SimStage] | None = None
        """To the next stage, in the formation of this fence."""
        self.misnumber: list[int] = []
        """By how much the next payloads to the next stage are misnumbered, by a scenario's wish."""
        self.lossy = False
        """A payload to the next stage is, or was, to be lost."""
        self._heard: tuple[Fence, int] | None = None
        """The link from the stage before, and the wave that came on it last: what `executor` must have noticed."""

    @property
    def following(self) -> SimStage | None:
        """The process of the same rank of the next stage; None on the last one."""
        place, stages = self._stage.place + self._stage.record.ranks, self._stage.world.stages
        return stages[place] if place < len(stages) else None

    def dial(self, plan: JoinPlan) -> float:
        """Open the link to the next stage; seconds until it stands."""
        following, stage = self.following, self._stage
        assert following is not None, "the last stage dials nobody"
        wire = Wire(stage.world.network, f"s{stage.name}>s{following.name}", following.process)
        self._link = (plan.fence, wire, following)
        following.process.on_death(lambda: self.broke(plan.fence, "the next stage is gone"))
        stage.process.on_death(lambda: wire.send(lambda: following.neighbours.upstream_closed(plan.fence)))
        return 2 * stage.world.network.delay(wire.name)

    def send_on(self, header: WaveHeader, payload: Payload) -> None:
        if self._link is not None:
            fence, wire, following = self._link
            sent = replace(header, ordinal=header.ordinal + (self.misnumber.pop(0) if self.misnumber else 0))
            wire.send(lambda: following.neighbours.activation(self, fence, sent, payload), faulty=True)

    def activation(self, sender: Neighbours, fence: Fence, header: WaveHeader, payload: Payload) -> None:
        stage = self._stage
        ours = stage.machine.standing
        if stage.executor.serving is None or (ours.epoch, ours.formation) != (fence.epoch, fence.formation):
            self._refuse(sender, fence, "activations of no present formation")
            return
        sent, own = sender._stage.record.numerics.dtype, stage.record.numerics.dtype
        if sent != own:
            where = f"stage {stage.name} wave {header.ordinal}"
            raise Violation("I3", f"{where}: activations in {sent} are read as {own}")
        last = self._heard[1] if self._heard is not None and self._heard[0] == fence else 0
        self._heard = (fence, header.ordinal)
        try:
            stage.executor.arrive(header, payload)
        except LinkFault as error:
            self._refuse(sender, fence, error.message)
        if header.ordinal != last + 1 and stage.executor.serving.fault is None:
            what = f"wave {header.ordinal} behind wave {last}"
            raise Violation("link", f"stage {stage.name} takes {what} from stage {sender._stage.name}")

    def _refuse(self, sender: Neighbours, fence: Fence, why: str) -> None:
        """The sender hears that its payload was refused."""
        back = self._stage.world.network.delay(f"s{self._stage.name}>s{sender._stage.name}")
        sender._stage.process.after(back, lambda: sender.broke(fence, why))

    def upstream_closed(self, fence: Fence) -> None:
        serving = self._stage.executor.serving
        if serving is not None and serving.plan.fence.epoch == fence.epoch:
            self._stage.executor.lose_link(fence.formation, f"stage {self._stage.record.key.stage - 1} closed the link")

    def broke(self, fence: Fence, reason: str) -> None:
        """The wire to the next stage."""
        if self._link is not None and self._link[0] == fence:
            delay = self._stage.world.network.delay("link")
            self._stage.process.after(delay, lambda: self._lose(fence, reason))

    def cut(self) -> None:
        """A fault of the network: what is under way to the next stage is lost, both ends hear of it."""
        if self._link is None:
            return
        fence, wire, following = self._link
        wire.cut()
        self.broke(fence, "the link broke")
        following.process.run(lambda: following.neighbours.upstream_closed(fence))

    def close(self) -> None:
        if self._link is not None:
            (fence, wire, following), self._link = self._link, None
            wire.send(lambda: following.neighbours.upstream_closed(fence))

    def _lose(self, fence: Fence, reason: str) -> None:
        serving = self._stage.executor.serving
        if serving is not None and serving.plan.fence == fence:
            self._stage.executor.lose_link(fence.formation, reason)
