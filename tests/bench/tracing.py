"""What tracing one request in a hundred costs: CPU and throughput with and without it (DESIGN.md, Bars).

Two clusters of real processes stand beside each other, one traces (client, controller and stages, to a collector
that is a process of its own). They take turns with short bursts of 4K-token prompts, so that whatever else the
machine does falls on both; CPU per request of every process but the collector is the figure, as throughput on a
shared machine is noise. Prints one JSON object: `python -m tests.bench.tracing [--quick]`.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from wavepp import AsyncClient, TraceSettings
from wavepp.local_cluster import LocalCluster, LocalPlan
from wavepp_proto.runtime.trace_sink import TraceSink

STAGES = 4
TOKENS, SUFFIX = 4096, 128
VOCABULARY = 32_000
CONCURRENCY = 32
BURST = 400
SAMPLE = 0.01
BAR = 0.02
Prompts = list[np.ndarray[Any, np.dtype[np.int32]]]


class Arm(NamedTuple):
    """One of the two clusters."""

    client: AsyncClient
    pids: dict[str, int]
    """Everything that works for a request, by name: etcd, controller, stages and this process."""


class Burst(NamedTuple):
    cpu_ms: dict[str, float]
    """For one request, by kind of process."""
    per_s: float

    @property
    def all_ms(self) -> float:
        return sum(self.cpu_ms.values())


@asynccontextmanager
async def arm(endpoint: str | None) -> AsyncIterator[Arm]:
    plan = LocalPlan(
        model=f"emulated:layers=32,vocabulary={VOCABULARY},window=65536", engine="emulated", stages=STAGES,
        pool_blocks=(40_000,), listen="127.0.0.1:0", log_level="warning", silence_ms=10_000,
        otlp=endpoint, trace_sample=SAMPLE,
    )  # fmt: skip
    tracing = None if endpoint is None else TraceSettings("wavepp-client", endpoint, SAMPLE)
    with tempfile.TemporaryDirectory() as folder:
        cluster = LocalCluster(plan, Path(folder))
        await cluster.start()
        try:
            async with AsyncClient(cluster.address, tracing=tracing) as client:
                yield Arm(client, cluster.pids() | {"client": os.getpid()})
        finally:
            await cluster.close()


@asynccontextmanager
async def collector() -> AsyncIterator[str]:
    """Endpoint of a collector in a process of its own."""
    argv = [sys.executable, "-m", "tests.bench.tracing", "collect"]
    process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield (await process.stdout.readline()).decode().strip()
    finally:
        process.terminate()
        await process.wait()


async def collect() -> None:
    sink = await TraceSink.start()
    sys.stdout.write(f"{sink.endpoint}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


async def burst(one: Arm, prompts: Prompts, requests: int) -> Burst:
    left = iter(range(requests))

    async def worker() -> None:
        for number in left:
            await one.client.prefill(prompts[number % len(prompts)])

    before, began = _cpu_s(one.pids), time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(CONCURRENCY)))
    took, after = time.perf_counter() - began, _cpu_s(one.pids)
    return Burst({kind: (after[kind] - before[kind]) * 1e3 / requests for kind in after}, requests / took)


def _cpu_s(pids: dict[str, int]) -> dict[str, float]:
    """By kind: all stages are one."""
    found: dict[str, float] = {}
    for name, pid in pids.items():
        times, kind = psutil.Process(pid).cpu_times(), name.partition("-")[0]
        found[kind] = found.get(kind, 0.0) + times.user + times.system
    return found


async def measure(rounds: int, requests: int) -> dict[str, Any]:
    rng = np.random.default_rng(2)
    head = rng.integers(0, VOCABULARY, TOKENS - SUFFIX, dtype=np.int32)
    prompts = [np.concatenate([head, rng.integers(0, VOCABULARY, SUFFIX, dtype=np.int32)]) for _ in range(256)]
    found: dict[str, list[Burst]] = {"without": [], "with": []}
    async with AsyncExitStack() as stack:
        endpoint = await stack.enter_async_context(collector())
        arms = {
            "without": await stack.enter_async_context(arm(None)),
            "with": await stack.enter_async_context(arm(endpoint)),
        }
        for one in arms.values():
            await burst(one, prompts, requests)
        for number in range(rounds):
            for name in ("without", "with") if number % 2 else ("with", "without"):
                found[name].append(await burst(arms[name], prompts, requests))
    more = [traced.all_ms / plain.all_ms - 1 for traced, plain in zip(found["with"], found["without"], strict=True)]
    return {
        "stages": STAGES,
        "sample": SAMPLE,
        "prompt_tokens": TOKENS,
        "concurrency": CONCURRENCY,
        "rounds": rounds,
        "requests_a_burst": requests,
        **{
            f"{field}_{name}": round(statistics.median(getattr(one, field) for one in bursts), 4)
            for name, bursts in found.items()
            for field in ("all_ms", "per_s")
        },
        "cpu_ms": {
            kind: {name: round(statistics.median(one.cpu_ms[kind] for one in found[name]), 4) for name in found}
            for kind in found["with"][0].cpu_ms
        },
        "more_cpu_p50": round(statistics.median(more), 4),
        "more_cpu_quartiles": [round(value, 4) for value in statistics.quantiles(more, n=4)],
        "bar": BAR,
    }


if __name__ == "__main__":
    if sys.argv[1:] == ["collect"]:
        asyncio.run(collect())
    else:
        print(json.dumps(asyncio.run(measure(*((6, 150) if "--quick" in sys.argv[1:] else (24, BURST)))), indent=2))
