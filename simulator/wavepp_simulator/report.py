"""What an exploration says in the end: its totals, or the story of the seed that failed.

Owns the wording. Plays a failing seed again, whole or made short, because histories stay with the worker
that played them.
"""

from __future__ import annotations

from wavepp_simulator.campaign import Totals
from wavepp_simulator.explore import History, explore
from wavepp_simulator.shrink import shrink
from wavepp_simulator.story import KINDS


def totals_in_words(totals: Totals, seconds: float) -> str:
    """Several lines: how much was played, how requests ended, how admission compares with omniscience."""
    ends = ", ".join(f"{name.lower()} {count}" for name, count in sorted(totals.outcomes.items()))
    reuse, counters = totals.reuse, totals.counters
    return "\n".join(
        [
            f"{totals.seeds} seeds, {totals.requests} requests, {totals.events} events, no violation "
            f"({totals.events / seconds:,.0f} events/s, {totals.seeds / seconds * 60:,.0f} seeds/min)",
            f"requests: {ends}",
            f"admissions {reuse['admissions']}: {reuse['equal']} at the endpoint of an omniscient cache, the others "
            f"lost {reuse['tokens_lost']} of {reuse['tokens_possible']} reusable tokens",
            f"compared with the truth: hints {reuse['hints']}, indexes {reuse['indexes']}, "
            f"endpoints {reuse['held_to_truth']}",
            f"waited behind the same prefix {counters['shared_requests']}: {counters['shared_tokens']} tokens saved, "
            f"{counters['sharing_wait_ms'] / 1e3:.1f} s waited; streams opened again {counters['streams_reopened']}",
        ]
    )


def failing_seed(seed: int, requests: int, shrinks: bool, last_lines: int | None) -> str:
    """The story of a failing seed: of a short plan that fails alike, with its scenario, or its own last lines."""
    history = explore(seed, requests)
    if not shrinks or history.violation is None:
        return _story(history, last_lines)
    short = shrink(history)
    scenario = short.plan.scenario(f"seed {seed}, made short: {short.violation}")
    return f"{_story(short, last_lines)}\n\n{scenario}"


def _story(history: History, last_lines: int | None) -> str:
    lines = list(history.world.story.lines(0, KINDS - {"tick", "beat"}))
    return "\n".join(lines if last_lines is None else lines[-last_lines:])
