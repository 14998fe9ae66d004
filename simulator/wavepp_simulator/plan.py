"""One history before it happens: a cluster and what is done to it, when.

A plan is data and text at once. Its text is a scenario: `script.play` and `wavepp simulate run` replay it,
so a failing seed can be kept as a story. Owns no chance (`draw` does) and no playing (`explore`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Act:
    """One command of `console`, at a moment."""

    at_us: int
    """Microseconds after the cluster began to serve."""
    line: str

    @property
    def text(self) -> str:
        return f"at {self.at_us / 1000:g}ms {self.line}"


@dataclass(frozen=True, slots=True)
class Plan:
    cluster: tuple[tuple[str, str], ...]
    """Options of the `cluster` command."""
    acts: tuple[Act, ...]
    """In order of time."""

    @property
    def options(self) -> dict[str, str]:
        return dict(self.cluster)

    @property
    def commands(self) -> list[str]:
        """Everything that is done, in order; the last mends what is broken and waits until all has ended."""
        first = "cluster " + " ".join(f"{name}={value}" for name, value in self.cluster)
        return [first, *(act.text for act in self.acts), "settle"]

    def scenario(self, why: str) -> str:
        """A text that `script.play` understands; `why` becomes its head line."""
        return "\n".join([f"# {why}", *self.commands]) + "\n"


def plan_of(options: dict[str, str], acts: list[Act]) -> Plan:
    return Plan(tuple(options.items()), tuple(sorted(acts, key=lambda act: act.at_us)))
