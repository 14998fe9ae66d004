"""What a wave planner is (DESIGN.md): one interface, pure and replayable, for every policy.

Owns the view that a policy decides from and the Protocol. A policy sees lanes, what is in flight and its own
memory of reports; equal calls give equal answers, byte for byte: no clock, no chance, no order of a set. Does
not own positions, lanes or the ring: `execution` does, and carries out what is decided here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from wavepp_controller.core.planner import Lane
from wavepp_proto.terms import DaemonKey, Row, StageTimes, WaveOrdinal


@dataclass(frozen=True, slots=True)
class InFlight:
    """One wave in the ring: sent, not reported by the last stage."""

    ordinal: WaveOrdinal
    rows: tuple[Row, ...]
    sent_at: float


@dataclass(frozen=True, slots=True)
class PlanView:
    """Everything one decision may depend on, besides what was observed."""

    now: float
    lanes: Sequence[Lane]
    """In the order in which they are to be served; at least one."""
    in_flight: Sequence[InFlight]
    stages: int
    """P."""
    ring: int
    """R: most waves in flight; at least one slot is free."""
    wave_tokens: int
    """M."""
    block_tokens: int
    max_rows: int
    more_soon: bool
    """A round is open or requests are ready: lanes may join within a round trip."""


@dataclass(frozen=True, slots=True)
class Decision:
    rows: tuple[Row, ...] = ()
    """The next wave; empty to wait."""
    wait_until: float | None = None
    """With no rows: event time at which to ask again at the latest. Only while something is in flight."""


class Policy(Protocol):
    """A planner's policy, one object for each formation."""

    name: str

    def plan(self, view: PlanView) -> Decision:
        """The next wave, or to wait. Rows follow planner.WaveBudget's rules: interior ends on blocks, stops are
        ends, snapshots exactly once."""

    def observe(self, key: DaemonKey, rows: Sequence[Row], void_bitmap: int, times: StageTimes, now: float) -> None:
        """One stage's report of one wave."""
