"""How the demo's outcome looks: a table and totals for a person, the same as JSON for a program.

Owns wording and layout only; what is exact and what failed is decided in `verdict.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from wavepp.demo.verdict import LOGIT_TOLERANCE, Row, percentiles

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = (
    "pass", "prompt", "tokens", "cached", "endpoint", "best stage hit", "limiting stage", "admission ms",
    "of it waiting", "prefill ms", "first token", "|Δlogit| max", "exact",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over all prompts."""

    prompts: int
    prompt_tokens: int
    cached_tokens: int
    seconds: float
    """Wall time of the passes alone, from the first request to the last answer."""

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens

    @classmethod
    def of(cls, rows: Sequence[Row], seconds: float) -> Totals:
        results = [row.answer.result for row in rows]
        return cls(len(rows), sum(r.prompt_tokens for r in results), sum(r.cached_tokens for r in results), seconds)


def table(rows: Sequence[Row]) -> Table:
    """One line a prompt, a rule between passes."""
    from rich.table import Table
    from rich.text import Text

    shown = Table(*COLUMNS)
    for column in shown.columns[2:10] + shown.columns[11:12]:
        column.justify = "right"
    shown.columns[1].no_wrap = True
    for row, after in zip(rows, [*rows[1:], None], strict=True):
        answer, result = row.answer, row.answer.result
        last_of_pass = after is None or after.answer.pass_number != answer.pass_number
        shown.add_row(
            str(answer.pass_number),
            answer.prompt.title + (" (again)" if answer.prompt.asked_before else ""),
            str(result.prompt_tokens), str(result.cached_tokens), str(result.endpoint), str(result.best_stage_hit),
            f"stage {result.limiting_stage}" if answer.is_limited else "-",
            f"{result.timings.admission_ms:.1f}", f"{answer.waited_ms:.1f}", f"{result.timings.prefill_ms:.0f}",
            Text(repr(answer.text)), f"{row.max_logit_delta:.1e}", "yes" if row.is_exact else "NO",
            end_section=last_of_pass,
        )  # fmt: skip
    return shown


def summary(rows: Sequence[Row], totals: Totals, block_tokens: int, judged: bool) -> list[str]:
    """Totals in a few lines."""
    admission = percentiles([row.answer.result.timings.admission_ms for row in rows])
    work = percentiles([row.answer.result.timings.admission_ms - row.answer.waited_ms for row in rows])
    equal = sum(row.token_is_equal for row in rows)
    exact = sum(row.is_exact for row in rows)
    limited = sum(row.answer.is_limited for row in rows)
    worst = max(row.max_logit_delta for row in rows)
    rate = totals.prompt_tokens / totals.seconds
    lines = [
        f"{totals.prompt_tokens} prompt tokens in {totals.seconds:.1f} s: {rate:.0f} tokens/s, "
        f"{totals.computed_tokens} computed ({totals.computed_tokens / totals.seconds:.0f} tokens/s) "
        f"and {totals.cached_tokens} reused ({totals.cached_tokens / totals.prompt_tokens:.0%})",
        f"admission p50 {admission.p50:.1f} ms, p99 {admission.p99:.1f} ms; "
        f"without the waiting for turn, room and shared prefixes p50 {work.p50:.1f} ms, p99 {work.p99:.1f} ms",
        f"{limited} of {totals.prompts} endpoints lay below what some stage could have reused",
        f"{equal} of {totals.prompts} first tokens equal the unsplit model's, {exact} with every logit within "
        f"{LOGIT_TOLERANCE:g} (largest difference {worst:.2e})"
        + ("" if judged else "; reported, not judged, in this dtype"),
    ]
    return lines + [_asked_again(row, block_tokens) for row in rows if row.answer.prompt.asked_before]


def _asked_again(row: Row, block_tokens: int) -> str:
    result = row.answer.result
    most = (result.prompt_tokens - 1) // block_tokens * block_tokens
    return (
        f"{row.answer.prompt.title}, asked again word for word: {result.cached_tokens} of at most {most} tokens cached"
    )


def as_json(rows: Sequence[Row], totals: Totals, failed: Sequence[str], context: Mapping[str, Any]) -> dict[str, Any]:
    """Everything the demo found; `context` says where and with what it ran."""
    admission = percentiles([row.answer.result.timings.admission_ms for row in rows])
    return {
        **context,
        "ok": not failed,
        "failures": list(failed),
        "totals": asdict(totals) | {"computed_tokens": totals.computed_tokens},
        "admission_ms": asdict(admission),
        "prompts": [_row_json(row) for row in rows],
    }


def _row_json(row: Row) -> dict[str, Any]:
    result = row.answer.result
    return {
        "pass": row.answer.pass_number,
        "prompt": row.answer.prompt.title,
        "asked_before": row.answer.prompt.asked_before,
        "prompt_tokens": result.prompt_tokens,
        "cached_tokens": result.cached_tokens,
        "endpoint": result.endpoint,
        "candidate": result.candidate,
        "best_stage_hit": result.best_stage_hit,
        "limiting_stage": result.limiting_stage,
        "rounds": result.rounds,
        "waves": result.waves,
        "timings": asdict(result.timings),
        "first_token": result.first_token,
        "first_text": row.answer.text,
        "expected_token": row.expected_token,
        # JSON has no infinity, which stands for logits that cannot be compared
        "max_logit_delta": row.max_logit_delta if math.isfinite(row.max_logit_delta) else None,
        "exact": row.is_exact,
        "trace_id": result.trace_id,
    }
