"""The one check for staleness on a stage, before any handler.

Owns which part of the fence each event is held to, and which events are worth nothing once the controller
has been silent for too long; the comparison itself is wavepp_proto.fence, the age silence.py's.
"""

from __future__ import annotations

from wavepp_proto.errors import StaleMessage
from wavepp_proto.fence import Standing, check_epoch, check_fence
from wavepp_proto.terms import Incarnation
from wavepp_stage.core import events as ev

OF_THE_CONTROLLER = (
    ev.ControllerHeard,
    ev.Announced,
    ev.RoundArrived,
    ev.WaveArrived,
    ev.ReleaseArrived,
    ev.PrepareWave,
)
"""What is done only because the present formation's controller wants it."""


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
        case ev.FormationEnd() | ev.ControllerHeard():
            check_fence(event.fence, standing)
        case ev.ReleaseArrived():
            check_fence(event.fence, standing, formation=False)
        case ev.PrepareWave() | ev.WaveRetired():
            _check_executor(event.formation, standing)
        case ev.Reincarnate():
            _check_successor(event.incarnation, standing)
        case ev.ExecutorStopped() | ev.CopiesEnded():
            pass  # they speak of what they were told to do, whichever formation is in service


def _check_executor(formation: int | None, standing: Standing) -> None:
    if formation not in (None, standing.formation):
        raise StaleMessage(
            "the wave's formation has ended", field="formation", value=formation, limit=standing.formation
        )


def _check_successor(incarnation: Incarnation, standing: Standing) -> None:
    """Controllers take the newest incarnation of a place for the living one."""
    if incarnation <= standing.incarnation:
        raise StaleMessage(
            "an incarnation is newer than the one before it",
            field="incarnation",
            value=incarnation,
            limit=standing.incarnation,
        )
