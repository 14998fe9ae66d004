"""What a plan is asked: the workload that its options name, and how much of one can be played.

Owns the limits of `simulate plan` and the choice among closed loop, rate and trace. Every refusal names field,
value and limit. `plan_command` has the options' words, `planning_load` plays what comes out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from wavepp.bench.cells import read_trace
from wavepp_proto import limits, workload
from wavepp_proto.errors import InvalidRequest
from wavepp_proto.profile import Profile
from wavepp_proto.workload import Trace, Workload
from wavepp_simulator.planning import LONGEST_S

ARRIVALS = 256
"""Of a rate, where nobody says how many: tails are told by the last one in twenty, and it plays in seconds."""
MOST_REPLICAS = 64
MOST_SLOTS = 32 * limits.MAX_LANES
"""Of a closed loop: all lanes of that many pipelines; more only wait longer."""
MOST_REQUESTS = 1_000_000
MOST_SPEED = 1e9
MOST_ROUND_MS = float(limits.ROUND_DEADLINE_MS)
"""Stages that take longer count as silent in the real system."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The options that make a workload, as they were given."""

    family: str
    lengths: str
    concurrency: int
    seed: int
    prompt_tokens: int | None
    rate: float | None
    trace: Path | None
    speed: float
    minutes: float | None
    requests: int | None
    seconds: float | None

    def check(self, profile: Profile) -> None:
        """Raises InvalidRequest naming the first that nobody could play."""
        if bool(self.family) == (self.trace is not None):
            raise InvalidRequest("give either --family or --trace", field="family", value=self.family)
        at_most("concurrency", self.concurrency, MOST_SLOTS)
        at_most("prompt_tokens", self.prompt_tokens, profile.window)
        at_most("requests", self.requests, MOST_REQUESTS)
        at_most("seconds", self.seconds, LONGEST_S)
        at_most("speed", self.speed, MOST_SPEED)

    def workload(self) -> Workload:
        """Raises InvalidRequest where nobody arrives, or somebody after all that can be played."""
        if self.trace is not None:
            return self._playable("trace", self._cut(read_trace(self.trace)))
        closed = workload.family(self.family, self.lengths, self.concurrency, self.seed, self.prompt_tokens)
        if self.rate is None:
            return closed
        if (most_s := self._extent_s) is None:
            return self._playable("rate", workload.first_arrivals(closed, self.rate, self.requests or ARRIVALS))
        return self._playable("rate", self._cut(workload.poisson(closed, self.rate, most_s)))

    @property
    def _extent_s(self) -> float | None:
        """How much of an open loop is played; None: as much as there is, or `ARRIVALS` of a rate."""
        return self.seconds if self.seconds is not None or self.minutes is None else self.minutes * 60

    def _cut(self, whole: Trace) -> Trace:
        cut = whole if self._extent_s is None else whole.first(self._extent_s)
        return replace(cut, arrivals=cut.arrivals[: self.requests])

    def _playable(self, field: str, drawn: Trace) -> Trace:
        value = str(self.trace if self.rate is None else self.rate)
        if not drawn.arrivals:
            raise InvalidRequest("nobody arrives in that time", field=field, value=value)
        drawn = drawn.faster(self.speed)
        if (last := drawn.arrivals[-1].at_s) > LONGEST_S:
            raise InvalidRequest(
                f"the last request of {value} arrives after {last:g} s; at most {LONGEST_S:g} s are played",
                field="last_arrival_s", value=last, limit=LONGEST_S,
            )  # fmt: skip
        return drawn


def at_most(field: str, value: float | None, most: float) -> None:
    """Options have their least in typer, which would not tell the most as a field. Raises InvalidRequest."""
    if value is not None and value > most:
        raise InvalidRequest(f"{field} is at most {most:,g}, got {value}", field=field, value=value, limit=most)
