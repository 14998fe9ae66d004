"""Make a failing plan short: fewer acts, then a simpler cluster, then fewer acts again.

Owns the search (delta debugging) and its bound. A candidate counts if it breaks the same invariant; which
other way it differs does not matter. Plays plans through `explore`, prints nothing.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from wavepp_simulator.console import CommandError
from wavepp_simulator.explore import History, play
from wavepp_simulator.ledger import Violation
from wavepp_simulator.plan import Act, Plan

PLAYS = 600
"""Most histories that one search plays."""
SECONDS = 60.0
"""No history is begun later than this after the search began: some take long to fail."""
KIND_CHARS = 60
"""So much of a violation's words must be alike."""
SIMPLER = {
    "jitter": "0",
    "latency_us": "200",
    "token_us": "10",
    "wave_ms": "1",
    "attempts": "1",
    "lanes": "128",
    "floor_blocks": "0",
    "max_queued_requests": "1024",
    "round_deadline_ms": "1000",
    "join_deadline_ms": "120000",
    "capacity_retry_ms": "100",
    "copy_us": "100",
    "copy_failures": "0",
    "seed": "0",
    "check_every": "1",
}
"""Settings as the `cluster` command has them by itself: the simplest is not to name them."""
BY_DAEMON = ("pools", "host")
BY_STAGE = (*BY_DAEMON, "groups")


class _Search:
    def __init__(self, failing: History, plays: int) -> None:
        self.best = failing
        self._left = plays
        self._until = time.monotonic() + SECONDS
        assert failing.violation is not None, "only a failing history shrinks"
        self._wanted = _kind(failing.violation)

    def accept(self, plan: Plan) -> bool:
        """True if the plan fails alike; it is the best from then on."""
        if self._left <= 0 or time.monotonic() > self._until or plan == self.best.plan:
            return False
        self._left -= 1
        try:
            history = play(plan)
        except CommandError:
            return False
        if history.violation is None or _kind(history.violation) != self._wanted:
            return False
        self.best = history
        return True

    def fewer_acts(self) -> None:
        """Drop runs of acts, half of them at first, single ones at last."""
        size = max(1, len(self.best.plan.acts) // 2)
        while size:
            at = 0
            while at < len(self.best.plan.acts):
                acts = self.best.plan.acts
                if not self.accept(replace(self.best.plan, acts=acts[:at] + acts[at + size :])):
                    at += size
            size //= 2

    def simpler(self, candidates: Callable[[Plan], Iterator[Plan]]) -> None:
        """Take the first candidate that still fails, as often as there is one."""
        while any(self.accept(plan) for plan in candidates(self.best.plan)):
            pass


def _kind(violation: Violation) -> str:
    """What was broken, without names and numbers."""
    return re.sub(r"[\w.]*\d[\w.]*", "#", str(violation))[:KIND_CHARS]


def shrink(failing: History, plays: int = PLAYS) -> History:
    """The shortest history found that breaks the same invariant."""
    search = _Search(failing, plays)
    broke_at_us = int(failing.world.agenda.now * 1e6)
    search.accept(replace(failing.plan, acts=tuple(act for act in failing.plan.acts if act.at_us <= broke_at_us)))
    search.fewer_acts()
    search.simpler(_simpler_clusters)
    search.simpler(_simpler_acts)
    search.fewer_acts()
    return search.best


def _simpler_clusters(plan: Plan) -> Iterator[Plan]:
    options = plan.options
    ranks, stages = int(options.get("ranks", "1")), len(options["pools"].split(","))
    if ranks > 1:
        first = {name: ",".join(options[name].split(",")[::ranks]) for name in BY_DAEMON if name in options}
        yield _with(plan, {**{key: value for key, value in options.items() if key != "ranks"}, **first})
    elif stages > 1:
        for gone in range(stages):
            cut = {name: _without(options[name], gone) for name in BY_STAGE if name in options}
            yield _with(plan, {**options, **cut})
    for name in ("host", "groups", "states"):
        yield _with(plan, {key: value for key, value in options.items() if key != name})
    for name in options.keys() & SIMPLER.keys():
        yield _with(plan, {key: value for key, value in options.items() if key != name})


def _simpler_acts(plan: Plan) -> Iterator[Plan]:
    """Options of submissions that do not matter, and times in whole milliseconds."""
    for at, act in enumerate(plan.acts):
        words = act.line.split()
        for extra in [word for word in words if word.startswith(("deadline_ms=", "priority="))]:
            yield _replaced(plan, at, Act(act.at_us, " ".join(word for word in words if word != extra)))
        if act.at_us % 1000:
            yield _replaced(plan, at, Act(act.at_us // 1000 * 1000, act.line))


def _replaced(plan: Plan, at: int, act: Act) -> Plan:
    return replace(plan, acts=(*plan.acts[:at], act, *plan.acts[at + 1 :]))


def _without(values: str, gone: int) -> str:
    return ",".join(value for place, value in enumerate(values.split(",")) if place != gone)


def _with(plan: Plan, options: dict[str, str]) -> Plan:
    return replace(plan, cluster=tuple(options.items()))
