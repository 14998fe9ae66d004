"""What follows from the votes on one request (DESIGN.md, reconcile).

Owns the rule that turns what every daemon holds into one decision, and the explanation of the endpoint
that the `Admitted` event carries. Pure: nothing is sent from here.

    some daemon has no room, or does not know the request   ──▶ GiveUp (release on all)
    all committed at one endpoint                           ──▶ Agreed
    else: minimum over all, revise whoever holds more or is not committed there ──▶ Lower

It only ever lowers: each Lower either lowers the minimum or leaves fewer daemons uncommitted, so it ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from wavepp_controller.core.attempt import Held
from wavepp_controller.core.request_table import RequestInput
from wavepp_proto.terms import DaemonKey, StageIndex, Vote, VoteOutcome


@dataclass(frozen=True, slots=True)
class GiveUp:
    given: RequestInput
    """RUN_SHORT or NOT_ANNOUNCED."""
    daemons: tuple[DaemonKey, ...]
    """Who said so."""


@dataclass(frozen=True, slots=True)
class Agreed:
    endpoint: int


@dataclass(frozen=True, slots=True)
class Lower:
    endpoint: int
    daemons: tuple[DaemonKey, ...]
    """Who holds more, or is not committed: they are revised in the next round."""


Decision = GiveUp | Agreed | Lower


def held_after(vote: Vote) -> Held:
    return Held(vote.endpoint, vote.outcome is VoteOutcome.COMMITTED)


def decide(votes: Mapping[DaemonKey, Vote], held: Mapping[DaemonKey, Held]) -> Decision:
    """`votes` of the round just answered; `held` of ALL daemons, those votes included."""
    unknown = tuple(key for key, vote in votes.items() if vote.outcome is VoteOutcome.NOT_ANNOUNCED)
    if unknown:
        return GiveUp(RequestInput.NOT_ANNOUNCED, unknown)
    short = tuple(key for key, vote in votes.items() if vote.outcome in (VoteOutcome.NO_CAPACITY, VoteOutcome.NO_HOLD))
    if short:
        return GiveUp(RequestInput.RUN_SHORT, short)
    endpoint = min(hold.endpoint for hold in held.values())
    behind = tuple(key for key, hold in sorted(held.items()) if not hold.committed or hold.endpoint > endpoint)
    return Lower(endpoint, behind) if behind else Agreed(endpoint)


def limiting_stage(own_hits: Mapping[StageIndex, int]) -> StageIndex | None:
    """The first stage with the smallest own hit, if another could have reused more."""
    if len(set(own_hits.values())) < 2:
        return None
    return min(own_hits, key=lambda stage: (own_hits[stage], stage))
