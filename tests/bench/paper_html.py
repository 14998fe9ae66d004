"""The report of the paper's tables as one page: tables, and shares of the bound by concurrency as drawings.

Owns the page's looks; what is compared is in `paper_report`. Needs nothing from elsewhere: styles and drawings are
in the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from tests.bench.paper_cells import ORACLE, PROFILES
from tests.bench.paper_findings import ablation, findings, level, rungs, shown, tails
from tests.bench.paper_report import NAMES, TITLES, Row, Tables, about, cells, columns, standing
from tests.bench.paper_timeline import drawing

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 110rem; padding: 0 1rem; color: #1b1f24 }
table { border-collapse: collapse; margin: 1rem 0 2rem; font-variant-numeric: tabular-nums; font-size: 13px }
th, td { padding: .25rem .5rem; text-align: right; border-bottom: 1px solid #d8dee4; white-space: nowrap }
th:first-child, td:first-child { text-align: left }
thead th { background: #f6f8fa; position: sticky; top: 0 }
tr.behind td { background: #ffebe9 }
tr.level td { background: #fff8c5 }
.scroll { overflow-x: auto }
svg { margin: .5rem 1rem 1rem 0; background: #fff }
"""
COLOURS = {
    "paper": "#8250df", "oracle": "#57606a", NAMES[0]: "#d4a72c", NAMES[1]: "#bc4c00", NAMES[2]: "#54aeff",
    NAMES[3]: "#0969da", NAMES[4]: "#1a7f37",
}  # fmt: skip
WIDTH, HEIGHT, EDGE = 360, 220, 36


def page(tables: Tables, notes: Iterable[str], more: str = "") -> str:
    """`more`: HTML of another part, after the tables."""
    parts = ["<h1>The paper's tables, in virtual time</h1>", *_paragraphs([*about(tables), *notes])]
    parts.append(f"<p><b>{escape(standing(tables))}</b></p>")
    for model in PROFILES:
        if rows := tables.of(model):
            parts += [f"<h2>{escape(TITLES[model])}</h2>", _legend(), *_drawings(rows)]
            parts.append(_table(columns(model), [cells(row) for row in rows], [row.verdict for row in rows]))
    for title, (head, body) in (
        ("Ablation: geometric mean over a family's cells", ablation(tables)),
        ("The paper's rungs", rungs(tables)),
        ("Tails", tails(tables)),
    ):
        parts += [f"<h2>{title}</h2>", _table(head, body, [""] * len(body))]
    missed = findings(tables) or ["None."]
    parts += ["<h2>Bars that are missed</h2><ul>", *(f"<li>{escape(line)}</li>" for line in missed), "</ul>"]
    parts += [drawing(title, timeline) for title, timeline in shown(tables)]
    if timelines := level(tables):
        parts.append("<h2>Level at the bound</h2>")
        parts += [_paragraphs([title])[0] + drawing("overlapped+adaptive", timeline) for title, timeline in timelines]
    parts.append(more)
    top = f'<meta charset="utf-8"><title>The paper\'s tables</title><style>{STYLE}</style>'
    return f"<!doctype html><html lang=en><head>{top}</head><body>{''.join(parts)}</body></html>\n"


def _paragraphs(texts: Iterable[str]) -> list[str]:
    return [f"<p>{escape(text)}</p>" for text in texts]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], verdicts: Sequence[str]) -> str:
    top = "".join(f"<th>{escape(text)}</th>" for text in head)
    body = "".join(
        f"<tr class='{verdict}'>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>"
        for row, verdict in zip(rows, verdicts, strict=True)
    )
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _legend() -> str:
    return "<p>" + " ".join(f'<span style="color:{c}">&#9632; {escape(n)}</span>' for n, c in COLOURS.items()) + "</p>"


def _drawings(rows: Sequence[Row]) -> list[str]:
    """One for each family and length: share of the bound by concurrency."""
    kinds = dict.fromkeys((row.place.family, row.place.tokens) for row in rows)
    return [
        _drawing(f"{f}, {n:,} tokens", [r for r in rows if (r.place.family, r.place.tokens) == (f, n)])
        for f, n in kinds
    ]


def _drawing(title: str, rows: Sequence[Row]) -> str:
    parts = [f'<text x="{EDGE}" y="14" font-size="12">{escape(title)}: share of the bound by concurrency</text>']
    for tenth in range(0, 11, 2):
        y = _y(tenth / 10)
        parts.append(f'<line x1="{EDGE}" x2="{WIDTH - 8}" y1="{y}" y2="{y}" stroke="#eaeef2"/>')
        parts.append(f'<text x="4" y="{y + 4}" font-size="10">{tenth * 10} %</text>')
    for place, row in enumerate(rows):
        parts.append(f'<text x="{_x(place, rows)}" y="{HEIGHT - 6}" font-size="10">{row.place.concurrency}</text>')
    for name, colour in COLOURS.items():
        points = [(_x(at, rows), _y(share)) for at, row in enumerate(rows) if (share := _share(row, name)) is not None]
        dash = ' stroke-dasharray="4 3"' if name in ("paper", ORACLE[0]) else ""
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2"{dash} points="{line}"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in points]
    return f'<svg width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'


def _share(row: Row, name: str) -> float | None:
    if name == "paper":
        return row.paper["wavepp"] / row.bound if "wavepp" in row.paper else None
    return row.share(name)


def _x(place: int, rows: Sequence[Row]) -> float:
    return EDGE + 12 + place * (WIDTH - EDGE - 40) / max(1, len(rows) - 1)


def _y(share: float) -> float:
    return HEIGHT - 22 - min(share, 1.05) * (HEIGHT - 50)
