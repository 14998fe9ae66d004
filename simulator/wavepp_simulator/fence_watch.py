"""An independent eye on one stage's fences: what it may no longer obey.

Owns when the stage last heard the controller of its formation and the newest authority that it was told of, both
from the events alone. A round, a wave or a prepare that is carried out against either is a violation, however
right its content. Called by `stage` after every event of its core.
"""

from __future__ import annotations

from wavepp_proto.terms import JoinPlan
from wavepp_simulator.ledger import Violation
from wavepp_stage.core import events as ev

_OBEYED = (ev.SendVotes, ev.WaveQueued, ev.WavePrepared)


class FenceWatch:
    def __init__(self, stage: str) -> None:
        self._stage = stage
        self._heard_at = 0.0
        """When the controller of the present formation was last heard (s)."""
        self._epoch = 0
        """Of the newest controller that asked for an inventory or a join."""

    def saw(self, event: ev.Event, actions: list[ev.Action], plan: JoinPlan | None) -> None:
        """`plan` is of the formation that is served; raises Violation."""
        match event:
            case ev.ControllerHeard(_, now) if not any(isinstance(action, ev.SelfFenced) for action in actions):
                self._heard_at = now
            case ev.InventoryAsked(fence, _):
                self._epoch = max(self._epoch, fence.epoch)
            case ev.JoinAsked(asked, _):
                self._epoch = max(self._epoch, asked.fence.epoch)
            case ev.RoundArrived() | ev.WaveArrived() | ev.PrepareWave() if _obeyed(actions):
                self._check(event, plan)

    def _check(self, event: ev.RoundArrived | ev.WaveArrived | ev.PrepareWave, plan: JoinPlan | None) -> None:
        silent_s = event.now - self._heard_at
        if plan is not None and silent_s > plan.silence_ms / 1e3:
            what = f"obeyed a {type(event).__name__} {silent_s:.3f} s after it last heard its controller"
            raise Violation("fence", f"stage {self._stage} {what}")
        if isinstance(event, ev.PrepareWave):
            return
        epoch = (event.round if isinstance(event, ev.RoundArrived) else event.command).fence.epoch
        if epoch < self._epoch:
            raise Violation("fence", f"stage {self._stage} obeyed epoch {epoch} after it had heard of {self._epoch}")


def _obeyed(actions: list[ev.Action]) -> bool:
    return any(isinstance(action, _OBEYED) for action in actions)
