"""What a cell's requests add up to: percentiles, throughput, hits, failures.

Owns the arithmetic from samples to a summary. Knows no clock and no client: `asking.py` makes the samples,
`load.py` says which of them count, `run.py` puts summaries into the cell's document.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from wavepp_proto.workload import GOOD_HIT


class Sample(NamedTuple):
    """One request that ended. Times are seconds after the cell's load began."""

    number: int
    """Of its prompt in the workload, from 0."""
    kind: str
    """warm or cold where the workload holds both; may be empty."""
    due_s: float
    """When it was to be sent; completion time counts from here, so that an overloaded sender hides nothing."""
    sent_s: float
    ended_s: float
    prompt_tokens: int
    reusable_tokens: int
    """What an endless cache would have had of it."""
    cached_tokens: int = 0
    admission_ms: float = 0.0
    """Measured on the controller."""
    waves: int = 0
    attempt: int = 0
    reason: str = ""
    """Why it failed; empty if it did not."""

    @property
    def completion_ms(self) -> float:
        return 1e3 * (self.ended_s - self.due_s)

    @property
    def hit_well(self) -> bool | None:
        """Whether at least `GOOD_HIT` of what could be reused was; None where nothing could."""
        return self.cached_tokens >= GOOD_HIT * self.reusable_tokens if self.reusable_tokens else None


class Percentiles(NamedTuple):
    """Nearest rank: each is a value that was measured."""

    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The measured part of a cell; rates over `seconds`, latencies of finished requests alone (None: there is none)."""

    finished: int
    failed: Mapping[str, int]
    """Requests by reason."""
    seconds: float
    input_tokens_per_s: float
    """Prompt tokens answered, cached ones included."""
    computed_tokens_per_s: float
    """The same without cached ones."""
    requests_per_s: float
    completion_ms: Percentiles | None
    admission_ms: Percentiles | None
    completion_ms_by_kind: Mapping[str, Percentiles]
    """Empty unless there are several kinds."""
    good_hit_rate: float | None
    """Share of the requests with something to reuse that reused at least `GOOD_HIT` of it; None: none had."""
    most_late_ms: float
    """Longest that a request was sent after it was due: beyond a few ms, the sender was the limit."""


def percentiles(values: Iterable[float]) -> Percentiles | None:
    """None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    return Percentiles(*(ordered[max(0, math.ceil(share * len(ordered) / 100) - 1)] for share in (50, 95, 99)))


def summarise(samples: Sequence[Sample], seconds: float) -> Summary:
    finished = [one for one in samples if not one.reason]
    tokens = sum(one.prompt_tokens for one in finished)
    cached = sum(one.cached_tokens for one in finished)
    hits = [one.hit_well for one in finished if one.hit_well is not None]
    return Summary(
        finished=len(finished),
        failed=dict(sorted(Counter(one.reason for one in samples if one.reason).items())),
        seconds=seconds,
        input_tokens_per_s=_rate(tokens, seconds),
        computed_tokens_per_s=_rate(tokens - cached, seconds),
        requests_per_s=_rate(len(finished), seconds),
        completion_ms=percentiles(one.completion_ms for one in finished),
        admission_ms=percentiles(one.admission_ms for one in finished),
        completion_ms_by_kind=_by_kind(finished),
        good_hit_rate=sum(hits) / len(hits) if hits else None,
        most_late_ms=max((1e3 * (one.sent_s - one.due_s) for one in samples), default=0.0),
    )


def _by_kind(samples: Sequence[Sample]) -> dict[str, Percentiles]:
    kinds = sorted({one.kind for one in samples})
    if len(kinds) < 2:
        return {}
    each = {kind: percentiles(one.completion_ms for one in samples if one.kind == kind) for kind in kinds}
    return {kind: found for kind, found in each.items() if found is not None}


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
