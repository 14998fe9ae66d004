"""Admission figures (DESIGN.md bars): hash, hint, one prepare round beside bare gRPC, admissions a second.

Real processes: etcd, a controller, P emulated stages and this client. Times of phases are the
controller's own, taken from each result. The bare fan-out runs between the rounds of the same run, so
that both see the same machine; every part says which share of the machine others took and what each
process spent per request. Prints one JSON object; nothing is asserted.

    scripts/bench-admission [--quick] [--only cores|rounds|rate|isolated|loop ...]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench import hashing, hint, loop_delay, stage_core
from tests.bench.grpc_floor import FanOut
from tests.bench.meter import Meter
from wavepp import AsyncClient, PrefillResult
from wavepp.local_cluster import LocalCluster, LocalPlan

VOCABULARY = 32_000
ROUND_BYTES = 100
"""About what one prepare entry takes on the wire."""
Prompts = list[np.ndarray[Any, np.dtype[np.int32]]]


def percentile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(q / 100 * (len(ordered) - 1)))]


def summary(values: list[float], scale: float = 1.0) -> dict[str, float]:
    return {
        "p50": round(statistics.median(values) * scale, 4),
        "p99": round(percentile(values, 99) * scale, 4),
        "n": len(values),
    }


def prompts(count: int, tokens: int, shared: int, seed: int) -> Prompts:
    """`count` prompts of `tokens` tokens that share their first `shared` tokens."""
    rng = np.random.default_rng(seed)
    head = rng.integers(0, VOCABULARY, shared, dtype=np.int32)
    return [np.concatenate([head, rng.integers(0, VOCABULARY, tokens - shared, dtype=np.int32)]) for _ in range(count)]


@asynccontextmanager
async def cluster(
    stages: int, wave_tokens: int = 16_384, preset: str = ""
) -> AsyncIterator[tuple[LocalCluster, AsyncClient]]:
    """Emulated stages with room for everything, and a client; `preset` gives the engine costs."""
    plan = LocalPlan(
        model=f"emulated:layers=32,vocabulary={VOCABULARY},window=1048576{preset}",
        engine="emulated",
        stages=stages,
        pool_blocks=(40_000,),
        block_tokens=64,
        wave_tokens=wave_tokens,
        listen="127.0.0.1:0",
        log_level="warning",
        silence_ms=10_000,
    )
    with tempfile.TemporaryDirectory() as folder:
        running = LocalCluster(plan, Path(folder))
        await running.start()
        try:
            async with AsyncClient(running.address) as client:
                yield running, client
        finally:
            await running.close()


def meter(running: LocalCluster) -> Meter:
    return Meter(running.pids() | {"client": os.getpid()})


async def one_round(stages: int, repeats: int) -> dict[str, Any]:
    """Sequential 4096-block prompts with a cached prefix: hash, announce, one round.

    A bare fan-out follows every request, as cold as the round was; and runs of them, with warm caches.
    """
    tokens = 262_144
    cold: list[float] = []
    warm: list[float] = []
    results: list[PrefillResult] = []
    async with cluster(stages, wave_tokens=tokens) as (running, client), FanOut(stages, ROUND_BYTES) as floor:
        batch = prompts(repeats + 3, tokens, tokens - 4096, 1)
        for prompt in batch[:3]:
            await client.prefill(prompt)
        spent = meter(running)
        for index, prompt in enumerate(batch[3:]):
            results.append(await client.prefill(prompt))
            cold.append(await floor.turn())
            if index % 10 == 0:
                warm += await floor.turns(30)
        machine = spent.report(repeats)
    rounds = summary([r.timings.rounds_ms for r in results if r.rounds == 1])
    bare, bare_warm = summary(cold, 1e3), summary(warm, 1e3)
    return {
        "stages": stages,
        "prompt_tokens": tokens,
        "round_ms": rounds,
        "bare_fan_out_ms": bare,
        "bare_fan_out_warm_ms": bare_warm,
        **{f"round_over_bare_{q}": round(rounds[q] / bare[q], 2) for q in ("p50", "p99")},
        **{f"round_over_bare_warm_{q}": round(rounds[q] / bare_warm[q], 2) for q in ("p50", "p99")},
        "bar": 1.5,
        **{f"{phase}_ms": phases(results, phase) for phase in ("hash", "announce", "admission", "prefill")},
        "elapsed_ms": summary([r.elapsed_ms for r in results]),
        "machine": machine,
    }


def phases(results: list[PrefillResult], phase: str) -> dict[str, float]:
    return summary([getattr(result.timings, f"{phase}_ms") for result in results])


async def rate(stages: int, seconds: float, concurrency: int) -> dict[str, Any]:
    """Admissions a second with 4K-token prompts behind a shared prefix, all the way to the first token."""
    tokens = 4096
    done: list[PrefillResult] = []
    async with cluster(stages) as (running, client):
        batch = prompts(256, tokens, tokens - 128, 2)
        for prompt in batch[:8]:
            await client.prefill(prompt)
        until = time.perf_counter() + seconds

        async def worker(offset: int) -> None:
            index = offset
            while time.perf_counter() < until:
                done.append(await client.prefill(batch[index % len(batch)]))
                index += concurrency

        spent, started = meter(running), time.perf_counter()
        await asyncio.gather(*(worker(offset) for offset in range(concurrency)))
        taken = time.perf_counter() - started
        machine = spent.report(len(done))
    return {
        "stages": stages,
        "concurrency": concurrency,
        "prompt_tokens": tokens,
        "admissions_per_s": round(len(done) / taken, 1),
        "bar": 1000,
        **{f"{phase}_ms": phases(done, phase) for phase in ("announce", "queue", "rounds", "admission", "prefill")},
        "machine": machine,
    }


async def isolated(stages: int, repeats: int) -> dict[str, Any]:
    """One request at a time on an idle pipeline whose stages take 1 ms: what it takes beyond P ms and its admission."""
    beyond: list[float] = []
    results: list[PrefillResult] = []
    async with cluster(stages, preset=",wave_us=1000") as (running, client):
        batch = prompts(repeats + 3, 4096, 4096 - 128, 3)
        for prompt in batch[:3]:
            await client.prefill(prompt)
        spent = meter(running)
        for prompt in batch[3:]:
            result = await client.prefill(prompt)
            results.append(result)
            beyond.append(result.elapsed_ms - stages - result.timings.rounds_ms)
        machine = spent.report(repeats)
    return {
        "stages": stages,
        "elapsed_ms": summary([r.elapsed_ms for r in results]),
        "beyond_stages_and_round_ms": summary(beyond),
        "bar": 3.0,
        **{f"{phase}_ms": phases(results, phase) for phase in ("announce", "rounds", "admission", "prefill")},
        "machine": machine,
    }


def cores() -> dict[str, Any]:
    """Parts without processes: block hashes, hints, and what a stage does under its mutex."""
    return {
        "hashing": hashing.measure(131_072, 64, 51),
        "hint": hint.measure(),
        "stage_core": stage_core.cache_sections() | stage_core.whole_round(),
    }


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a fifth of the repeats")
    parser.add_argument("--only", nargs="*", help="parts to run; all by default")
    chosen = parser.parse_args()
    share = 5 if chosen.quick else 1
    parts: dict[str, list[Callable[[], Awaitable[Any]]]] = {
        "cores": [lambda: asyncio.to_thread(cores)],
        "rounds": [lambda: one_round(4, 100 // share), lambda: one_round(8, 100 // share)],
        "rate": [lambda at=at: rate(4, 20 / share, at) for at in (16, 64, 256)],  # type: ignore[misc]
        "isolated": [lambda: isolated(8, 100 // share)],
        "loop": [lambda: loop_delay.measure(20 / share)],
    }
    report: dict[str, Any] = {
        "machine": platform.platform(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
    }
    for name in chosen.only or parts:
        report[name] = [await part() for part in parts[name]]
    sys.stdout.write(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
