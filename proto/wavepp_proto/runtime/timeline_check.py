"""Judges a finished timeline file: one track a stage, no overlap on it, every gap named.

Owns the rules; reads only the file's text, so it does not share the layout's mistakes. Called by
tests and by the demo, through `timeline.py`.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from wavepp_proto.errors import InternalError
from wavepp_proto.runtime.timeline_layout import ADMISSION_PROCESS, COPY_PROCESS, GAPS, UNATTRIBUTED

_GAP_TITLES = frozenset({UNATTRIBUTED, *(title for title, _ in GAPS)})


@dataclass(frozen=True, slots=True)
class TimelineSummary:
    stages: tuple[str, ...]
    """Titles of the stage tracks, in drawing order, such as "pipeline p0: stage 0"."""
    waves: Mapping[str, int]
    """Waves by stage track."""
    busy_us: Mapping[str, float]
    """Time inside waves by stage track."""
    gaps_us: Mapping[str, float]
    """Time between waves by gap title, over all stages."""
    lanes: int
    """Most admissions at the same time."""
    admissions: int
    arrows: int
    """Requests whose admission and waves are connected."""

    @property
    def unattributed_us(self) -> float:
        return self.gaps_us.get(UNATTRIBUTED, 0.0)


class _Piece(NamedTuple):
    start_ns: int
    end_ns: int
    title: str
    category: str


def check_timeline(text: str) -> TimelineSummary:
    """Parse a timeline and check it. Raises InternalError, naming the track and the time, if a rule is broken."""
    events = _events(text)
    processes = {event["pid"]: event["args"]["name"] for event in _metadata(events, "process_name")}
    titles: dict[tuple[int, int], str] = {}
    for event in _metadata(events, "thread_name"):
        title = f"{processes[event['pid']]}: {event['args']['name']}"
        if title in titles.values():
            raise InternalError("two tracks of one name", track=title)
        titles[event["pid"], event["tid"]] = title
    pieces = _pieces(events, titles)
    copies, admission = f"{COPY_PROCESS} ", f"{ADMISSION_PROCESS}:"
    stages = tuple(title for title in titles.values() if not title.startswith((copies, admission)))
    lanes = [title for title in titles.values() if title.startswith(admission)]
    for title in stages:
        _check_stage(title, pieces[title])
    for title in titles.values():
        if title not in stages:
            _check_nesting(title, pieces[title])
    gaps: Counter[str] = Counter()
    for title in stages:
        for piece in pieces[title]:
            if piece.category == "gap":
                gaps[piece.title] += piece.end_ns - piece.start_ns
    waves = {title: [piece for piece in pieces[title] if piece.category == "wave"] for title in stages}
    return TimelineSummary(
        stages=stages,
        waves={title: len(of_stage) for title, of_stage in waves.items()},
        busy_us={title: sum(wave.end_ns - wave.start_ns for wave in waves[title]) / 1_000 for title in stages},
        gaps_us={title: gap_ns / 1_000 for title, gap_ns in sorted(gaps.items())},
        lanes=len(lanes),
        admissions=sum(piece.title.startswith("admission") for title in lanes for piece in pieces[title]),
        arrows=sum(event["ph"] == "s" for event in events),
    )


def _events(text: str) -> Sequence[dict[str, Any]]:
    try:
        events = json.loads(text)["traceEvents"]
    except (ValueError, KeyError, TypeError) as error:
        raise InternalError("not a Chrome trace document") from error
    if not isinstance(events, list):
        raise InternalError("traceEvents is not a list")
    return events


def _metadata(events: Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "M" and event["name"] == name]


def _pieces(events: Sequence[dict[str, Any]], titles: Mapping[tuple[int, int], str]) -> dict[str, list[_Piece]]:
    """Slices by track, by start and then longest first. The file's microseconds are exact to 1 ns."""
    pieces: dict[str, list[_Piece]] = defaultdict(list)
    for event in events:
        if event["ph"] != "X":
            continue
        title = titles.get((event["pid"], event["tid"]))
        if title is None:
            raise InternalError("a slice on a track without a name", slice=event["name"])
        start_ns = round(1_000 * event["ts"])
        piece = _Piece(start_ns, start_ns + round(1_000 * event["dur"]), event["name"], event["cat"])
        if piece.start_ns < 0 or piece.end_ns < piece.start_ns:
            raise InternalError("a slice before the start, or of negative length", track=title, slice=piece.title)
        pieces[title].append(piece)
    for of_track in pieces.values():
        of_track.sort(key=lambda piece: (piece.start_ns, -piece.end_ns))
    return pieces


def _check_stage(track: str, pieces: Sequence[_Piece]) -> None:
    for piece in pieces:
        if piece.category == "gap" and piece.title not in _GAP_TITLES:
            raise InternalError("a gap without a known name", track=track, slice=piece.title)
    # By end among equal starts: a wave too short for the clock lies before what follows it.
    for before, after in pairwise(sorted(pieces, key=lambda piece: (piece.start_ns, piece.end_ns))):
        at_us = after.start_ns / 1_000
        if after.start_ns < before.end_ns:
            raise InternalError(f"{after.title} overlaps {before.title}", track=track, at_us=at_us)
        if after.start_ns > before.end_ns:
            raise InternalError(f"unnamed gap between {before.title} and {after.title}", track=track, at_us=at_us)


def _check_nesting(track: str, pieces: Sequence[_Piece]) -> None:
    open_pieces: list[_Piece] = []
    for piece in pieces:
        while open_pieces and open_pieces[-1].end_ns <= piece.start_ns:
            open_pieces.pop()
        if open_pieces and piece.end_ns > open_pieces[-1].end_ns:
            outer = open_pieces[-1].title
            raise InternalError(f"{piece.title} leaves {outer}", track=track, at_us=piece.start_ns / 1_000)
        open_pieces.append(piece)
