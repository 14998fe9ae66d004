"""What makes the demo succeed or fail, and how its outcome is told."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from wavepp import PrefillResult
from wavepp.demo import report
from wavepp.demo.prompts import DemoPrompt
from wavepp.demo.screen import Screen
from wavepp.demo.verdict import Answer, Percentiles, compare, failures, percentiles
from wavepp_proto.runtime.timeline import TimelineSummary
from wavepp_proto.terms import StageIndex, Timings

TIMINGS = Timings(queue_ms=2, capacity_wait_ms=5, sharing_wait_ms=1.5, admission_ms=12.5, prefill_ms=40)
LOGITS = np.array([0.5, 3.0, -1.0, 2.0], dtype="<f4")


def result(**changes: Any) -> PrefillResult:
    fields: dict[str, Any] = {
        "request_id": "r", "pipeline": "p", "first_token": 1, "prompt_tokens": 100, "cached_tokens": 64,
        "endpoint": 64, "candidate": 64, "limiting_stage": StageIndex(1), "best_stage_hit": 96, "rounds": 1,
        "attempt": 1, "waves": 1, "timings": TIMINGS,
        "elapsed_ms": 60.0, "logits_bytes": LOGITS.tobytes(), "trace_id": "0" * 32,
    }  # fmt: skip
    return PrefillResult(**(fields | changes))


def answer(**changes: Any) -> Answer:
    return Answer(1, DemoPrompt("bakery 1", (1, 2, 3), False), result(**changes), "The")


def timeline(stages: int = 4, admissions: int = 1) -> TimelineSummary:
    titles = tuple(f"pipeline p: stage {stage}" for stage in range(stages))
    return TimelineSummary(titles, dict.fromkeys(titles, 3), dict.fromkeys(titles, 1.0), {}, 1, admissions, admissions)


def judged(one: Answer, expected: Any = LOGITS, **changes: Any) -> list[str]:
    rows = compare([one], np.stack([expected]))
    return failures(rows, changes.pop("timeline", timeline()), stages=4, judge_exactness=changes.pop("judge", True))


def test_nothing_fails_when_logits_are_equal_and_a_stage_limits() -> None:
    assert judged(answer()) == []


def test_prompt_is_named_when_a_logit_is_off_by_more_than_the_tolerance() -> None:
    (failure,) = judged(answer(), LOGITS + np.array([0, 0, 3e-4, 0], dtype=np.float32))
    assert failure.startswith("bakery 1: token 1 where the unsplit model says 1, logits differ by up to 3.0")


def test_nothing_fails_when_logits_differ_within_the_tolerance() -> None:
    assert judged(answer(), LOGITS + np.float32(5e-5)) == []


def test_prompt_is_named_when_the_first_token_is_another() -> None:
    (failure,) = judged(answer(first_token=3))
    assert failure.startswith("bakery 1: token 3 where the unsplit model says 1")


@pytest.mark.parametrize(
    "logits_bytes",
    [b"", LOGITS[:3].tobytes(), np.array([0, np.nan, 0, 0], dtype="<f4").tobytes()],
    ids=["none", "short", "nan"],
)
def test_prompt_is_inexact_when_its_logits_cannot_be_compared(logits_bytes: bytes) -> None:
    (row,) = compare([answer(logits_bytes=logits_bytes)], np.stack([LOGITS]))
    assert not row.is_exact
    assert row.max_logit_delta == float("inf")


def test_exactness_is_not_judged_when_told_so() -> None:
    assert judged(answer(first_token=3), judge=False) == []


@pytest.mark.parametrize(
    "changes", [{"best_stage_hit": 64}, {"limiting_stage": None}], ids=["all equal", "nobody named"]
)
def test_demo_fails_when_no_stage_limits(changes: dict[str, Any]) -> None:
    (failure,) = judged(answer(**changes))
    assert "no endpoint lay below" in failure


def test_demo_fails_when_cached_tokens_are_not_the_endpoint() -> None:
    assert judged(answer(cached_tokens=32)) == ["bakery 1: 32 tokens cached, endpoint 64"]


def test_demo_fails_when_the_timeline_lacks_a_stage_or_an_admission() -> None:
    assert judged(answer(), timeline=timeline(stages=3)) == ["the timeline has 3 stage tracks for 4 stages"]
    assert judged(answer(), timeline=timeline(admissions=0)) == ["the timeline shows 0 admissions of 1 requests"]


@pytest.mark.parametrize(
    ("values", "expected"),
    [([7.0], (7.0, 7.0)), ([3.0, 1.0, 2.0], (2.0, 3.0)), ([float(n) for n in range(1, 201)], (100.5, 198.0))],
)
def test_percentiles_are_median_and_nearest_rank_when_computed(
    values: list[float], expected: tuple[float, float]
) -> None:
    assert percentiles(values) == Percentiles(*expected)


# --- telling -------------------------------------------------------------------------------------


def test_table_has_a_line_a_prompt_when_shown() -> None:
    again = replace(answer(), pass_number=2, prompt=DemoPrompt("bakery 1", (1, 2, 3), True), text="[b]")
    out = io.StringIO()
    Screen(Console(file=out)).show(report.table(compare([answer(), again], np.stack([LOGITS, LOGITS]))))
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.getvalue().splitlines() if "│" in line]
    assert cells == [
        ["1", "bakery 1", "100", "64", "64", "96", "stage 1", "12.5", "8.5", "40", "'The'", "0.0e+00", "yes"],
        ["2", "bakery 1 (again)", "100", "64", "64", "96", "stage 1", "12.5", "8.5", "40", "'[b]'", "0.0e+00", "yes"],
    ]  # fmt: skip


def test_summary_counts_computed_and_reused_tokens_when_told() -> None:
    rows = compare([answer(), answer(cached_tokens=0, endpoint=0)], np.stack([LOGITS, LOGITS]))
    lines = report.summary(rows, report.Totals.of(rows, seconds=2.0), block_tokens=32, judged=True)
    assert lines[0] == ("200 prompt tokens in 2.0 s: 100 tokens/s, 136 computed (68 tokens/s) and 64 reused (32%)")
    assert lines[1] == (
        "admission p50 12.5 ms, p99 12.5 ms; "
        "without the waiting for turn, room and shared prefixes p50 4.0 ms, p99 4.0 ms"
    )


def test_json_is_plain_json_when_logits_could_not_be_compared() -> None:
    rows = compare([answer(logits_bytes=b"")], np.stack([LOGITS]))
    found = report.as_json(rows, report.Totals.of(rows, 1.0), ["it failed"], {"model": "m"})
    told = json.loads(json.dumps(found, allow_nan=False))
    assert (told["model"], told["ok"], told["failures"]) == ("m", False, ["it failed"])
    assert told["prompts"][0]["max_logit_delta"] is None
    assert told["totals"]["computed_tokens"] == 36


def test_phase_tells_its_end_when_it_fails() -> None:
    out = io.StringIO()
    screen = Screen(Console(file=out))
    with pytest.raises(ZeroDivisionError), screen.phase("counting"):
        _ = 1 // 0
    assert out.getvalue().startswith("== counting\n-- counting: ")
    assert out.getvalue().endswith(" s FAILED\n")
    assert list(screen.phases) == ["counting"]
