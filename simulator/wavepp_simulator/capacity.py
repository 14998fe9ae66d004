"""How many pipelines a load needs: the fewest replicas with which completion times hold, found in virtual time.

Owns the search; one run is `planning_load`'s. More replicas never make a prompt wait longer for its turn, so the
number doubles until the target holds, and is halved in between. Called by `simulate plan`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Needed:
    replicas: int | None
    """None: not even the most that were allowed hold it."""
    tried: dict[int, dict[str, Any]]
    """Results by replicas, ascending."""


def fewest(run: Callable[[int], dict[str, Any]], p95_s: float, most: int) -> Needed:
    """`run` gives the result (`planning_result`) of so many replicas; each number is run once at most."""
    tried: dict[int, dict[str, Any]] = {}

    def holds(replicas: int) -> bool:
        result = tried[replicas] = run(replicas)
        completion = result["completion_s"]
        return not result["failed"] and bool(completion) and completion["p95"] <= p95_s

    low, high = 0, 1
    while not holds(high):
        if high == most:
            return Needed(None, dict(sorted(tried.items())))
        low, high = high, min(most, 2 * high)
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle
    return Needed(high, dict(sorted(tried.items())))
