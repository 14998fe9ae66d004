"""Every bar of DESIGN.md (Bars), measured by one command: a table, and the raw JSON behind it.

Owns the list of benches, the processes that run them one after another, and what else the machine did meanwhile
(`others`: the share of all CPUs' time that was neither idle nor spent by the bench). What is not run keeps the
result of an earlier run; what takes too long for this command (the paper's cells, faults) is read from where its
own command leaves it. Ends 1 if a bar is missed.

    scripts/bench [--quick] [--only NAME ...] [--wait SECONDS] [--show]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from rich.console import Console
from rich.table import Table

from tests.bench import bars_read as read
from tests.bench.bars_read import Bar
from tests.bench.kept import read_kept, write_kept

FOLDER = Path("bench-results")
OUT = FOLDER / "bars.json"
FAULTS = FOLDER / "fault.json"
PAPER = FOLDER / "paper" / "virtual"
LONGEST_S = 1200.0
BUSY_PERCENT = 15.0
"""Of all CPUs together; above it others are in the way."""
Kept = dict[str, Any]
"""A bench's result: raw, at, quick, others_share, took_s."""


class Bench(NamedTuple):
    """A module that prints JSON, and what it says of bars."""

    argv: tuple[str, ...]
    rows: Callable[[Mapping[str, Any]], Iterator[Bar]]


def _part(name: str) -> tuple[str, ...]:
    return ("admission", "--only", name)


BENCHES = {
    "stage_core": Bench(("stage_core",), read.stage_core),
    "loop": Bench(_part("loop"), read.loop),
    "hint": Bench(("hint",), read.hint),
    "hashing": Bench(("hashing",), read.hashing),
    "rounds": Bench(_part("rounds"), read.rounds),
    "rate": Bench(_part("rate"), read.rate),
    "ingest": Bench(("ingest",), read.ingest),
    "isolated": Bench(_part("isolated"), read.isolated),
    "restart": Bench(("restart",), read.restart),
    "tracing": Bench(("tracing",), read.tracing),
}
QUICK = {"loop", "rounds", "rate", "isolated", "ingest", "restart", "tracing"}
"""Those that know --quick; the others take seconds."""


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    known: dict[str, Kept] = (read_kept(OUT, "benches") or {"benches": {}})["benches"]
    console, errors = Console(width=None if sys.stdout.isatty() else 220), Console(stderr=True)
    for name in [] if options.show else options.only or BENCHES:
        _await_quiet(options.wait)
        errors.print(f"{name} ...")
        try:
            known[name] = run(name, quick=options.quick)
        except (subprocess.SubprocessError, ValueError) as error:
            errors.print(f"{name} failed: {error}")
            known.pop(name, None)
        _write(known, [])  # whoever interrupts the next one keeps this one
    bars = [(row, known.get(name)) for name in BENCHES for row in _rows(name, known)] + [(row, None) for row in _kept()]
    _write(known, [row for row, _ in bars])
    console.print(_table(bars))
    console.print(f"{OUT}: figures behind the table")
    return 1 if any(row.met is False for row, _ in bars) else 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--only", nargs="+", choices=BENCHES, metavar="NAME", help=f"of {', '.join(BENCHES)}")
    parser.add_argument("--wait", type=float, default=0.0, help="most seconds to wait for a quiet machine, each time")
    parser.add_argument("--show", action="store_true", help="run nothing, show what is known")
    return parser.parse_args(arguments)


def _write(known: Mapping[str, Kept], bars: list[Bar]) -> None:
    FOLDER.mkdir(exist_ok=True)
    machine = {"machine": platform.platform(), "cpus": os.cpu_count(), "python": platform.python_version()}
    write_kept(OUT, {**machine, "bars": [row._asdict() for row in bars], "benches": known}, indent=1)


def run(name: str, *, quick: bool) -> Kept:
    """One bench in a process of its own. Raises SubprocessError if it fails, ValueError if it prints no JSON."""
    module, *more = BENCHES[name].argv
    argv = [sys.executable, "-m", f"tests.bench.{module}", *more, *(["--quick"] if quick and name in QUICK else [])]
    began, idle, own = time.perf_counter(), _idle_s(), _children_s()
    done = subprocess.run(argv, stdout=subprocess.PIPE, check=True, timeout=LONGEST_S)
    took = time.perf_counter() - began
    available = took * (os.cpu_count() or 1)
    return {
        "raw": json.loads(done.stdout),
        "at": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "quick": quick and name in QUICK,
        "took_s": round(took, 1),
        "own_share": round((_children_s() - own) / available, 3),
        "others_share": round(max(0.0, 1 - (_idle_s() - idle + _children_s() - own) / available), 3),
    }


def _await_quiet(seconds: float) -> None:
    """Until the CPUs were idle for most of a second, or `seconds` are over."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and psutil.cpu_percent(interval=1.0) > BUSY_PERCENT:
        pass


def _idle_s() -> float:
    times = psutil.cpu_times()
    return float(times.idle + getattr(times, "iowait", 0.0))


def _children_s() -> float:
    """CPU of the benches and of all their processes: each waits for its own."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _rows(name: str, known: Mapping[str, Kept]) -> list[Bar]:
    if name not in known:
        return [read.open_bar(name, "", f"not measured: scripts/bench --only {name}")]
    return list(BENCHES[name].rows(known[name]["raw"]))


def _kept() -> list[Bar]:
    """Bars whose figures other commands leave behind."""
    cells = [found for path in sorted(PAPER.glob("*.json")) if (found := read_kept(path))]
    faults = read.fault(found) if (found := read_kept(FAULTS)) else ()
    return [*read.paper(cells), *faults]


def _table(bars: list[tuple[Bar, Kept | None]]) -> Table:
    table = Table(title="bars of DESIGN.md (Bars)", title_justify="left")
    for heading in ("bar", "p50", "p99", "bare", "ratio", "must be", "", "others' CPU", "when", "how"):
        table.add_column(heading, overflow="fold", justify="right" if heading in ("p50", "p99", "ratio") else "left")
    for bar, kept in bars:
        verdict = {True: "[green]met[/]", False: "[red]missed[/]", None: "[yellow]open[/]"}[bar.met]
        ratio = "" if bar.ratio is None else f"{bar.ratio:.2f}"
        when = "" if kept is None else kept["at"][5:16].replace("T", " ") + (" quick" if kept["quick"] else "")
        others = "" if kept is None else f"{kept['others_share']:.0%}"
        cells = (bar.what, bar.p50 or "", bar.p99 or "", bar.bare or "", ratio, bar.limit)
        table.add_row(*cells, verdict, others, when, bar.how)
    return table


if __name__ == "__main__":
    sys.exit(main())
