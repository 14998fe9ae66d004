"""What a client may be told, given what was done to the cluster.

Owns the list of excuses: in a calm history only what the client itself brought about, after a fault also
what a fault explains, and never a bug. Called once everything has ended.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from wavepp_proto.terms import Failed
from wavepp_simulator.ledger import Violation

if TYPE_CHECKING:
    from wavepp_simulator.world import World

ALWAYS = frozenset({"CANCELLED", "DEADLINE_EXPIRED", "NEVER_FITS", "QUEUE_FULL", "DUPLICATE_REQUEST", "TOO_LATE"})
"""Outcomes that need no fault."""
AFTER_FAULTS = frozenset(
    {"STAGE_LOST", "FORMATION_ENDED", "PIPELINE_UNAVAILABLE", "CONTROLLER_UNAVAILABLE", "LINK_FAULT", "DRAINING"}
)

REPAIRS = ("formations_broken", "orphan_holds", "orphan_announcements", "lost_holds")
"""Counters of a controller that stay at 0 unless messages or processes were lost."""


def counted(world: World) -> dict[str, int]:
    """How many requests ended in which way."""
    names = Counter[str]()
    for asked in world.clients.every:
        outcome = asked.outcome
        names[outcome.error.reason if isinstance(outcome, Failed) else "FINISHED" if outcome else "WAITING"] += 1
    return dict(names)


def check(world: World) -> None:
    """Nobody may be told of a bug, nor of a fault that did not happen."""
    for asked in world.clients.every:
        outcome = asked.outcome
        if not isinstance(outcome, Failed):
            continue
        reason, name = outcome.error.reason, str(outcome.request_id)
        broken = name in world.broken_rows
        voided = (reason == "ROW_VOIDED" and (broken or world.copies_failed)) or (reason == "NON_FINITE" and broken)
        unlike = reason == "JOIN_REFUSED" and world.unlike
        if not (reason in ALWAYS or voided or unlike or (reason in AFTER_FAULTS and world.harmed)):
            raise Violation("outcome", f"{name} failed {reason}: {outcome.error.message}")
    counters = world.controller.machine.status().counters
    repairs = {name: counters[name] for name in REPAIRS if counters.get(name)}
    if repairs and not world.harmed:
        raise Violation("outcome", f"something had to be repaired though nothing was lost: {repairs}")
