"""The stage and admission timeline as a Chrome trace file, which Perfetto opens.

Owns the file format and the arrows that lead from a request's admission through its first wave on
every stage. Does not own what lies where (`timeline_layout.py`) or the judgement of a finished file
(`timeline_check.py`).
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from wavepp_proto.runtime.timeline_check import TimelineSummary, check_timeline
from wavepp_proto.runtime.timeline_layout import ADMISSION_PROCESS, CollectedSpan, Slice, SpanKey, Track, layout

__all__ = ["CollectedSpan", "TimelineSummary", "check_timeline", "keep_timeline", "timeline", "write_timeline"]

Event = Mapping[str, Any]
"""An entry of traceEvents; `ts` and `dur` are microseconds after the first span began."""
REWRITE_S: Final = 2.0
"""Between two writes of the file of a running pipeline; longer where a write takes long."""
MOST_TIME_WRITING: Final = 0.1
"""Share of the time that rewriting may take: the file grows with the run."""
Place = tuple[int, int]
"""(pid, tid) of a track in the file; the processes that made the spans are in `args`."""


def timeline(spans: Iterable[CollectedSpan]) -> dict[str, Any]:
    """The trace document. The same spans in any order give the same document."""
    collected = list(spans)
    origin_ns = min((span.start_ns for span in collected), default=0)
    tracks = _placed(layout(collected))
    events: list[Event] = list(_names(tracks))
    for place, track in tracks.items():
        events.extend(_slice_event(place, piece, origin_ns) for piece in track.slices)
    events.extend(_arrows(tracks, origin_ns))
    return {"displayTimeUnit": "ms", "traceEvents": events}


def write_timeline(spans: Iterable[CollectedSpan], path: Path) -> None:
    """Write the trace document to `path`: all of it, or nothing."""
    partial = path.with_name(f"{path.name}.partial")
    text = json.dumps(timeline(spans), sort_keys=True, separators=(",", ":"), allow_nan=False)
    partial.write_text(text + "\n", encoding="utf-8")
    os.replace(partial, path)


async def keep_timeline(spans: Callable[[], Sequence[CollectedSpan]], path: Path) -> None:
    """Write `path` now and after each change, at most every `REWRITE_S`, until cancelled: a reader need not wait for
    the pipeline's end. `spans` answers what was collected so far. Raises OSError where the file cannot be written."""
    clock = asyncio.get_running_loop().time
    written: CollectedSpan | None = None
    pause = 0.0
    while True:
        collected = spans()
        newest = collected[-1] if collected else None
        if newest is not written or not pause:
            began = clock()
            await asyncio.to_thread(write_timeline, collected, path)
            pause, written = max(REWRITE_S, (clock() - began) / MOST_TIME_WRITING), newest
        await asyncio.sleep(pause)


def _placed(tracks: Sequence[Track]) -> dict[Place, Track]:
    """Processes and their tracks numbered from 1, in drawing order."""
    by_process: dict[str, list[Track]] = defaultdict(list)
    for track in tracks:
        by_process[track.process].append(track)
    return {
        (pid, tid): track
        for pid, of_process in enumerate(by_process.values(), start=1)
        for tid, track in enumerate(of_process, start=1)
    }


def _names(tracks: Mapping[Place, Track]) -> Iterator[Event]:
    for (pid, tid), track in tracks.items():
        if tid == 1:
            yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": track.process}}
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": track.title}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}


def _slice_event(place: Place, piece: Slice, origin_ns: int) -> Event:
    pid, tid = place
    start_us, duration_us = (piece.start_ns - origin_ns) / 1_000, (piece.end_ns - piece.start_ns) / 1_000
    what = {"ph": "X", "name": piece.title, "cat": piece.category, "args": piece.args}
    return {**what, "pid": pid, "tid": tid, "ts": start_us, "dur": duration_us}


def _arrows(tracks: Mapping[Place, Track], origin_ns: int) -> Iterator[Event]:
    """A chain of flow events for each request seen on two tracks or more."""
    stops: dict[SpanKey, list[tuple[int, Place]]] = defaultdict(list)
    for place, track in tracks.items():
        seen: set[SpanKey] = set()
        for piece in track.slices:
            # A flow event binds to the slice that encloses it: an admission is left at its end.
            leaves = max(piece.start_ns, piece.end_ns - 1) if track.process == ADMISSION_PROCESS else piece.start_ns
            for request in piece.requests:
                if request not in seen:
                    seen.add(request)
                    stops[request].append((leaves, place))
    for number, request in enumerate(sorted(stops), start=1):
        chain = sorted(stops[request])
        for position, (at_ns, (pid, tid)) in enumerate(chain if len(chain) > 1 else ()):
            phase = "s" if position == 0 else "f" if position == len(chain) - 1 else "t"
            what = {"ph": phase, "name": "request", "cat": "request", "id": number, "bp": "e"}
            yield {**what, "pid": pid, "tid": tid, "ts": (at_ns - origin_ns) / 1_000}
