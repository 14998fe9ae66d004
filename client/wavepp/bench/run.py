"""A bench: its cells one after the other on one pipeline, each kept when it is done.

Owns the order of cells, resuming, what is said meanwhile, and the document of the whole. What happens within a cell
is `running.py`. Called by `commands/bench.py`, whose Ctrl-C cancels it: `document()` then holds what was measured.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version

from wavepp import AsyncClient, ClusterStatus, Description
from wavepp.bench.cells import Cell
from wavepp.bench.machine import Machine
from wavepp.bench.running import Options, RunningCell, speed_up_of
from wavepp.bench.stages import pipeline_of
from wavepp.bench.store import SCHEMA, Document, Store
from wavepp_proto.errors import InvalidRequest, PipelineUnavailable


@dataclass(frozen=True, slots=True)
class Plan:
    cells: Sequence[Cell]
    options: Options
    """`cache_salt` is the same for every cell if it was given; else each has one of its own."""
    own_salts: bool
    pipeline: str | None
    """The one that is measured; None takes the controller's default one."""
    command: Sequence[str]


class Bench:
    def __init__(self, client: AsyncClient, plan: Plan, store: Store, say: Callable[[str], None]) -> None:
        self._client = client
        self._plan = plan
        self._store = store
        self._say = say
        self._began = datetime.now(UTC)
        self._cells: list[Document] = []
        self._earlier: list[Document] = []
        """Cells of other benches in the same folder."""
        self._running: RunningCell | None = None
        self._versions: Document = {}

    async def run(self) -> None:
        """Raises what makes going on pointless; failed requests are part of the result."""
        about = await self._client.describe(self._plan.pipeline)
        status = await self._client.status()
        shared = _shared(about, status, self._plan.options)
        self._versions = _versions(status)
        self._earlier = self._store.others({cell.name for cell in self._plan.cells}, shared)
        for number, cell in enumerate(self._plan.cells, 1):
            title = f"{number}/{len(self._plan.cells)} {cell.name}"
            done = self._store.done(cell.name, cell.settings() | shared)
            if done is not None:
                self._say(f"{title}: measured before, {done['began']}")
                self._cells.append(done)
                continue
            self._say(f"{title} ...")
            await self._measure(cell, about, shared)
            self._say(f"{title}: {in_short(self._cells[-1])}")

    async def _measure(self, cell: Cell, about: Description, shared: Document) -> None:
        salt = f"bench-{uuid.uuid4().hex[:12]}" if self._plan.own_salts else self._plan.options.cache_salt
        self._running = RunningCell(self._client, about, cell, replace(self._plan.options, cache_salt=salt), shared)
        await self._running.measure()
        self._cells.append(self._running.document())
        self._running = None
        self._store.put(self._cells[-1])

    @property
    def unexpected_failures(self) -> int:
        under_way = self._running.window.unexpected if self._running else 0
        return under_way + sum(int(cell["unexpected_failures"]) for cell in self._cells)

    def document(self) -> Document:
        """All cells of the folder, one that was interrupted (if it has anything) last; none until one was measured."""
        cells = list(self._cells)
        if self._running is not None and self._running.window.measured:
            cells.append(self._running.document(interrupted=True))
        return {
            "schema": SCHEMA,
            "command": list(self._plan.command),
            "began": self._began.isoformat(timespec="seconds"),
            "ended": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": asdict(Machine.here()),
            "versions": self._versions,
            "cells": [*self._earlier, *cells] if cells else [],
        }


def in_short(cell: Document) -> str:
    """One line of a measured cell for a person."""
    summary = cell["summary"]
    completion = summary["completion_ms"]
    times = f", completion p50 {completion[0]:.0f} ms, p99 {completion[2]:.0f} ms" if completion else ""
    failed = ", ".join(f"{count} {reason}" for reason, count in cell["failed"].items())
    return f"{summary['input_tokens_per_s']:,.0f} input tokens/s{times}" + (f"; failed: {failed}" if failed else "")


def _shared(about: Description, status: ClusterStatus, options: Options) -> Document:
    """Settings that are not the cell's own, and what tells this pipeline from another."""
    pipeline = pipeline_of(status, about.pipeline)
    if pipeline is None:
        raise PipelineUnavailable(f"the controller has no pipeline {about.pipeline}", pipeline=about.pipeline)
    profile = options.profile
    if profile is not None and len(profile.stages) != about.stages:
        raise InvalidRequest(
            f"profile {profile.name} is of another pipeline: it has {len(profile.stages)} stages",
            field="profile", value=len(profile.stages), limit=about.stages,
        )  # fmt: skip
    facts = ("pipeline", "model", "stages", "block_tokens", "wave_tokens", "policy", "mode", "link")
    return {name: getattr(pipeline, name) for name in facts} | {
        "deadline_s": options.deadline_s,
        "preload": options.preload,
        "profile": profile.name if profile else None,
        "speed_up": options.speed_up or speed_up_of(about.model),
    }


def _versions(status: ClusterStatus) -> Document:
    daemons = [daemon for pipeline in status.pipelines for daemon in pipeline.daemons]
    stages = sorted({f"{daemon.engine} {daemon.version}" for daemon in daemons})
    packages = {name: version(name) for name in ("grpcio", "numpy", "protobuf")}
    from wavepp import __version__

    return {"client": __version__, "controller": status.version, "stages": stages, **packages}
