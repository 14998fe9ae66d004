"""A bench's document as tables for a person, and without its raw samples for a program.

Owns wording and layout; decides nothing. Reads documents as `run.py` makes them, whether new or from files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from wavepp.bench.stages import STATES
from wavepp.bench.store import Document

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

COLUMNS = (
    "cell", "input tok/s", "computed tok/s", "requests", "completion ms p50", "completion ms p95", "completion ms p99",
    "admission ms p50", "admission ms p95", "admission ms p99", "good hits", "of bound", "waves", "tok/wave",
    "others' CPU", "failed",
)  # fmt: skip
IMPORTANCE = (0, 1, 15, 4, 6, 11, 10, 9, 2, 3, 5, 7, 8, 12, 13, 14)
"""Of COLUMNS: a narrow terminal leaves out the last ones. No number is ever cut or wrapped."""
LEAST_COLUMNS = 4
"""Less would say nothing: names of cells are folded then."""
ENDLESS = 10_000
STAGE_COLUMNS = ("cell", "stage", "waves", *(state.replace("_", " ") for state in STATES))
KIND_COLUMNS = ("cell", "kind", "completion ms p50", "completion ms p95", "completion ms p99")
NOTHING = "-"
"""Where a number does not exist."""


def rows(document: Document) -> list[list[str]]:
    """One row a cell, as COLUMNS."""
    return [_row(cell) for cell in document["cells"]]


def stage_rows(document: Document) -> list[list[str]]:
    """One row for each cell and stage daemon, as STAGE_COLUMNS."""
    return [
        [cell["name"], _stage(stage), f"{stage['waves']}", *(_percent(stage["shares"][state]) for state in STATES)]
        for cell in document["cells"]
        for stage in cell["stages"] or ()
    ]


def kind_rows(document: Document) -> list[list[str]]:
    """One row for each kind of request in cells that have several, as KIND_COLUMNS."""
    return [
        [cell["name"], kind, *_three(percentiles)]
        for cell in document["cells"]
        for kind, percentiles in cell["summary"]["completion_ms_by_kind"].items()
    ]


def tables(document: Document) -> list[tuple[str, tuple[str, ...], list[list[str]]]]:
    """(title, columns, rows) of every table that has a row."""
    every = [
        ("cells", COLUMNS, rows(document)),
        ("warm and cold requests apart", KIND_COLUMNS, kind_rows(document)),
        ("what the stages' time went into", STAGE_COLUMNS, stage_rows(document)),
    ]
    return [table for table in every if table[2]]


def print_tables(document: Document) -> None:
    """To standard output."""
    from rich.console import Console

    out = Console()
    out.print(setting_of(document), highlight=False, markup=False)
    for title, columns, lines in tables(document):
        out.print(_fitting(out, title, columns, lines))


def _fitting(out: Console, title: str, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    """The table with as many of its columns as the terminal has room for, those without a value never."""
    order: Sequence[int] = IMPORTANCE if columns is COLUMNS else range(len(columns))
    kept = [number for number in order if any(line[number] != NOTHING for line in lines)]
    endless = out.options.update(max_width=ENDLESS)
    while True:
        shown = sorted(kept)
        table = _table(title, _only(shown, columns), [_only(shown, line) for line in lines])
        if len(kept) <= LEAST_COLUMNS or out.measure(table, options=endless).maximum <= out.width:
            return table
        kept.pop()


def _only(kept: Sequence[int], texts: Sequence[str]) -> list[str]:
    return [texts[number] for number in kept]


def without_samples(document: Document) -> Document:
    """The document with its cells' summaries alone."""
    cells = [{name: value for name, value in cell.items() if name != "samples"} for cell in document["cells"]]
    return document | {"cells": cells}


def setting_of(document: Document) -> str:
    """One sentence: what was measured, where and when."""
    machine, cell = document["machine"], document["cells"][0]
    about = cell["settings"]
    return (
        f"{about['model']} over {about['stages']} stages (policy {about['policy']}, mode "
        f"{about.get('mode', NOTHING)}, waves of {about['wave_tokens']} tokens, blocks of {about['block_tokens']}), "
        f"measured from {machine['host']} with {machine['cores']} cores, "
        f"{document['began']} to {document['ended']}, wavepp {document['versions'].get('controller', NOTHING)}."
    )


def _table(title: str, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for number, column in enumerate(columns):
        heading = column if number == 0 else column.replace(" ", "\n")
        table.add_column(heading, justify="left" if number == 0 else "right", overflow="fold", no_wrap=number > 0)
    for line in lines:
        table.add_row(*map(Text, line))
    return table


def _row(cell: Document) -> list[str]:
    summary, waves, bound, usage = cell["summary"], cell["waves"], cell["bound"], cell["usage"]
    return [
        cell["name"] + _remark(cell),
        f"{summary['input_tokens_per_s']:,.0f}",
        f"{summary['computed_tokens_per_s']:,.0f}",
        f"{summary['finished']}",
        *_three(summary["completion_ms"]),
        *_three(summary["admission_ms"]),
        _percent(summary["good_hit_rate"]),
        _percent(bound["fraction"] if bound else None),
        f"{waves['count']}" if waves else NOTHING,
        f"{waves['tokens_per_wave']:,.0f}" if waves else NOTHING,
        _percent(usage["others"] if usage else None),
        ", ".join(f"{count} {reason}" for reason, count in cell["failed"].items()) or "0",
    ]


def _remark(cell: Document) -> str:
    """Why not to take a cell's numbers at face value."""
    if cell["interrupted"]:
        return " (interrupted)"
    if cell["stopped_early"]:
        return " (ended early)"
    return f" ({cell['foreign_requests']} requests of others)" if cell["foreign_requests"] else ""


def _three(percentiles: list[float] | None) -> list[str]:
    return (
        [NOTHING] * 3 if percentiles is None else [f"{value:,.{0 if value >= 1000 else 1}f}" for value in percentiles]
    )


def _percent(share: float | None) -> str:
    return NOTHING if share is None else f"{100 * share:.1f}%"


def _stage(stage: Document) -> str:
    return f"{stage['stage']}" + (f" rank {stage['rank']}" if stage["rank"] else "")
