"""Figures of a bench: throughput by load, completion times, and the pipeline's wave timeline.

Owns the drawing; reads documents as `run.py` makes them and bars as `timeline.py` reads them. Needs matplotlib, which
is imported with this module: only `page.py` imports it. Figures are drawn without pyplot, so nothing global is left.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from wavepp.bench.store import Document
from wavepp.bench.timeline import GAP, WAVE, Bar, StageBars

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#444444", "#b59a00")
"""Told apart by colour-blind people too."""
GAP_COLOURS = {"waiting for activations": "#e69f00", "waiting for admission": "#d55e00", "preparing": "#cc79a7"}
IDLE_COLOUR = "#e4e4e4"
WAVE_COLOURS = ("#0072b2", "#56b4e9")
"""By turns, so that neighbours are told apart."""
CLOSE_WAVES = 24
"""Waves of the first stage in the magnified part of the timeline."""
DPI = 140


def png(figure: Figure) -> bytes:
    sink = io.BytesIO()
    figure.savefig(sink, format="png", dpi=DPI)
    return sink.getvalue()


def throughput(document: Document) -> Figure | None:
    """Input tokens/s by load, with cached tokens and without; dotted: the bound. None without a load to plot by."""
    lines: dict[str, list[Document]] = defaultdict(list)
    for cell in document["cells"]:
        if _load_of(cell) is not None:
            lines[cell["row"]].append(cell)
    if not lines:
        return None
    figure = _figure(11, 4.2)
    both = figure.subplots(1, 2)
    loops = all(cell["settings"]["concurrency"] is not None for row in lines.values() for cell in row)
    for axes, key, title in (
        (both[0], "input_tokens_per_s", "prompt tokens answered"),
        (both[1], "computed_tokens_per_s", "of them computed, not cached"),
    ):
        for colour, (row, cells) in zip(_endless(len(lines)), lines.items(), strict=True):
            ordered = sorted(cells, key=lambda cell: _load_of(cell) or 0.0)
            loads = [_load_of(cell) for cell in ordered]
            axes.plot(loads, [cell["summary"][key] for cell in ordered], "o-", color=colour, label=row, markersize=4)
            if key == "input_tokens_per_s" and all(cell["bound"] for cell in ordered):
                bounds = [cell["bound"]["input_tokens_per_s"] for cell in ordered]
                axes.plot(loads, bounds, ":", color=colour, linewidth=1)
        _finish(axes, title, "requests under way" if loops else "requests/s arriving", "tokens/s")
        if loops:
            shown = sorted({_load_of(cell) or 0.0 for row in lines.values() for cell in row})
            axes.set_xscale("log", base=2)
            axes.set_xticks(shown, [f"{load:g}" for load in shown])
            axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(_short)
    both[0].legend(fontsize=8, frameon=False)
    return figure


def completion(document: Document) -> Figure | None:
    """How many requests had completed within how long, a panel for each family or trace. None if none completed."""
    rows: dict[str, list[tuple[str, list[float]]]] = defaultdict(list)
    for cell in document["cells"]:
        times = _completion_s(cell)
        if times:
            rows[cell["row"]].append((cell["name"].rpartition("-")[2], times))
    if not rows:
        return None
    from matplotlib.ticker import LogLocator

    across = min(3, len(rows))
    down = -(-len(rows) // across)
    figure = _figure(4.2 * across + 0.6, 3.4 * down + 0.2)
    panels = figure.subplots(down, across, squeeze=False).ravel()
    for axes, (row, cells) in zip(panels, rows.items(), strict=False):
        for colour, (label, times) in zip(_endless(len(cells)), cells, strict=True):
            shares = [rank / len(times) for rank in range(len(times) + 1)]
            axes.step([times[0], *times], shares, where="post", color=colour, label=label, linewidth=1.4)
        _finish(axes, row, "completion time (s)", "share of requests")
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(lambda seconds, _: f"{seconds:g}")
        axes.minorticks_off()
        axes.set_ylim(0, 1.02)
        axes.legend(fontsize=8, frameon=False, loc="lower right")
    for unused in panels[len(rows) :]:
        unused.set_visible(False)
    return figure


def waves(stages: Sequence[StageBars]) -> Figure:
    """What each stage did when: all of it, and some waves from the middle, magnified."""
    figure = _figure(12, 1.6 + 0.7 * len(stages))
    whole, close = figure.subplots(2, 1)
    first, last = _span([bar for stage in stages for bar in stage.bars])
    busy = [bar for bar in stages[0].bars if bar.kind == WAVE] or stages[0].bars
    middle = busy[max(0, len(busy) // 2 - CLOSE_WAVES // 2) :][:CLOSE_WAVES]
    for axes, span, title in ((whole, (first, last), "waves by stage"), (close, _span(middle), "magnified")):
        for height, stage in enumerate(stages):
            _draw_stage(axes, height, [bar for bar in stage.bars if _overlaps(bar, span)])
        axes.set_xlim(*span)
        axes.set_yticks(range(len(stages)), [stage.title for stage in stages])
        axes.invert_yaxis()
        _finish(axes, title, "s", "")
        axes.grid(False)
    _legend(whole)
    return figure


def _draw_stage(axes: Axes, height: int, bars: Sequence[Bar]) -> None:
    """Bars of one colour together: one collection each, however many waves there are."""
    drawn: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for turn, bar in enumerate(bar for bar in bars if bar.kind == WAVE):
        drawn[WAVE_COLOURS[turn % 2]].append((bar.start_s, bar.seconds))
    for bar in bars:
        if bar.kind == GAP:
            drawn[GAP_COLOURS.get(bar.title, IDLE_COLOUR)].append((bar.start_s, bar.seconds))
    for colour, ranges in drawn.items():
        axes.broken_barh(ranges, (height - 0.4, 0.8), facecolors=colour, linewidth=0)


def _legend(axes: Axes) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=WAVE_COLOURS[0], label="computing"), Patch(color=IDLE_COLOUR, label="nothing to do")]
    patches += [Patch(color=colour, label=title) for title, colour in GAP_COLOURS.items()]
    axes.legend(
        handles=patches, ncols=len(patches), fontsize=8, frameon=False, loc="lower right", bbox_to_anchor=(1, 1)
    )


def _span(bars: Sequence[Bar]) -> tuple[float, float]:
    return min(bar.start_s for bar in bars), max(bar.start_s + bar.seconds for bar in bars)


def _overlaps(bar: Bar, span: tuple[float, float]) -> bool:
    return bar.start_s < span[1] and bar.start_s + bar.seconds > span[0]


def _load_of(cell: Document) -> float | None:
    settings = cell["settings"]
    found = settings["concurrency"] if settings["concurrency"] is not None else settings["rate"]
    return None if found is None else float(found)


def _completion_s(cell: Document) -> list[float]:
    columns = cell["samples"]["columns"]
    due, ended, reason = (columns.index(name) for name in ("due_s", "ended_s", "reason"))
    return sorted(row[ended] - row[due] for row in cell["samples"]["measured"] if not row[reason])


def _endless(count: int) -> list[str]:
    return [COLOURS[number % len(COLOURS)] for number in range(count)]


def _short(value: float, _: object) -> str:
    if value >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}K" if value >= 10_000 else f"{value:g}"


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _finish(axes: Axes, title: str, across: str, up: str) -> None:
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel(across, fontsize=9)
    axes.set_ylabel(up, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
