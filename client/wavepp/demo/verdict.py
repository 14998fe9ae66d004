"""What the demo claims, and whether it holds: every answer exact, one stage limiting, a sound timeline.

Owns the comparison with the unsplit model and the rules of success. Pure: results and logits in, rows
and failures out. Shown by `report.py`, called by `story.py`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wavepp._types import PrefillResult
from wavepp.demo.prompts import DemoPrompt
from wavepp_proto.runtime.timeline import TimelineSummary

LOGIT_TOLERANCE = 1e-4
"""Largest |logit - unsplit logit| that counts as exact, in float32. One changed token of the prompt moves 1e-2."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt as the cluster answered it."""

    pass_number: int
    """From 1."""
    prompt: DemoPrompt
    result: PrefillResult
    text: str
    """The first token as text."""

    @property
    def is_limited(self) -> bool:
        """Some stage could have reused more than what all agreed on, and the one that could not is named."""
        return self.result.endpoint < self.result.best_stage_hit and self.result.limiting_stage is not None

    @property
    def waited_ms(self) -> float:
        """Part of the admission that was waiting: for its turn, for room in some pool, for a shared prefix."""
        timings = self.result.timings
        return timings.queue_ms + timings.capacity_wait_ms + timings.sharing_wait_ms


@dataclass(frozen=True, slots=True)
class Row:
    """An answer beside the unsplit model's."""

    answer: Answer
    expected_token: int
    max_logit_delta: float
    """Infinite if the shapes differ or a logit is no number."""

    @property
    def token_is_equal(self) -> bool:
        return self.answer.result.first_token == self.expected_token

    @property
    def is_exact(self) -> bool:
        return self.token_is_equal and self.max_logit_delta <= LOGIT_TOLERANCE


@dataclass(frozen=True, slots=True)
class Percentiles:
    p50: float
    p99: float


def compare(answers: Sequence[Answer], unsplit: npt.NDArray[np.float32]) -> list[Row]:
    """Rows in the order of `answers`; `unsplit` is float32 [len(answers), vocabulary]."""
    return [
        Row(answer, int(np.argmax(expected)), _max_delta(answer.result.logits, expected))
        for answer, expected in zip(answers, unsplit, strict=True)
    ]


def failures(rows: Sequence[Row], timeline: TimelineSummary, stages: int, judge_exactness: bool) -> list[str]:
    """What does not hold, in words; empty if the demo succeeded."""
    found = []
    if judge_exactness:
        found += [
            f"{row.answer.prompt.title}: token {row.answer.result.first_token} where the unsplit model says "
            f"{row.expected_token}, logits differ by up to {row.max_logit_delta:.2e}"
            for row in rows
            if not row.is_exact
        ]
    if not any(row.answer.is_limited for row in rows):
        found.append("no endpoint lay below a stage's own hit, although the pools were sized for it")
    found += [
        f"{row.answer.prompt.title}: {row.answer.result.cached_tokens} tokens cached, endpoint "
        f"{row.answer.result.endpoint}"
        for row in rows
        if row.answer.result.cached_tokens != row.answer.result.endpoint
    ]
    if len(timeline.stages) != stages:
        found.append(f"the timeline has {len(timeline.stages)} stage tracks for {stages} stages")
    if timeline.admissions != len(rows):
        found.append(f"the timeline shows {timeline.admissions} admissions of {len(rows)} requests")
    return found


def percentiles(values: Sequence[float]) -> Percentiles:
    """Median and the value that 99 % do not exceed (nearest rank)."""
    ordered = sorted(values)
    return Percentiles(statistics.median(ordered), ordered[-(-99 * len(ordered) // 100) - 1])


def _max_delta(got: npt.NDArray[np.float32] | None, expected: npt.NDArray[np.float32]) -> float:
    if got is None or got.shape != expected.shape:
        return float("inf")
    delta = float(np.max(np.abs(got - expected)))
    return delta if np.isfinite(delta) else float("inf")
