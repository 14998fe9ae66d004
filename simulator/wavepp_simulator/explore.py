"""Play one plan to its end, or to the first broken invariant; every event is checked.

Owns what a played history is. Commands are carried out by the same `console` that scenarios use, so the text
of a plan replays to the same events. What is played is drawn by `draw`, many seeds at once by `campaign`.
"""

from __future__ import annotations

from dataclasses import dataclass

from wavepp_simulator import outcomes
from wavepp_simulator.console import Console
from wavepp_simulator.draw import draw
from wavepp_simulator.ledger import Violation
from wavepp_simulator.plan import Plan
from wavepp_simulator.world import World


@dataclass(slots=True)
class History:
    """One plan, played."""

    plan: Plan
    console: Console
    violation: Violation | None = None

    @property
    def world(self) -> World:
        return self.console.world

    @property
    def events(self) -> int:
        return self.world.events

    def outcomes(self) -> dict[str, int]:
        """How many requests ended in which way."""
        return outcomes.counted(self.world)


def play(plan: Plan) -> History:
    """The violation, if any, is in the result, with the world as it was then. Raises CommandError for a plan that
    commands what its cluster does not have."""
    history = History(plan, Console(kinds=frozenset()))
    try:
        for command in plan.commands:
            history.console.obey(command)
    except Violation as violation:
        history.violation = violation
    return history


def explore(seed: int, requests: int) -> History:
    """Draw and play one seed."""
    return play(draw(seed, requests))
