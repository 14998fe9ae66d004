"""What one `handle` call wants done, gathered in order.

Owns the list of actions and the counters that `status` shows. Every part of the controller core is
given the one outbox of its machine; the machine empties it at the end of each event.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from wavepp_controller.core.events import Action


@dataclass(slots=True)
class Outbox:
    actions: list[Action] = field(default_factory=list)
    counters: Counter[str] = field(default_factory=Counter)
    """Since this controller started, by name."""

    def send(self, *actions: Action) -> None:
        self.actions.extend(actions)

    def count(self, name: str, by: int = 1) -> None:
        self.counters[name] += by

    def drain(self) -> list[Action]:
        actions, self.actions = self.actions, []
        return actions
