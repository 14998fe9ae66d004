"""What a planned deployment did, in numbers: throughput, latencies, busy stages, the share of the bound, hits, waves.

Pure: a run in, a JSON-ready dict out. Called by `simulate plan` and the report of the paper's tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from wavepp_proto.profile import Demand, Profile
from wavepp_simulator.planning_load import Asked, Played
from wavepp_simulator.timed_engine import Ran


def percentiles(values: Iterable[float], digits: int = 4) -> dict[str, float]:
    """Mean, median, p95 and p99; empty if there is no value."""
    ordered = sorted(values)
    if not ordered:
        return {}
    found = {f"p{share}": ordered[min(len(ordered) - 1, len(ordered) * share // 100)] for share in (50, 95, 99)}
    return {name: round(value, digits) for name, value in {"mean": sum(ordered) / len(ordered), **found}.items()}


def summarise(profile: Profile, played: Played, replicas: int = 1) -> dict[str, Any]:
    """Units are in the names; `input` tokens include cached ones."""
    done = [one for one in played.measured if not one.failure]
    seconds = played.end - played.start
    bound_s = _least_s(profile, ((_reusable(one, profile), one.prompt.tokens) for one in done)) / replicas
    really_s = _least_s(profile, ((one.cached_tokens, one.prompt.tokens) for one in done)) / replicas
    tokens = sum(one.prompt.tokens for one in done)
    hits = [hit for one in done if (hit := one.prompt.good_hit(one.cached_tokens)) is not None]
    return {
        "requests": len(done),
        "failed": len(played.measured) - len(done),
        "measured_s": round(seconds, 4),
        "input_tokens_per_s": round(tokens / seconds, 1),
        "computed_tokens_per_s": round((tokens - sum(one.cached_tokens for one in done)) / seconds, 1),
        "bound_tokens_per_s": round(tokens / bound_s, 1) if bound_s else None,
        "fraction_of_bound": round(bound_s / seconds, 4),
        "fraction_of_bound_as_hit": round(really_s / seconds, 4),
        "completion_s": percentiles(_took(one) for one in done),
        "completion_s_by_kind": _by_kind(done),
        "admission_ms": percentiles((one.admitted_at - one.at) * 1e3 for one in done if one.admitted_at is not None),
        "rounds_ms": percentiles(one.rounds_ms for one in done),
        "good_hit_rate": round(sum(hits) / len(hits), 4) if hits else None,
        "reused_share": round(sum(one.cached_tokens for one in done) / tokens, 4) if tokens else None,
        "stage_busy": {name: round(_busy(ran, played) / seconds, 4) for name, ran in played.ran.items()},
        "waves": _waves(played),
        "copied_blocks": played.copied_blocks,
    }


def _least_s(profile: Profile, asked: Iterable[tuple[int, int]]) -> float:
    """Seconds that the slowest stage needs at least for all (cached tokens, prompt tokens)."""
    demand = Demand(0.0, 0.0, 0.0, 0.0)
    for cached, tokens in asked:
        demand = demand.plus(Demand.of(tokens, cached, profile.wave_tokens))
    return max(stage.costs.demand_us(demand) for stage in profile.stages) / 1e6


def _took(one: Asked) -> float:
    return (one.ended_at or one.at) - one.at


def _reusable(one: Asked, profile: Profile) -> int:
    """What an endless cache would have given, at least what was really reused."""
    return max(one.cached_tokens, one.prompt.reusable_tokens // profile.block_tokens * profile.block_tokens)


def _by_kind(done: Sequence[Asked]) -> dict[str, dict[str, float]]:
    kinds = sorted({one.prompt.kind for one in done})
    if len(kinds) < 2:
        return {}
    return {kind: percentiles(_took(one) for one in done if one.prompt.kind == kind) for kind in kinds}


def _busy(ran: Sequence[Ran], played: Played) -> float:
    """Seconds of the measured time in which a wave ran."""
    return sum(max(0.0, min(wave.end_s, played.end) - max(wave.start_s, played.start)) for wave in ran)


def _waves(played: Played) -> dict[str, Any]:
    """Of the first stage of every replica, in the measured time."""
    first = [ran for name, ran in played.ran.items() if name.endswith("/0.0")]
    waves = [wave for ran in first for wave in ran if played.start < wave.end_s <= played.end]
    if not waves:
        return {"count": 0}
    return {
        "count": len(waves),
        "tokens": percentiles((float(wave.tokens) for wave in waves), 1),
        "rows_mean": round(sum(wave.rows for wave in waves) / len(waves), 2),
        "milliseconds": percentiles(((wave.end_s - wave.start_s) * 1e3 for wave in waves), 2),
    }
