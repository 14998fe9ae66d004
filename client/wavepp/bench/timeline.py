"""The wave timeline of a pipeline, read back from the trace file that `wavepp up --trace-file` writes.

Owns the reading: bars of each stage, in seconds. `plots.py` draws them. Knows of the file only what the Chrome trace
format says and how `wavepp_proto.runtime.timeline` names things.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wavepp_proto.errors import InvalidRequest

Event = Mapping[str, Any]
Place = tuple[int, int]
"""(pid, tid) of a track in the file."""
WAVE = "wave"
GAP = "gap"


@dataclass(frozen=True, slots=True)
class Bar:
    title: str
    """wave N, or what the stage waited for."""
    kind: str
    """`WAVE` or `GAP`."""
    start_s: float
    seconds: float


@dataclass(frozen=True, slots=True)
class StageBars:
    title: str
    bars: list[Bar]


def read_timeline(path: Path) -> list[StageBars]:
    """Stages in the order of their tracks. Raises InvalidRequest for a file of another kind."""
    try:
        stages = _stages(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"no timeline in {path}: {error}", field="timeline", value=str(path)) from error
    if not stages:
        raise InvalidRequest(f"no wave in {path}", field="timeline", value=str(path))
    return stages


def _stages(events: Sequence[Event]) -> list[StageBars]:
    bars: dict[Place, list[Bar]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and event.get("cat") in (WAVE, GAP):
            bar = Bar(str(event["name"]), event["cat"], event["ts"] / 1e6, event["dur"] / 1e6)
            bars[event["pid"], event["tid"]].append(bar)
    titles = _titles([event for event in events if event["ph"] == "M"])
    several = len({pid for pid, _ in bars}) > 1
    return [StageBars(titles(place, several), bars[place]) for place in sorted(bars)]


def _titles(events: Sequence[Event]) -> Callable[[Place, bool], str]:
    """What a track is called, with its pipeline where the file has several."""
    named = {(event["name"], event["pid"], event["tid"]): str(event["args"].get("name")) for event in events}

    def title(place: Place, with_process: bool) -> str:
        pid, tid = place
        track = named.get(("thread_name", pid, tid), f"track {tid}")
        return f"{named.get(('process_name', pid, 0), pid)} {track}" if with_process else track

    return title
