"""What a planned deployment did, in numbers: throughput, latencies, busy stages, the share of the bound, hits, waves.

Pure: a run in, a JSON-ready dict out. Called by `simulate plan` and the report of the paper's tables.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Any

from wavepp_proto.errors import InvalidRequest
from wavepp_proto.profile import Profile, StageCosts
from wavepp_proto.terms import Row
from wavepp_proto.workload import GOOD_HIT, PAPER_GOOD_HIT, Trace
from wavepp_simulator.bounds import least_s, reusable, slowest, useful_us
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
    """Units are in the names; `input` tokens include cached ones. InvalidRequest if no time was measured."""
    done = [one for one in played.measured if not one.failure]
    seconds = played.end - played.start
    if seconds <= 0:
        raise InvalidRequest("what was asked took no time", field="measured_s", value=seconds, limit=0)
    best = [(one.prompt.tokens, max(one.cached_tokens, reusable(profile, one.prompt))) for one in done]
    bound_s = least_s(profile, best) / replicas
    really_s = least_s(profile, ((one.prompt.tokens, one.cached_tokens) for one in done)) / replicas
    tokens = sum(one.prompt.tokens for one in done)
    found = [one for one in done if one.prompt.reusable_tokens]
    return {
        "requests": len(done),
        "failed": len(played.measured) - len(done),
        "measured_s": round(seconds, 4),
        "input_tokens_per_s": round(tokens / seconds, 1),
        "computed_tokens_per_s": round((tokens - sum(one.cached_tokens for one in done)) / seconds, 1),
        "work_of_bound": _work_s(profile, played) / seconds / replicas,
        "bound_tokens_per_s": round(tokens / bound_s, 1) if bound_s else None,
        "fraction_of_bound": round(bound_s / seconds, 4),
        "fraction_of_bound_as_hit": round(really_s / seconds, 4),
        "completion_s": percentiles(_took(one) for one in done),
        "completion_s_by_kind": _by_kind(done),
        "admission_ms": percentiles((one.admitted_at - one.at) * 1e3 for one in done if one.admitted_at is not None),
        "rounds_ms": percentiles(one.rounds_ms for one in done),
        "good_hit_rate": _good_hits(found, GOOD_HIT),
        "good_hit_rate_80": _good_hits(found, PAPER_GOOD_HIT),
        "reused_share": round(sum(one.cached_tokens for one in done) / tokens, 4) if tokens else None,
        "stage_busy": {name: round(_busy(ran, played) / seconds, 4) for name, ran in played.ran.items()},
        "waves": _waves(played),
        "order_by_kind": _order(profile, played, done),
        "copied_blocks": played.copied_blocks,
    }


def arrivals_of_bound(profile: Profile, asked: Trace, replicas: int) -> float | None:
    """Time that the slowest stage needs at least for what arrives, over the time in which it does; above 1 the line
    grows as long as it goes on. None where all arrive at once."""
    if not asked.arrivals or not (seconds := asked.arrivals[-1].at_s):
        return None
    works = ((one.prompt.tokens, reusable(profile, one.prompt)) for one in asked.arrivals)
    return round(least_s(profile, works) / seconds / replicas, 4)


def _work_s(profile: Profile, played: Played) -> float:
    """Seconds of the slowest stage of every replica that were worth their time, see `bounds`."""
    place = slowest(profile)
    costs, most = profile.stages[place].costs, profile.wave_tokens
    worth = 0.0
    for name, ran in played.ran.items():
        if not name.endswith(f"/{place}.0"):
            continue
        for wave in ran:
            share = _within(wave, played) / (wave.end_s - wave.start_s) if wave.end_s > wave.start_s else 0.0
            if share:
                worth += share * sum(_useful_us(costs, most, profile, played, row) for row in wave.rows)
    return worth / 1e6


def _useful_us(costs: StageCosts, wave_tokens: int, profile: Profile, played: Played, row: Row) -> float:
    """What is computed again although an endless cache would have it is worth nothing."""
    asked = played.asked[row.key.request_id]
    cached = reusable(profile, asked.prompt)
    start, end = max(row.start, cached), row.start + row.length
    work = (asked.prompt.tokens, max(cached, asked.cached_tokens))
    return useful_us(costs, wave_tokens, work, start, end - start) if end > start else 0.0


def _within(wave: Ran, played: Played) -> float:
    """Seconds of the wave in the measured time."""
    return max(0.0, min(wave.end_s, played.end) - max(wave.start_s, played.start))


def _took(one: Asked) -> float:
    return (one.ended_at or one.at) - one.at


def _good_hits(done: Sequence[Asked], share: float) -> float | None:
    hits = [bool(one.prompt.good_hit(one.cached_tokens, share)) for one in done]
    return round(sum(hits) / len(hits), 4) if hits else None


def _order(profile: Profile, played: Played, done: Sequence[Asked]) -> dict[str, dict[str, float]]:
    """By kind: waves that began on the first stage between a prompt's arrival and its first one, and how many times as
    many waves it lasted as it needs at least."""
    rows: dict[str, list[int]] = {}
    begun: dict[str, list[float]] = {}
    for name, ran in played.ran.items():
        if name.endswith("/0.0"):
            begun[name] = [wave.start_s for wave in ran]
            for at, wave in enumerate(ran):
                for row in wave.rows:
                    rows.setdefault(f"{name} {row.key.request_id}", []).append(at)
    waited: dict[str, list[float]] = {}
    lasted: dict[str, list[float]] = {}
    asked_by = {id(one): name for name, one in played.asked.items()}
    for one in done:
        for stage, starts in begun.items():
            if own := rows.get(f"{stage} {asked_by[id(one)]}"):
                kind, least = one.prompt.kind, -(-(one.prompt.tokens - one.cached_tokens) // profile.wave_tokens)
                waited.setdefault(kind, []).append(max(0, own[0] - bisect_right(starts, one.at)))
                lasted.setdefault(kind, []).append((own[-1] - own[0] + 1) / least)
    return {
        kind: {
            "waited_waves_p50": percentiles(waited[kind])["p50"],
            "waited_waves_most": max(waited[kind]),
            "stretch_mean": percentiles(lasted[kind])["mean"],
            "stretch_most": round(max(lasted[kind]), 4),
        }
        for kind in sorted(waited)
    }


def _by_kind(done: Sequence[Asked]) -> dict[str, dict[str, float]]:
    kinds = sorted({one.prompt.kind for one in done})
    if len(kinds) < 2:
        return {}
    return {kind: percentiles(_took(one) for one in done if one.prompt.kind == kind) for kind in kinds}


def _busy(ran: Sequence[Ran], played: Played) -> float:
    """Seconds of the measured time in which a wave ran."""
    return sum(_within(wave, played) for wave in ran)


def _waves(played: Played) -> dict[str, Any]:
    """Of the first stage of every replica, in the measured time."""
    first = [ran for name, ran in played.ran.items() if name.endswith("/0.0")]
    waves = [wave for ran in first for wave in ran if played.start < wave.end_s <= played.end]
    if not waves:
        return {"count": 0}
    return {
        "count": len(waves),
        "tokens": percentiles((float(wave.tokens) for wave in waves), 1),
        "rows_mean": round(sum(len(wave.rows) for wave in waves) / len(waves), 2),
        "milliseconds": percentiles(((wave.end_s - wave.start_s) * 1e3 for wave in waves), 2),
    }
