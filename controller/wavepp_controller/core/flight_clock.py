"""When a stage will have done with the waves in flight, as far as is predicted.

Owns when each stage reported each of the last waves. Fed with every report of one formation, in each daemon's order:
the n-th report of a daemon is that of wave n. Predictions come from the latency model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from wavepp_controller.core.planning import InFlight
from wavepp_proto.terms import DaemonKey

REMEMBERED = 256
"""Reports of one stage: more than a ring of 64 stages holds waves."""


class FlightClock:
    def __init__(self) -> None:
        self._counts: dict[DaemonKey, int] = {}
        self._done: dict[int, int] = {}
        """Waves that every daemon of a stage has reported."""
        self._ends: dict[int, deque[float]] = {}
        """When the last of those were, by stage; the newest last."""

    def reported(self, key: DaemonKey, now: float) -> None:
        stage = int(key.stage)
        self._counts[key] = self._counts.get(key, 0) + 1
        done = min(count for other, count in self._counts.items() if other.stage == stage)
        if done > self._done.get(stage, 0):
            self._done[stage] = done
            self._ends.setdefault(stage, deque(maxlen=REMEMBERED)).append(now)

    def free_at(
        self, stage: int, in_flight: Sequence[InFlight], took_s: Callable[[int, InFlight], float], now: float
    ) -> float:
        """When `stage` has computed every wave in flight; `took_s` tells a stage's time for a wave (seconds)."""
        arrived = [flight.sent_at for flight in in_flight]
        free = now
        for place in range(stage + 1):
            done, ends = self._done.get(place, 0), self._ends.get(place)
            free = ends[-1] if ends else 0.0
            for number, flight in enumerate(in_flight):
                if ends and flight.ordinal <= done:
                    arrived[number] = ends[max(-len(ends), flight.ordinal - done - 1)]
                    continue
                free = max(free, arrived[number]) + took_s(place, flight)
                arrived[number] = free = max(free, now)  # not reported yet: late, whatever was predicted
        return free
