"""Many seeds, over several processes: what they add up to, and the first that broke an invariant.

Owns the totals. A worker plays its seeds one after the other and sends back numbers and, for a failing seed,
its plan: histories themselves do not travel. The first failing seed ends the campaign.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from wavepp_simulator.explore import History, explore

LOT = 4
"""Seeds that a worker plays between two answers."""


@dataclass(slots=True)
class Totals:
    seeds: int = 0
    requests: int = 0
    events: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    reuse: Counter[str] = field(default_factory=Counter)
    """Counts of `omniscient.Omniscient`."""
    counters: Counter[str] = field(default_factory=Counter)
    """Of all controllers, summed."""

    def as_data(self) -> dict[str, Any]:
        """For JSON."""
        counts = {"seeds": self.seeds, "requests": self.requests, "events": self.events}
        return {
            **counts,
            "outcomes": dict(self.outcomes),
            "reuse": dict(self.reuse),
            "counters": dict(sorted(self.counters.items())),
        }

    def add(self, other: Totals) -> None:
        self.seeds += other.seeds
        self.requests += other.requests
        self.events += other.events
        self.outcomes.update(other.outcomes)
        self.reuse.update(other.reuse)
        self.counters.update(other.counters)


@dataclass(frozen=True, slots=True)
class Failure:
    seed: int
    violation: str


Lot = tuple[Totals, Failure | None]


def run(first: int, seeds: int, requests: int, jobs: int, progress: Callable[[int], None] = lambda seeds: None) -> Lot:
    """Play `seeds` seeds from `first` on; `progress` hears of each lot."""
    totals = Totals()
    for lot, failure in _lots(first, seeds, requests, jobs):
        totals.add(lot)
        progress(lot.seeds)
        if failure is not None:
            return totals, failure
    return totals, None


def _lots(first: int, seeds: int, requests: int, jobs: int) -> Iterator[Lot]:
    lots = [range(at, min(at + LOT, first + seeds)) for at in range(first, first + seeds, LOT)]
    play = partial(play_lot, requests=requests)
    if jobs == 1:
        yield from map(play, lots)
        return
    with ProcessPoolExecutor(jobs) as pool:
        try:
            yield from pool.map(play, lots)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def play_lot(seeds: range, requests: int) -> Lot:
    totals = Totals()
    for seed in seeds:
        history = explore(seed, requests)
        totals.add(_totals_of(history))
        if history.violation is not None:
            return totals, Failure(seed, str(history.violation))
    return totals, None


def _totals_of(history: History) -> Totals:
    world = history.world
    counters = Counter[str]()
    for controller in (*world.deposed, world.controller):
        counters.update(controller.machine.status(requests=False).counters)
    outcomes, reuse = Counter(history.outcomes()), Counter(world.omniscient.counts)
    return Totals(1, len(world.clients.every), history.events, outcomes, reuse, counters)
