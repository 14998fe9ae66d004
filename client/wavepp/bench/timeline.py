"""The wave timeline of a pipeline, read back from the trace file that `wavepp up --trace-file` writes.

Owns the reading: bars of each stage, in seconds. `plots.py` draws them. Knows of the file only what the Chrome trace
format says and how `wavepp_proto.runtime.timeline` names things.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wavepp_proto.errors import InvalidRequest
from wavepp_proto.runtime.timeline import REWRITE_S

QUIET_S = REWRITE_S + 1
"""Without a new version the file holds all spans: they are exported within a second."""
MOST_WAIT_S = 20.0
POLL_S = 0.2
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
    """Stages in the order of their tracks; none before the first wave. Raises InvalidRequest for another file."""
    try:
        return _stages(json.loads(path.read_text(encoding="utf-8"))["traceEvents"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"no timeline in {path}: {error}", field="timeline", value=str(path)) from error


def settled(path: Path, since: float, within_s: float = MOST_WAIT_S) -> bool:
    """Wait until the pipeline's trace file has been written after `since` (seconds of the wall clock) and no more
    spans come. False if it was not within the time: the pipeline that wrote it is another one, or has ended."""
    until = time.monotonic() + within_s
    seen, since_when = path.stat().st_mtime, time.monotonic()
    while time.monotonic() < until:
        if seen > since and time.monotonic() - since_when > QUIET_S:
            return True
        time.sleep(POLL_S)
        if (now := path.stat().st_mtime) != seen:
            seen, since_when = now, time.monotonic()
    return seen > since


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
