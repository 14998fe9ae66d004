"""What the tables of the paper come to: bars that are missed and why, the ablation, the tails.

Owns the bars and the comparisons across cells; the cells themselves are in `paper_report`. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tests.bench.paper_cells import ORACLE, PROFILES
from tests.bench.paper_report import NAMES, RIVAL, WINNER, Place, Row, Tables, number, percent, told
from tests.bench.paper_timeline import Timeline, of

BAR_OF_ORACLE = 0.97
"""For 8 slots and more."""
WORSE = 0.99
"""Adaptive may not be below this share of mpu or fixed in any cell."""
RUNGS = {
    ("k3", "short_cold", 131_072, 16): {"R1 naive": 8_826, "R2 wave transport": 29_692},
    ("k3", "short_reuse", 131_072, 8): {"R2 wave transport": 96_796, "R3 leases, escrows": 149_021, "R4 mpu": 211_214},
    ("k3", "long_reuse", 262_144, 32): {"R3 leases, escrows": 175_305, "R4 mpu": 158_238},
}
"""The paper's ablation (arXiv 2609.35263v1, eight stages of B300: other devices than this profile's), tokens/s."""


def findings(tables: Tables) -> list[str]:
    """Every bar that is missed, in a line with its cause in numbers."""
    found: list[str] = []
    for row in tables.rows:
        where = f"{row.place}: "
        if row.verdict == "behind":
            found.append(told(row) + f"; {cause(row, WINNER)}; {RIVAL}: {cause(row, RIVAL)}")
        if row.place.concurrency >= 8 and (share := row.ratio(WINNER, ORACLE[0])) is not None and share < BAR_OF_ORACLE:
            found.append(where + f"{percent(share)} of the oracle; " + cause(row, WINNER))
        for other in ("overlapped+mpu", "overlapped+fixed"):
            if (share := row.ratio(WINNER, other)) is not None and share < WORSE:
                found.append(where + f"{percent(share)} of {other}; {cause(row, WINNER)}; {other}: {cause(row, other)}")
        mine, theirs = row.p95(WINNER), row.p95("overlapped+fixed")
        if row.place.family == "mixed" and mine is not None and theirs is not None and mine > theirs:
            found.append(where + f"p95 completion {mine:.2f} s, fixed {theirs:.2f} s")
    return found


def level(tables: Tables) -> list[tuple[str, Timeline]]:
    """(what is level and why, timeline) of the default in every cell in which both sides stand at the bound."""
    return [
        (f"{told(row)}: nothing is left to win, {cause(row, WINNER)}", of(row.ours[WINNER]))
        for row in tables.judged("level")
    ]


def shown(tables: Tables) -> list[tuple[str, Timeline]]:
    """(title, timeline) of both sides in every cell that is behind, or misses a bar."""
    found: list[tuple[str, Timeline]] = []
    for row in tables.rows:
        others = [name for name in ("overlapped+mpu", "overlapped+fixed") if _behind(row, name)]
        others = [RIVAL, *others] if row.verdict == "behind" else others
        oracle = row.ratio(WINNER, ORACLE[0])
        if others or (row.place.concurrency >= 8 and oracle is not None and oracle < BAR_OF_ORACLE):
            found += [(f"{row.place}, {name}", of(row.ours[name])) for name in (WINNER, *others)]
    return found


def _behind(row: Row, name: str) -> bool:
    ratio = row.ratio(WINNER, name)
    return ratio is not None and ratio < WORSE


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
