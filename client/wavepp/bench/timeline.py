"""The wave timeline of a pipeline, read back from the trace file that `wavepp up --trace-file` writes.

Owns the reading: bars of each stage, in seconds. `plots.py` draws them. Knows of the file only what the Chrome trace
format says and how `wavepp_proto.runtime.timeline` names things.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from wavepp_proto.errors import InvalidRequest

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
    bars: list[Bar] = field(default_factory=list)


def read_timeline(path: Path) -> list[StageBars]:
    """Stages in the order of their tracks. Raises InvalidRequest for a file of another kind."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        events = document["traceEvents"]
        names = {
            (event["pid"], event["tid"]): str(event["args"]["name"])
            for event in events
            if event["ph"] == "M" and event["name"] == "thread_name"
        }
        slices = [event for event in events if event["ph"] == "X" and event.get("cat") in (WAVE, GAP)]
        stages: dict[tuple[int, int], StageBars] = {}
        for event in slices:
            place = (event["pid"], event["tid"])
            bars = stages.setdefault(place, StageBars(names.get(place, f"track {place[1]}"))).bars
            bars.append(Bar(str(event["name"]), event["cat"], event["ts"] / 1e6, event["dur"] / 1e6))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"no timeline in {path}: {error}", field="timeline", value=str(path)) from error
    if not stages:
        raise InvalidRequest(f"no wave in {path}", field="timeline", value=str(path))
    return [stages[place] for place in sorted(stages)]
