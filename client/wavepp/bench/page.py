"""One HTML file with everything a bench has to show: tables, figures, how it was measured.

Owns the page and the PNG files beside it; `plots.py` draws, `report.py` has the tables' rows. The page holds its
images itself and loads nothing, so that it can be sent to somebody.
"""

from __future__ import annotations

import shlex
from base64 import b64encode
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from wavepp.bench.report import setting_of, tables
from wavepp.bench.store import Document
from wavepp.bench.timeline import read_timeline

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 82rem; padding: 0 1rem; color: #222 }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin-top: 2.2rem }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #ddd }
th:first-child, td:first-child { text-align: left; white-space: nowrap }
img { max-width: 100% } .wide { overflow-x: auto } code { font-size: 13px; overflow-wrap: anywhere }
"""


def write_page(document: Document, folder: Path, timeline: Path | None = None) -> Path:
    """Write the PNG files and report.html into `folder`; returns the page. The document has at least one cell."""
    cells, *others = tables(document)
    parts = [
        "<h1>wavepp bench</h1>",
        f"<p>{escape(setting_of(document))}</p>",
        f"<p><code>{escape(shlex.join(document['command']))}</code></p>",
        _table(*cells[1:]),
        "<p>Throughput counts finished requests of the measured part, cached tokens included unless it says computed. "
        "Completion counts from when a request was due. A good hit reused at least 90 % of what an endless cache "
        "would have. The bound is what the slowest stage could do with full waves and no idle time.</p>",
    ]
    for title, name, image in _images(document, timeline):
        (folder / name).write_bytes(image)
        source = b64encode(image).decode()
        parts.append(f'<h2>{escape(title)}</h2><img alt="{escape(title)}" src="data:image/png;base64,{source}">')
    for title, columns, lines in others:
        parts += [f"<h2>{escape(title[0].upper() + title[1:])}</h2>", _table(columns, lines)]
    page = folder / "report.html"
    page.write_text(_whole("".join(parts)), encoding="utf-8")
    return page


def _images(document: Document, timeline: Path | None) -> Iterator[tuple[str, str, bytes]]:
    """(title, file name, PNG)."""
    from wavepp.bench import plots

    bars = read_timeline(timeline) if timeline else None
    for title, name, figure in (
        ("Throughput by load", "throughput.png", plots.throughput(document)),
        ("Completion times", "completion.png", plots.completion(document)),
        ("Wave timeline", "timeline.png", plots.waves(bars) if bars else None),
    ):
        if figure is not None:
            yield title, name, plots.png(figure)


def _table(columns: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in line) + "</tr>" for line in lines)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _whole(body: str) -> str:
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>wavepp bench</title>'
        f"<style>{STYLE}</style></head><body>{body}</body></html>\n"
    )
