"""The report of the paper's tables: ours beside the paper's figures, the share of the bound, the ablation.

Owns what is compared and the Markdown; `paper_html` has the page. Pure: results in, text out. The paper's figures
come with the profiles (their provenance), as they were fitted to.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.bench.paper_cells import COMBINATIONS, ORACLE, PROFILES, profile_of
from wavepp_proto import workload

Result = dict[str, Any]
WINNER, RIVAL = "overlapped+adaptive", "lockstep+fixed"
NAMES = tuple(f"{mode}+{policy}" for mode, policy in COMBINATIONS)
BAR_OF_ORACLE = 0.97
"""For 8 slots and more."""
WORSE = 0.99
"""Adaptive may not be below this share of mpu or fixed in any cell."""
TITLES = {
    "glm": "GLM 5.2, PP4 on 4 x B300",
    "minimax": "MiniMax M2.7, PP4 on 4 x B300",
    "k3": "Kimi K3, PP8 on 8 x GB300",
}
RUNGS = {
    ("k3", "short_cold", 131_072, 16): {"R1 naive": 8_826, "R2 wave transport": 29_692},
    ("k3", "short_reuse", 131_072, 8): {"R2 wave transport": 96_796, "R3 leases, escrows": 149_021, "R4 mpu": 211_214},
    ("k3", "long_reuse", 262_144, 32): {"R3 leases, escrows": 175_305, "R4 mpu": 158_238},
}
"""The paper's ablation (arXiv 2609.35263v1, eight stages of B300: other devices than this profile's), tokens/s."""


class Place(NamedTuple):
    """A cell of a model."""

    model: str
    family: str
    tokens: int
    concurrency: int

    def __str__(self) -> str:
        return f"{self.model} {self.family} {self.tokens} c={self.concurrency}"


@dataclass(frozen=True, slots=True)
class Row:
    """One cell: the paper's figures and ours, tokens per second."""

    place: Place
    paper: dict[str, int]
    """By system."""
    bound: float
    ours: dict[str, Result]
    """By mode+policy, `oracle` among them."""

    def speed(self, name: str) -> float | None:
        return self.ours[name]["tokens_per_s"] if name in self.ours else None

    def share(self, name: str) -> float | None:
        return self.ours[name]["result"]["work_of_bound"] if name in self.ours else None

    def ratio(self, name: str, other: str) -> float | None:
        ours, theirs = self.speed(name), self.speed(other)
        return ours / theirs if ours and theirs else None

    def p95(self, name: str) -> float | None:
        return self.ours[name]["result"]["completion_s"].get("p95") if name in self.ours else None

    @property
    def wins(self) -> bool | None:
        """None while one of the two is missing."""
        ratio = self.ratio(WINNER, RIVAL)
        return None if ratio is None else ratio > 1.0


class Tables:
    def __init__(self, results: Iterable[Result]) -> None:
        self.cells: dict[Place, Row] = {}
        self.round_ms: dict[str, float] = {}
        for result in results:
            row = self._row(result)
            name = ORACLE[0] if result["mode"] == ORACLE[0] else f"{result['mode']}+{result['policy']}"
            row.ours[name] = result
            self.round_ms[result["model"]] = result["round_ms"]

    def _row(self, result: Result) -> Row:
        cell = workload.Cell(**result["cell"])
        model = result["model"]
        family = workload.family(cell.family, model, cell.concurrency, tokens=cell.tokens)
        tokens = max(family.prompt(number).tokens for number in range(4))
        place = Place(model, cell.family, tokens, cell.concurrency)
        if place not in self.cells:
            self.cells[place] = Row(place, paper_figures(place), result["bound"], {})
        return self.cells[place]

    def of(self, model: str) -> list[Row]:
        return [row for place, row in self.cells.items() if place.model == model]

    def lost(self) -> list[str]:
        """Cells in which the default does not beat the comparison."""
        return [
            f"{row.place}: {percent(row.ratio(WINNER, RIVAL))} of {RIVAL}" for row in self.rows if row.wins is False
        ]

    @property
    def rows(self) -> list[Row]:
        return list(self.cells.values())


def paper_figures(place: Place) -> dict[str, int]:
    """Tokens per second by system, of the cell that the profile was fitted to."""
    known = profile_of(place.model).provenance["residuals"]
    return {
        one["system"]: one["tokens_per_s"]
        for one in known
        if (one["family"], one["c"]) == (place.family, place.concurrency)
        and max(shape[0] for shape in one["shapes"]) == place.tokens
    }


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def percent(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value * 100:.{digits}f} %"


def columns(model: str) -> list[str]:
    systems = sorted({one["system"] for one in profile_of(model).provenance["residuals"]})
    paper = [f"paper: {system}" for system in systems]
    ours = [part for name in NAMES for part in (name, "of bound")]
    return [
        "family",
        "tokens",
        "c",
        *paper,
        "wavepp of bound",
        "bound",
        *ours,
        "oracle of bound",
        "won by",
        "of oracle",
    ]


def cells(row: Row) -> list[str]:
    systems = sorted({one["system"] for one in profile_of(row.place.model).provenance["residuals"]})
    wavepp = row.paper.get("wavepp")
    ours = [text for name in NAMES for text in (number(row.speed(name)), percent(row.share(name)))]
    won = row.ratio(WINNER, RIVAL)
    return [
        row.place.family,
        str(row.place.tokens),
        str(row.place.concurrency),
        *(number(row.paper.get(system)) for system in systems),
        percent(wavepp / row.bound if wavepp else None),
        number(row.bound),
        *ours,
        percent(row.share(ORACLE[0])),
        "-" if won is None else f"{(won - 1) * 100:+.2f} %",
        percent(row.ratio(WINNER, ORACLE[0])),
    ]


def findings(tables: Tables) -> list[str]:
    """Every bar that is missed, in a line with its cause in numbers."""
    found: list[str] = []
    for row in tables.rows:
        told = f"{row.place}: "
        if row.wins is False:
            found.append(told + f"{WINNER} has {percent(row.ratio(WINNER, RIVAL), 2)} of {RIVAL}")
        if row.place.concurrency >= 8 and (share := row.ratio(WINNER, ORACLE[0])) is not None and share < BAR_OF_ORACLE:
            found.append(told + f"{percent(share)} of the oracle; " + cause(row, WINNER))
        for other in ("overlapped+mpu", "overlapped+fixed"):
            if (share := row.ratio(WINNER, other)) is not None and share < WORSE:
                found.append(told + f"{percent(share)} of {other}; {cause(row, WINNER)}; {other}: {cause(row, other)}")
        mine, theirs = row.p95(WINNER), row.p95("overlapped+fixed")
        if row.place.family == "mixed" and mine is not None and theirs is not None and mine > theirs:
            found.append(told + f"p95 completion {mine:.2f} s, fixed {theirs:.2f} s")
    return found


def cause(row: Row, name: str) -> str:
    """What its waves were like."""
    result = row.ours[name]["result"]
    waves, busy = result["waves"], list(result["stage_busy"].values())
    return (
        f"{waves['count']} waves of {waves['tokens']['mean']:,.0f} tokens and {waves['rows_mean']} rows, "
        f"stages busy {min(busy):.0%} to {max(busy):.0%}, admission p95 {result['admission_ms'].get('p95', 0):.1f} ms"
    )


def ablation(tables: Tables) -> tuple[list[str], list[list[str]]]:
    """Geometric means over a family's cells, each combination over the one before."""
    rows = []
    for model in PROFILES:
        for family in dict.fromkeys(row.place.family for row in tables.of(model)):
            chosen = [row for row in tables.of(model) if row.place.family == family]
            means = [_mean([speed for row in chosen if (speed := row.speed(name))]) for name in NAMES]
            steps = [
                f"{number(mean)}" + (f" ({mean / before:.2f} x)" if mean and before else "")
                for before, mean in zip([None, *means], means, strict=False)
            ]
            rows.append([model, family, str(len(chosen)), *steps])
    return ["model", "family", "cells", *NAMES], rows


def rungs(tables: Tables) -> tuple[list[str], list[list[str]]]:
    rows = []
    for place, paper in RUNGS.items():
        row = tables.cells.get(Place(*place))
        if row is not None:
            told = "; ".join(f"{name} {number(speed)}" for name, speed in paper.items())
            rows.append([str(row.place), told, *(number(row.speed(name)) for name in NAMES)])
    return ["cell", "paper (8 x B300)", *NAMES], rows


def tails(tables: Tables) -> tuple[list[str], list[list[str]]]:
    """p95 completion of mixed cells."""
    chosen = [row for row in tables.rows if row.place.family == "mixed"]
    rows = [[str(row.place), *("-" if (p95 := row.p95(n)) is None else f"{p95:.2f}" for n in NAMES)] for row in chosen]
    return ["mixed cell, p95 completion (s)", *NAMES], rows


def _mean(values: Sequence[float]) -> float | None:
    return math.exp(sum(math.log(value) for value in values) / len(values)) if values else None


def about(tables: Tables) -> list[str]:
    rounds = ", ".join(f"{model} {ms:.2f} ms" for model, ms in tables.round_ms.items())
    return [
        "Input tokens per second, cached ones included, in virtual time: the real controller and stage cores on device "
        "profiles that were fitted to the paper's own figures. What ours shows is planning and admission on such a "
        "device, not a device: compare ours with ours, and shares of the bound with the paper's.",
        f"Every mode and policy pays the same: prepare rounds of {rounds} (measured by scripts/bench-admission on two "
        "cores; other messages take half of it), links as in the profile, hashing at 10 ns a token.",
        "The bound is the slowest stage with full waves and no idle time. Throughput is counted in work done during "
        "max(2c, 24) requests (mixed: 48 at least, cold: 32) after one warm-up round, so that a mixed cell does not depend on which "
        "prompts ended in that time. The oracle is the best of fixed budgets M, M/2, ... with free, instant admission.",
    ]


def markdown(tables: Tables, notes: Iterable[str]) -> str:
    won = [row for row in tables.rows if row.wins]
    lines = ["# The paper's tables, in virtual time", "", *about(tables), "", *notes, ""]
    lines += [f"{WINNER} beats {RIVAL} in {len(won)} of {len(tables.rows)} cells.", ""]
    for model in PROFILES:
        if rows := tables.of(model):
            lines += [f"## {TITLES[model]}", "", *table(columns(model), [cells(row) for row in rows]), ""]
    for title, (head, body) in (
        ("Ablation: geometric mean over a family's cells", ablation(tables)),
        ("The paper's rungs", rungs(tables)),
        ("Tails", tails(tables)),
    ):
        if body:
            lines += [f"## {title}", "", *table(head, body), ""]
    missed = findings(tables)
    lines += ["## Bars that are missed", "", *([f"- {line}" for line in missed] or ["None."]), ""]
    return "\n".join(lines)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *rows)]
