"""What a network does to single messages: lose, repeat and swap them, by count or by chance.

Owns the rules, by wire name or by a prefix of it that ends at a slash, and how often each struck. gRPC does
none of this to a living stream; the protocol claims to survive it all the same, and a stream that broke with a
message under way looks to its reader like a loss. Whole connections are `Network` and `mishaps`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from random import Random


class Strike(Enum):
    DROP = "drop"  # never arrives
    DUPLICATE = "duplicate"  # arrives twice, the second time right behind the first
    REORDER = "reorder"  # arrives behind the next message of its wire


@dataclass(slots=True)
class _Rule:
    left: int
    """Messages still to be struck; a rule by chance has none."""
    chance: float


class WireFaults:
    def __init__(self, rng: Random, tell: Callable[[str], None]) -> None:
        """`tell` hears of every strike in words."""
        self._rng, self._tell = rng, tell
        self._rules: dict[tuple[str, Strike], _Rule] = {}

    def set(self, wire: str, strike: Strike, count: int = 0, chance: float = 0.0) -> None:
        """Strike the next `count` messages of `wire`, or each by `chance`; neither ends the rule."""
        if count or chance:
            self._rules[wire, strike] = _Rule(count, chance)
        else:
            self._rules.pop((wire, strike), None)

    @property
    def active(self) -> bool:
        return bool(self._rules)

    def clear(self) -> None:
        self._rules.clear()

    def strike(self, name: str) -> Strike | None:
        """What happens to the next message of the wire `name`; None if nothing does."""
        if not self._rules:
            return None
        for (wire, strike), rule in self._rules.items():
            if covers(wire, name) and self._strikes(wire, strike, rule):
                self._tell(f"{name} {_WORDS[strike]} a message")
                return strike
        return None

    def _strikes(self, wire: str, strike: Strike, rule: _Rule) -> bool:
        if not rule.left:
            return self._rng.random() < rule.chance
        rule.left -= 1
        if not rule.left:
            del self._rules[wire, strike]
        return True


_WORDS = {Strike.DROP: "loses", Strike.DUPLICATE: "repeats", Strike.REORDER: "holds back"}


def covers(wire: str, name: str) -> bool:
    """`c>s1` covers itself and `c>s1/rounds`."""
    return name == wire or name.startswith(wire + "/")
