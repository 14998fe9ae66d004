"""One cell of the paper's tables on the real clock: real controller, daemons and gRPC, emulated devices.

Owns a cell's processes from start to end, and turning what they recorded into what a run in virtual time leaves:
both are then counted by the same arithmetic (`planning_result`). The load is `wavepp bench`'s; prefixes to be
reused are computed once, through the real protocol, before it. Called by `paper_real_all`, one cell at a time.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.bench.paper_cells import PROFILES, profile_of, timeline
from tests.bench.paper_real_cells import SEED, RealTask
from wavepp import AsyncClient, RetryPolicy
from wavepp.bench.cells import Cell
from wavepp.bench.running import Options, RunningCell
from wavepp.local_cluster import LocalCluster, LocalPlan
from wavepp_proto.profile import Profile
from wavepp_proto.runtime import span_names
from wavepp_proto.runtime.timeline_layout import CollectedSpan
from wavepp_proto.runtime.trace_sink import TraceSink
from wavepp_proto.terms import Attempt, HoldKey, RequestId, Row
from wavepp_simulator.bounds import family_bound
from wavepp_simulator.planning_load import Asked, Played
from wavepp_simulator.planning_result import summarise
from wavepp_simulator.timed_engine import Ran

FOLDER = Path("client/wavepp/profiles")
PREFIX = "paper-"
DEADLINE_S = 1800.0
SPANS = 2_000_000
"""More than any cell records."""
PHASES = (
    span_names.REQUEST, span_names.QUEUE, span_names.HASH, span_names.ANNOUNCE, span_names.CAPACITY_WAIT,
    span_names.WAIT_BEHIND, span_names.PIN_RESERVE, span_names.PREPARE, span_names.ADMISSION, span_names.SCHEDULE,
)  # fmt: skip
_ROW = (span_names.CHUNK_START, span_names.CHUNK_LENGTH, span_names.STAGE, span_names.WAVE_ORDINAL)
SILENCE_MS = 10_000
"""A crowded machine shall not end a measurement."""


async def measure(task: RealTask) -> dict[str, Any]:
    """The result of one task, ready for JSON. Whatever ends it, its processes are ended.

    Raises WaveppError if the cluster does not come up or a prefix cannot be computed."""
    profile, began = profile_of(task.model), time.perf_counter()
    sink = await TraceSink.start(limit=SPANS)
    try:
        async with _cluster(task, profile, sink.endpoint) as (address, client):
            up_s = time.perf_counter() - began
            options = Options(address, DEADLINE_S, task.name, request_prefix=PREFIX, tail=False)
            cell = RunningCell(client, await client.describe(), _cell(task), options, {})
            await cell.measure()
    finally:
        await sink.close()
    document = cell.document()
    played = played_of(sink.spans, cell, task)
    found, bound = summarise(profile, played), family_bound(profile, task.family)
    return {
        "name": task.name,
        "model": task.model,
        "cell": task.cell._asdict(),
        "mode": task.mode,
        "policy": task.policy,
        "speedup": task.speedup,
        "bound": bound,
        "tokens_per_s": found["work_of_bound"] * bound,
        "up_s": round(up_s, 1),
        "took_s": round(time.perf_counter() - began, 1),
        "began": document["began"],
        "usage": document["usage"],
        "requests": document["requests"],
        "failures": document["failed"],
        "phases_ms": phases_ms(sink.spans, cell),
        "result": {**found, "timeline": timeline(played)},
    }


@asynccontextmanager
async def _cluster(task: RealTask, profile: Profile, traces: str) -> AsyncIterator[tuple[str, AsyncClient]]:
    """All processes of one cell, on ports of their own."""
    with tempfile.TemporaryDirectory(prefix="wavepp-paper-") as folder:
        running = LocalCluster(plan_of(task, profile, traces), Path(folder))
        try:
            await running.start()
            async with AsyncClient(running.address, retry=RetryPolicy(attempts=1)) as client:
                yield running.address, client
        finally:
            await running.close()


def plan_of(task: RealTask, profile: Profile, traces: str = "") -> LocalPlan:
    """The profile's devices under the task's policy and mode, with the settings that virtual time has."""
    file = FOLDER / f"{PROFILES[task.model]}.json"
    return LocalPlan(
        model=f"emulated:profile={file.resolve()},speedup={task.speedup:g}",
        engine="emulated",
        stages=len(profile.stages),
        pool_blocks=tuple(stage.pool_blocks for stage in profile.stages),
        host_pool_blocks=tuple(stage.host_pool_blocks for stage in profile.stages),
        state_slots=tuple(max(1, stage.state_slots) for stage in profile.stages),
        block_tokens=profile.block_tokens,
        wave_tokens=profile.wave_tokens,
        min_wave_tokens=profile.min_wave_tokens,
        fills=profile.fills,
        snapshot_tokens=profile.snapshot_tokens,
        policy=task.policy,
        mode=task.mode,
        link="grpc",
        listen="127.0.0.1:0",
        cluster="paper",
        otlp=traces or None,
        log_level="warning",
        silence_ms=SILENCE_MS,
    )


def _cell(task: RealTask) -> Cell:
    return Cell(
        family=task.cell.family, lengths=task.model, prompt_tokens=task.cell.tokens, seed=SEED,
        concurrency=task.cell.concurrency, seconds=task.seconds,
    )  # fmt: skip


def played_of(spans: Iterable[CollectedSpan], cell: RunningCell, task: RealTask) -> Played:
    """What a run in virtual time of this cell would have left; times are seconds of the devices."""
    window, family, speed = cell.window, task.family, task.speedup
    asked: dict[RequestId, Asked] = {}
    for one in (*window.warmup, *window.measured, *window.tail):
        admitted = one.sent_s + one.admission_ms / 1e3
        asked[_name(one.number)] = Asked(
            family.prompt(one.number), one.sent_s * speed, admitted * speed, one.cached_tokens, 0.0,
            one.ended_s * speed, one.reason,
        )  # fmt: skip
    ran, copied = _waves(spans, cell.began_ns, speed)
    for wave in (wave for waves in ran.values() for wave in waves):
        for row in wave.rows:
            name = row.key.request_id
            if name not in asked:  # given up at the end
                asked[name] = Asked(family.prompt(int(name.removeprefix(PREFIX))), 0.0)
    measured = [asked[_name(one.number)] for one in window.measured]
    return Played(measured, window.opened_s * speed, window.closed_s * speed, ran, copied, asked)


def phases_ms(spans: Iterable[CollectedSpan], cell: RunningCell) -> dict[str, float]:
    """What each phase of a request took on average, of those that began in the measured time."""
    first, last = (cell.began_ns + round(at * 1e9) for at in (cell.window.opened_s, cell.window.closed_s))
    took: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        if span.name in PHASES and first <= span.start_ns < last:
            took[span.name].append((span.end_ns - span.start_ns) / 1e6)
    return {name: round(sum(took[name]) / len(took[name]), 2) for name in PHASES if name in took}


def _waves(spans: Iterable[CollectedSpan], began_ns: int, speed: float) -> tuple[dict[str, list[Ran]], int]:
    """Waves of the load by stage, in order; and how many blocks were copied."""
    rows: dict[tuple[int, int, int, int], list[Row]] = defaultdict(list)
    copied = 0
    for span in spans:
        told = span.attributes
        if span.name == span_names.COPY:
            copied += int(str(told[span_names.BLOCKS]))
        name = str(told.get(span_names.REQUEST_ID, ""))
        if span.name != span_names.EXECUTE or not name.startswith(PREFIX) or told[span_names.VOID]:
            continue
        start, length, stage, wave = (int(str(told[key])) for key in _ROW)
        place = (stage, span.start_ns - began_ns, span.end_ns - began_ns, wave)
        rows[place].append(Row(HoldKey(RequestId(name), Attempt(0)), start, length))
    ran: dict[str, list[Ran]] = defaultdict(list)
    for (stage, start_ns, end_ns, wave), of_wave in sorted(rows.items()):
        tokens = sum(row.length for row in of_wave)
        start_s, end_s = (ns * speed / 1e9 for ns in (start_ns, end_ns))
        ran[f"p0/{stage}.0"].append(Ran(start_s, end_s, wave, tokens, tuple(of_wave)))
    return dict(ran), copied


def _name(number: int) -> RequestId:
    return RequestId(f"{PREFIX}{number}")
