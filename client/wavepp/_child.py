"""One process of a local cluster, and the last words it left in its log."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass
from pathlib import Path

LOG_BYTES = 1 << 16
"""Of its log, how much is read."""
TAIL_BYTES = 2000


@dataclass(slots=True)
class Child:
    name: str
    process: asyncio.subprocess.Process
    log: Path
    log_start: int = 0
    """Where its part of the log begins: earlier lives wrote what stands before."""

    @property
    def alive(self) -> bool:
        return self.process.returncode is None

    def tail(self) -> str:
        """Its last words."""
        return last_words(self.log, self.log_start)


def last_words(log: Path, start: int = 0) -> str:
    """What stands in a log from byte `start` on, without records; and what the last of those says if it tells of an
    error or there is nothing else."""
    with log.open("rb") as file:
        begin = max(start, file.seek(0, os.SEEK_END) - LOG_BYTES)
        file.seek(begin)
        lines = file.read().decode(errors="replace").splitlines()
    if begin > start and len(lines) > 1:
        del lines[0]  # the end of a line that began before: of a record, most likely
    records = {at: record for at, line in enumerate(lines) if (record := _record(line)) is not None}
    words = "\n".join(line for at, line in enumerate(lines) if at not in records).strip()
    if len(words) > TAIL_BYTES:
        words = "[...] " + words[-TAIL_BYTES:]
    last = records[max(records)] if records else {}
    if words and last.get("level") != "error":
        return words
    said = ": ".join(str(last[name]) for name in ("event", "error") if name in last)
    return f"{words}\n{said}".strip()


def _record(line: str) -> dict[str, object] | None:
    """A record of a daemon's log, if the line is one."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and "event" in record else None
