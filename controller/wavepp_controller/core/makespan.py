"""The arithmetic of filling a pipeline (DESIGN.md): pure formulas for `plan_adaptive`.

All times in microseconds of the slowest stage. Stages in series whose times for a wave are alike take

    sum of all wave times + (P - 1) * the longest            n equal waves: (n + P - 1) (W / n + c)

so equal waves are best, c per wave is what cutting costs, and the longest wave, P - 1 times, what not cutting costs.
"""

from __future__ import annotations

from math import sqrt

from wavepp_proto.profile import StageCosts


def best_waves(work_us: float, overhead_us: float, stages: int) -> float:
    """n* = sqrt(W (P - 1) / c): how many waves an isolated piece of work is cut into, not rounded; at least 1."""
    if overhead_us <= 0.0:
        return float("inf") if stages > 1 else 1.0
    return max(1.0, sqrt(work_us * (stages - 1) / overhead_us))


def makespan_us(work_us: float, overhead_us: float, stages: int, waves: float) -> float:
    """(n + P - 1) (W / n + c)."""
    return (waves + stages - 1) * (work_us / waves + overhead_us)


def fewest_waves(work_us: float, overhead_us: float, stages: int, worse: float) -> float:
    """The smallest n, not rounded, whose makespan is at most `worse` (a part) longer than the least.

    Near its least the makespan is flat: with n*/k waves it grows by n* c (k + 1/k - 2).
    """
    best = best_waves(work_us, overhead_us, stages)
    if not 1.0 < best < float("inf"):
        return best
    half = 1.0 + worse * makespan_us(work_us, overhead_us, stages, best) / (2.0 * best * overhead_us)
    return max(1.0, best / (half + sqrt(half * half - 1.0)))


def tokens_for(costs: StageCosts, prefix: int, budget_us: float) -> float:
    """The x with b x + a (L x + x x / 2) + g L = budget, L being `prefix`; 0 if the prefix alone costs as much."""
    left = budget_us - costs.g_us * prefix
    if left <= 0.0:
        return 0.0
    linear = costs.b_us + costs.a_us * prefix
    root = sqrt(linear * linear + 2.0 * costs.a_us * left)
    return 2.0 * left / (linear + root) if root > 0.0 else float("inf")


def extra_prefix(start: int, tokens: int, cut: int, wave_tokens: int) -> int:
    """Prefix tokens that are read once more if a rest of `tokens` from `start` on first gives up a chunk of `cut`.

    Against chunks of M = `wave_tokens` from its start: every later chunk begins `cut` tokens further, and there may be
    one more of them.
    """
    whole, rest = -(-tokens // wave_tokens), -(-(tokens - cut) // wave_tokens)
    return start + _starts(start + cut, rest, wave_tokens) - _starts(start, whole, wave_tokens)


def _starts(first: int, chunks: int, step: int) -> int:
    return chunks * first + step * chunks * (chunks - 1) // 2
