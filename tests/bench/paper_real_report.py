"""The real clock's part of the report: measured cells beside their twins in virtual time and the paper's figures.

Owns the rows, the bars of this part and its Markdown and HTML. Pure: results in, text out. Results are
`paper_real_all`'s; the oracle and the paper's figures are those of the virtual half.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from statistics import median
from typing import Any

from tests.bench.paper_cells import ORACLE, PROFILES
from tests.bench.paper_findings import WORSE
from tests.bench.paper_report import (
    RIVAL,
    TITLES,
    WINNER,
    Place,
    Tables,
    number,
    paper_figures,
    percent,
    place_of,
    table,
)

Result = dict[str, Any]
AGREE = 0.03
"""Real and virtual throughput may be so far apart."""
BAR_OF_ORACLE = 0.95
"""For GLM's suffix4k cells."""
COLUMNS = (
    "family", "tokens", "c", "how", "paper: wavepp", "real", "of bound", "of oracle", "virtual", "real / virtual",
    "over lockstep", "completion s p50", "p95", "virtual p50", "p95", "admission ms p50", "p95", "requests", "in s",
    "others' CPU", "ours", "controller", "client",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RealRow:
    place: Place
    how: str
    """mode+policy"""
    real: Result
    twin: Result | None
    """The same cell in virtual time with as many requests."""
    paper: int | None
    oracle: float | None
    """Share of the bound, of the oracle."""
    over: float | None
    """Throughput over the rival's in the same cell."""

    @property
    def share(self) -> float:
        found: float = self.real["result"]["work_of_bound"]
        return found

    @property
    def of_oracle(self) -> float | None:
        return self.share / self.oracle if self.oracle else None

    @property
    def agreement(self) -> float | None:
        """Real over virtual throughput."""
        return None if self.twin is None else self.share / self.twin["result"]["work_of_bound"]

    @property
    def others(self) -> float | None:
        usage = self.real["usage"]
        return None if usage is None else usage["others"]

    @property
    def missed(self) -> list[str]:
        """Bars that this cell misses, in words."""
        found: list[str] = []
        if self.agreement is not None and abs(self.agreement - 1) > AGREE:
            found.append(f"{percent(self.agreement)} of virtual time (bar: within {AGREE:.0%})")
        judged = (self.place.model, self.place.family, self.how) == ("glm", "suffix4k", WINNER)
        if judged and self.of_oracle is not None and self.of_oracle < BAR_OF_ORACLE:
            found.append(f"{percent(self.of_oracle)} of the oracle (bar: {BAR_OF_ORACLE:.0%})")
        if self.how == WINNER and self.over is not None and self.over < WORSE:
            found.append(f"{percent(self.over)} of {RIVAL}")
        if self.real["failures"]:
            found.append(f"requests failed: {self.real['failures']}")
        return found


def rows(found: Iterable[tuple[Result, Result | None]], tables: Tables) -> list[RealRow]:
    """`found`: measured results, each with its twin's."""
    pairs = [(place_of(real), f"{real['mode']}+{real['policy']}", real, twin) for real, twin in found]
    speeds = {(place, how): real["tokens_per_s"] for place, how, real, _ in pairs}
    made: list[RealRow] = []
    for place, how, real, twin in pairs:
        virtual = tables.cells.get(place)
        paper = paper_figures(place).get("wavepp")
        rival = speeds.get((place, RIVAL))
        over = real["tokens_per_s"] / rival if rival and how != RIVAL else None
        made.append(RealRow(place, how, real, twin, paper, virtual.share(ORACLE[0]) if virtual else None, over))
    return made


def standing(found: Sequence[RealRow]) -> str:
    compared = [ratio for row in found if (ratio := row.agreement) is not None]
    if not compared:
        return "Nothing was measured on the real clock."
    agree = sum(abs(ratio - 1) <= AGREE for ratio in compared)
    return (
        f"Real over virtual throughput: {percent(min(compared))} to {percent(max(compared))}, median "
        f"{percent(median(compared))}; within {AGREE:.0%} in {agree} of {len(compared)} measurements."
    )


def findings(found: Iterable[RealRow]) -> list[str]:
    """Every bar that is missed, with what the machine was doing and what a request waited for."""
    return [f"{row.place}, {row.how}: {'; '.join(missed)}; {_around(row)}" for row in found if (missed := row.missed)]


def _around(row: RealRow) -> str:
    waves, phases = row.real["result"]["waves"], row.real["phases_ms"]
    busy = row.real["result"]["stage_busy"].values()
    told = ", ".join(f"{name} {phases[name]:.1f}" for name in ("hash", "announce", "pin_reserve") if name in phases)
    others = "" if row.others is None else f"others took {row.others:.0%} of the CPU, "
    return (
        f"{others}stages busy {min(busy):.0%} to {max(busy):.0%}, {waves['count']} waves of "
        f"{waves['milliseconds']['mean']:.0f} ms, ms of a request: {told}"
    )


def about() -> list[str]:
    return [
        "The real controller, stage daemons and gRPC on this machine, with emulated devices at speed 1 that take the "
        "profile's time. Every measurement has a cluster of its own; prefixes to be reused are computed once through "
        "it, then one round warms up, then at least two rounds and 30 s are measured. Waves are the stages' own "
        "records, counted as in virtual time; virtual is the same cell with the same prompts, as many of them, and "
        "the same rule for where measuring begins and ends.",
        f"Measurements of one cell differ by some tenths of a percent: {WINNER} misses a bar below {percent(WORSE)} of "
        f"{RIVAL}.",
        "CPU: others' and ours are shares of all cores; controller and client (load generator) are cores.",
    ]


def cells(row: RealRow) -> list[str]:
    real, usage = row.real["result"], row.real["usage"] or {}
    twin = None if row.twin is None else row.twin["result"]
    cores = usage.get("cores", {})
    return [
        row.place.family, f"{row.place.tokens:,}", str(row.place.concurrency), row.how, number(row.paper),
        number(row.real["tokens_per_s"]), percent(row.share), percent(row.of_oracle),
        number(None if twin is None else twin["work_of_bound"] * row.real["bound"]), percent(row.agreement),
        "-" if row.over is None else f"{row.over:.3f} x",
        *_two(real["completion_s"], 2), *_two(twin["completion_s"] if twin else {}, 2), *_two(real["admission_ms"], 1),
        str(real["requests"]), f"{real['measured_s']:.1f}", percent(row.others), percent(usage.get("ours")),
        *(f"{cores[name]:.2f}" if name in cores else "-" for name in ("controller", "client")),
    ]  # fmt: skip


def _two(values: dict[str, float], digits: int) -> list[str]:
    return [f"{values[name]:,.{digits}f}" if name in values else "-" for name in ("p50", "p95")]


def markdown(found: Sequence[RealRow], notes: Sequence[str]) -> str:
    lines = ["", "# The real clock", "", *about(), "", *notes, "", standing(found), ""]
    for model in PROFILES:
        if chosen := [cells(row) for row in found if row.place.model == model]:
            lines += [f"## {TITLES[model]}, real clock", "", *table(COLUMNS, chosen), ""]
    lines += [
        "## Bars that are missed on the real clock",
        "",
        *([f"- {line}" for line in findings(found)] or ["None."]),
    ]
    return "\n".join([*lines, ""])


def section(found: Sequence[RealRow], notes: Sequence[str]) -> str:
    """The same for the page."""
    parts = ["<h1>The real clock</h1>", *(f"<p>{escape(line)}</p>" for line in [*about(), *notes])]
    parts.append(f"<p><b>{escape(standing(found))}</b></p>")
    for model in PROFILES:
        if chosen := [row for row in found if row.place.model == model]:
            parts += [f"<h2>{escape(TITLES[model])}, real clock</h2>", _table(chosen)]
    missed = findings(found) or ["None."]
    parts += ["<h2>Bars that are missed on the real clock</h2><ul>", *(f"<li>{escape(one)}</li>" for one in missed)]
    return "".join([*parts, "</ul>"])


def _table(found: Sequence[RealRow]) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in COLUMNS)
    body = "".join(
        f"<tr class='{'behind' if row.missed else ''}'>"
        + "".join(f"<td>{escape(text)}</td>" for text in cells(row))
        + "</tr>"
        for row in found
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
