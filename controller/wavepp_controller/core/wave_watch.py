"""Whether a stage still gets on with the wave that it has (DESIGN.md, failures).

Owns the time that one wave may take on one daemon, counted from when that daemon has it: a wave that fills the
pipeline, or queues behind slow ones, ages nowhere. Two things can stop: the engine, which the heartbeat tells (the
executing wave, and since when on the daemon's own clock), and what a wave needs before it can be executed. Fed with
heartbeats by `hearing`, which ends the formation.

    sent, reported by the stage before ──▶ waits (wave_timeout_ms) ──▶ executing (limit_s) ──▶ reported
"""

from __future__ import annotations

from dataclasses import dataclass

from wavepp_controller.core.config import ControllerConfig
from wavepp_controller.core.formation import Daemon
from wavepp_controller.core.latency_model import LatencyModel
from wavepp_controller.core.ring import Flight, Ring
from wavepp_controller.core.stage_model import FIRST_FIT, demand_of
from wavepp_proto import limits
from wavepp_proto.terms import Heartbeat, WaveOrdinal

SLACK = 4.0
"""Times its prediction by which a wave may exceed it, at least `hang_s` and at most `wave_timeout_ms`."""


@dataclass(frozen=True, slots=True)
class Overdue:
    """A wave that a daemon has for too long."""

    wave: WaveOrdinal
    executing: bool
    """Else it waits for something, though the stage before has done it."""
    spent_s: float
    limit_s: float


class WaveWatch:
    def __init__(self, ring: Ring, model: LatencyModel, config: ControllerConfig) -> None:
        self._ring, self._model = ring, model
        self._floor_s, self._most_s = config.hang_s, config.wave_timeout_ms / 1e3
        self._first_s = None if config.first_wave_ms is None else config.first_wave_ms / 1e3

    def overdue(self, daemon: Daemon, beat: Heartbeat, now: float) -> Overdue | None:
        """What this heartbeat says of a wave that takes too long; None as long as the daemon gets on."""
        executing = None if beat.executing_wave is None else self._ring.flight(beat.executing_wave)
        if executing is not None:
            daemon.waits = None
            spent_s, limit_s = beat.executing_ms / 1e3, self.limit_s(daemon, executing)
            return Overdue(executing.ordinal, True, spent_s, limit_s) if spent_s > limit_s else None
        waits = self._waits(daemon, beat, now)
        if waits is not None and now - waits[1] > self._most_s:
            return Overdue(waits[0], False, now - waits[1], self._most_s)
        return None

    def _waits(self, daemon: Daemon, beat: Heartbeat, now: float) -> tuple[WaveOrdinal, float] | None:
        """Which wave the daemon could execute and does not, and since when."""
        flight = self._ring.next_of(daemon.key)
        if flight is None or beat.executing_wave is not None or not self._has_input(daemon, flight):
            daemon.waits = None
        elif daemon.waits is None or daemon.waits[0] != flight.ordinal:
            daemon.waits = (flight.ordinal, now)
        return daemon.waits

    def limit_s(self, daemon: Daemon, flight: Flight) -> float:
        """How long the daemon's engine may take for a wave: what is predicted and a slack. For the first of a
        formation, and until enough was learnt, the engine itself predicts; what the operator allows has no slack."""
        learnt = self._model.stage(daemon.key)
        predicted_s = 0.0 if learnt is None else learnt.costs.demand_us(demand_of(flight.rows)) / 1e6
        if learnt is None or learnt.samples < FIRST_FIT or not daemon.waves_done:
            if self._first_s is not None:
                return max(self._first_s, predicted_s + min(SLACK * predicted_s, self._most_s))
            told_ms = None if daemon.reply is None else daemon.reply.wave_allowance_ms
            predicted_s = max(predicted_s, (limits.FIRST_WAVE_MS if told_ms is None else told_ms) / 1e3)
        return predicted_s + max(self._floor_s, min(SLACK * predicted_s, self._most_s))

    def _has_input(self, daemon: Daemon, flight: Flight) -> bool:
        """Whether every rank of the stage before is done with the wave: the first stage's input is the wave itself."""
        return not any(key.stage == daemon.key.stage - 1 for key in flight.waiting_for)
