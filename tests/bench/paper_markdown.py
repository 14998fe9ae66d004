"""The report of the paper's tables as Markdown; `paper_html` has the page.

Owns the order of what is told. Pure: tables in, text out.
"""

from __future__ import annotations

from collections.abc import Iterable

from tests.bench.paper_cells import PROFILES
from tests.bench.paper_findings import ablation, findings, level, rungs, shown, tails
from tests.bench.paper_report import TITLES, Tables, about, cells, columns, standing, table
from tests.bench.paper_timeline import words


def markdown(tables: Tables, notes: Iterable[str]) -> str:
    lines = ["# The paper's tables, in virtual time", "", *about(tables), "", *notes, ""]
    lines += [standing(tables), ""]
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
    if timelines := shown(tables):
        lines += ["### Their last waves", ""]
        lines += [line for title, timeline in timelines for line in words(title, timeline)]
    if timelines := level(tables):
        lines += ["", "## Level at the bound", ""]
        lines += [line for title, timeline in timelines for line in words(title, timeline)]
    return "\n".join(lines)
