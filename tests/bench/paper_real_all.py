"""All cells of the paper's tables that are measured on the real clock, one after the other, and their twins.

Owns what is kept between runs and the order: a result that exists for this state of the code is not measured again.
A twin is the same cell in virtual time, with as many measured requests; it is played after the measuring, which
has the machine to itself. Called by `paper`.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tests.bench.kept import read_kept, write_kept
from tests.bench.paper_cells import Task, in_virtual_time
from tests.bench.paper_real import measure
from tests.bench.paper_real_cells import RealTask, expected_s, real_tasks
from tests.bench.paper_real_report import RealRow, rows
from tests.bench.paper_report import Tables
from wavepp_proto.errors import WaveppError
from wavepp_simulator.planning_result import summarise

Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Twin:
    """A measured cell in virtual time."""

    task: Task
    measured: int
    """Requests that the real clock measured."""

    @property
    def key(self) -> str:
        return f"{self.task.key}-{self.measured}"


class RealHalf:
    """Results of measured cells in a folder: a JSON file for each cell and combination, and one for its twin."""

    def __init__(self, folder: Path, rounds: Mapping[str, float], only: str, seconds: float, speedup: float) -> None:
        """`rounds`: milliseconds of a prepare round by model, for the twins; `only`: how names begin."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._rounds = folder, rounds
        every = real_tasks(list(rounds), seconds, speedup)
        self.tasks = [task for task in every if task.name.startswith(only)]

    def measure(self) -> None:
        """Whatever is not known, each result written as soon as it is there.

        SIGTERM and Ctrl-C end it and the processes of the cell under way: then it raises KeyboardInterrupt."""
        due, began = self.missing, time.monotonic()
        print(f"{len(due)} measurements, about {sum(map(expected_s, due)) / 60:.0f} minutes", file=sys.stderr)
        for number, task in enumerate(due, 1):
            key = task.key  # before: whoever changes the code meanwhile did not change what runs
            try:
                result = asyncio.run(_until_told(task))
            except asyncio.CancelledError:
                raise KeyboardInterrupt from None
            except WaveppError as error:
                print(f"{task.name}: {type(error).__name__}: {error}", file=sys.stderr)
                continue
            self._write(task.name, key, result)
            print(f"[{number}/{len(due)}, {time.monotonic() - began:.0f} s] {in_short(result)}", file=sys.stderr)

    @property
    def missing(self) -> list[RealTask]:
        """What was not measured with this code, or not without failures."""
        return [
            task
            for task in self.tasks
            if (found := self._read(task.name)) is None or found["key"] != task.key or found["failures"]
        ]

    def play_twins(self, jobs: int) -> None:
        """Those that are missing, of another state of the code or another round."""
        due = {
            task.name: twin
            for task in self.tasks
            if (twin := self._twin(task)) is not None
            and ((found := self._twin_of(task)) is None or found["key"] != twin.key)
        }
        # Not forked: gRPC's threads of the measuring would not survive it.
        with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
            for (name, twin), played in zip(due.items(), pool.map(play_twin, due.values()), strict=True):
                self._write(f"{name}.twin", twin.key, played)

    def rows(self, tables: Tables) -> list[RealRow]:
        """Everything that is there; a twin with another number of requests than were measured is none."""
        found: list[tuple[Result, Result | None]] = []
        for task in self.tasks:
            real, twin = self._read(task.name), self._twin(task)
            played = self._twin_of(task)
            if real is not None and twin is not None:
                fits = played is not None and played["measured"] == twin.measured
                found.append((real, played if fits else None))
        return rows(found, tables)

    @property
    def note(self) -> str:
        found = [(task, real) for task in self.tasks if (real := self._read(task.name)) is not None]
        stale = sum(real["key"] != task.key for task, real in found)
        twins = [(twin, played) for task, _ in found if (twin := self._twin(task)) and (played := self._twin_of(task))]
        older = sum(played["key"] != twin.key for twin, played in twins)
        return (
            f"{len(found)} of {len(self.tasks)} measurements are there, {stale} of them of another state of the code; "
            f"{len(twins)} of their twins, {older} of them of another state."
        )

    def _twin(self, task: RealTask) -> Twin | None:
        """None while nothing was measured."""
        real = self._read(task.name)
        if real is None:
            return None
        virtual = Task(task.model, task.cell, task.mode, task.policy, self._rounds[task.model])
        return Twin(virtual, real["requests"]["measured"])

    def _twin_of(self, task: RealTask) -> Result | None:
        """What was played, whenever that was."""
        return self._read(f"{task.name}.twin")

    def _read(self, name: str) -> Result | None:
        return read_kept(self._folder / f"{name}.json", "key")

    def _write(self, name: str, key: str, result: Result) -> None:
        write_kept(self._folder / f"{name}.json", {"key": key, **result})


def in_short(result: Result) -> str:
    """One line for a person."""
    found, usage = result["result"], result["usage"] or {"others": 0.0}
    failed = "".join(f", {count} {reason}" for reason, count in result["failures"].items())
    return (
        f"{result['name']}: {result['tokens_per_s']:11,.0f} tokens/s, {found['work_of_bound']:.1%} of the bound, "
        f"{found['requests']} requests in {found['measured_s']:.1f} s, others took {usage['others']:.0%} of the CPU"
        + failed
    )


async def _until_told(task: RealTask) -> Result:
    """SIGTERM is as good as Ctrl-C: both cancel, and cancelling ends the cluster."""
    loop, measuring = asyncio.get_running_loop(), asyncio.current_task()
    assert measuring is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, measuring.cancel)
    return await measure(task)


def play_twin(twin: Twin) -> Result:
    device, played = in_virtual_time(twin.task, twin.measured)
    return {
        "measured": twin.measured,
        "round_ms": twin.task.overheads.round_s * 1e3,
        "result": summarise(device, played),
    }
