"""The one check for staleness on a stage, before any handler (STYLE.md, habit 3).

Owns which part of the fence each event is held to; the comparison itself is wavepp_proto.fence.
"""

from __future__ import annotations

from wavepp_proto.errors import StaleMessage
from wavepp_proto.fence import Standing, check_epoch, check_fence
from wavepp_stage.core import events as ev


def check_event(event: ev.Event, standing: Standing) -> None:
    """Raise StaleMessage unless `event` speaks to what this stage is now."""
    match event:
        case ev.InventoryAsked():
            check_epoch(event.fence, standing)
        case ev.JoinAsked():
            check_epoch(event.plan.fence, standing)
        case ev.Announced():
            check_fence(event.frame.fence, standing)
        case ev.RoundArrived():
            check_fence(event.round.fence, standing)
        case ev.WaveArrived():
            check_fence(event.command.fence, standing)
        case ev.FormationEnd():
            check_fence(event.fence, standing)
        case ev.ReleaseArrived():
            check_fence(event.fence, standing, formation=False)
        case ev.PrepareWave() | ev.WaveRetired():
            _check_executor(event.formation, standing)
        case ev.ExecutorStopped():
            pass  # speaks of its own formation, whichever is in service


def _check_executor(formation: int | None, standing: Standing) -> None:
    if formation not in (None, standing.formation):
        raise StaleMessage(
            "the wave's formation has ended", field="formation", value=formation, limit=standing.formation
        )
