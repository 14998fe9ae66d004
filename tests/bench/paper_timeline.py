"""What the stages ran in the last waves of a result: as a drawing for the page, in words for Markdown.

Owns the look of a timeline; why it is shown is in `paper_findings`. Pure.
"""

from __future__ import annotations

from html import escape
from typing import Any

WIDTH, LANE, LEFT = 1100, 22, 70
WORDS = 6
"""Waves that are told of a stage."""
SHADES = ("#54aeff", "#2da44e", "#d4a72c", "#bf8700", "#8250df", "#cf222e")

Timeline = dict[str, list[list[float]]]
"""[start s, end s, tokens, rows] of each wave by stage; the end of what was measured is 0."""


def words(title: str, timeline: Timeline) -> list[str]:
    """First and last stage: milliseconds between waves and in them, and what they carried."""
    names = list(timeline)
    lines = [f"- {title}"]
    for name in dict.fromkeys((names[0], names[-1])):
        waves = timeline[name][-WORDS:]
        told = [
            f"{(start - before) * 1e3:.0f} idle, {(end - start) * 1e3:.0f} ({tokens:.0f} tokens, {rows:.0f} rows)"
            for before, (start, end, tokens, rows) in zip([waves[0][0], *(w[1] for w in waves)], waves, strict=False)
        ]
        lines.append(f"  - stage {name.rpartition('/')[2]}, ms: " + "; ".join(told))
    return lines


def drawing(title: str, timeline: Timeline) -> str:
    """One lane for each stage; waves that carry alike have one colour."""
    every = [wave for waves in timeline.values() for wave in waves]
    first, last = min(wave[0] for wave in every), max(wave[1] for wave in every)
    scale = (WIDTH - LEFT - 10) / (last - first)
    height = LANE * (len(timeline) + 2)
    parts = [f'<text x="{LEFT}" y="14" font-size="12">{escape(title)}, {last - first:.2f} s</text>']
    for place, (name, waves) in enumerate(timeline.items()):
        y = LANE * (place + 1)
        parts.append(f'<text x="2" y="{y + 14}" font-size="11">stage {escape(name.rpartition("/")[2])}</text>')
        for start, end, tokens, rows in waves:
            x, width = LEFT + (start - first) * scale, max(0.5, (end - start) * scale)
            shade = SHADES[round(tokens / 512 + rows) % len(SHADES)]
            told = f"{tokens:.0f} tokens, {rows:.0f} rows, {(end - start) * 1e3:.1f} ms"
            box = f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{LANE - 4}" fill="{shade}" stroke="#fff"/>'
            parts.append(f"<g><title>{told}</title>{box}</g>")
    return f'<svg width="{WIDTH}" height="{height}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'


def of(result: dict[str, Any]) -> Timeline:
    timeline: Timeline = result["result"]["timeline"]
    return timeline
