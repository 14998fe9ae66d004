"""Admission figures (DESIGN.md bars): hash, hint, one prepare round beside bare gRPC, admissions a second.

Real processes: etcd, a controller, P emulated stages at no cost per token, and this client. Times of
phases are the controller's own, taken from each result. Interleaves the bare fan-out with the rounds
so that both see the same machine. Prints one JSON object; nothing is asserted.

    scripts/bench-admission [--quick]
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
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.grpc_floor import fan_out
from wavepp import AsyncClient, PrefillResult
from wavepp.local_cluster import LocalCluster, LocalPlan

VOCABULARY = 32_000
ROUND_BYTES = 100
"""About what one prepare entry takes on the wire."""


def percentile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(q / 100 * (len(ordered) - 1)))]


def summary(values: list[float], scale: float = 1.0) -> dict[str, float]:
    return {
        "p50": round(statistics.median(values) * scale, 4),
        "p99": round(percentile(values, 99) * scale, 4),
        "n": len(values),
    }


def prompts(count: int, tokens: int, shared: int, seed: int) -> list[np.ndarray[Any, np.dtype[np.int32]]]:
    """`count` prompts of `tokens` tokens that share their first `shared` tokens."""
    rng = np.random.default_rng(seed)
    head = rng.integers(0, VOCABULARY, shared, dtype=np.int32)
    return [np.concatenate([head, rng.integers(0, VOCABULARY, tokens - shared, dtype=np.int32)]) for _ in range(count)]


def plan(stages: int, block_tokens: int, pool_blocks: int, wave_tokens: int) -> LocalPlan:
    return LocalPlan(
        model=f"emulated:layers=32,vocabulary={VOCABULARY},window=1048576",
        engine="emulated",
        stages=stages,
        pool_blocks=(pool_blocks,),
        block_tokens=block_tokens,
        wave_tokens=wave_tokens,
        listen="127.0.0.1:0",
        log_level="warning",
        silence_ms=10_000,
    )


async def one_round(stages: int, repeats: int) -> dict[str, Any]:
    """Sequential 4096-block prompts with a cached prefix: hash, hint, announce, one round."""
    tokens, block = 262_144, 64
    with tempfile.TemporaryDirectory() as folder:
        cluster = LocalCluster(plan(stages, block, 40_000, 262_144), Path(folder))
        await cluster.start()
        floor: list[float] = []
        results: list[PrefillResult] = []
        try:
            async with AsyncClient(cluster.address) as client:
                batch = prompts(repeats + 3, tokens, tokens - 4096, 1)
                for index, prompt in enumerate(batch):
                    result = await client.prefill(prompt)
                    if index >= 3:
                        results.append(result)
                    if index % 10 == 0:
                        floor += await fan_out(stages, ROUND_BYTES, 60)
        finally:
            await cluster.close()
    rounds = summary([r.timings.rounds_ms for r in results if r.rounds == 1])
    bare = summary(floor, 1e3)
    return {
        "stages": stages,
        "prompt_tokens": tokens,
        "block_tokens": block,
        "round_ms": rounds,
        "bare_fan_out_ms": bare,
        "round_over_bare_p50": round(rounds["p50"] / bare["p50"], 2),
        "round_over_bare_p99": round(rounds["p99"] / bare["p99"], 2),
        "hash_ms": summary([r.timings.hash_ms for r in results]),
        "hint_ms": summary([r.timings.hint_ms for r in results]),
        "announce_ms": summary([r.timings.announce_ms for r in results]),
        "admission_ms": summary([r.timings.admission_ms for r in results]),
    }


async def rate(stages: int, seconds: float, concurrency: int) -> dict[str, Any]:
    """Admissions a second with 4K-token prompts behind a shared prefix, all the way to the first token."""
    tokens = 4096
    with tempfile.TemporaryDirectory() as folder:
        cluster = LocalCluster(plan(stages, 64, 40_000, 16_384), Path(folder))
        await cluster.start()
        try:
            async with AsyncClient(cluster.address) as client:
                batch = prompts(256, tokens, tokens - 128, 2)
                await client.prefill(batch[0])
                done: list[PrefillResult] = []
                until = time.perf_counter() + seconds

                async def worker(offset: int) -> None:
                    index = offset
                    while time.perf_counter() < until:
                        done.append(await client.prefill(batch[index % len(batch)]))
                        index += concurrency

                started = time.perf_counter()
                await asyncio.gather(*(worker(offset) for offset in range(concurrency)))
                taken = time.perf_counter() - started
        finally:
            await cluster.close()
    return {
        "stages": stages,
        "concurrency": concurrency,
        "prompt_tokens": tokens,
        "admissions_per_s": round(len(done) / taken, 1),
        "admission_ms": summary([r.timings.admission_ms for r in done]),
        "round_ms": summary([r.timings.rounds_ms for r in done]),
    }


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    report: dict[str, Any] = {
        "machine": platform.platform(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
        "rounds": [await one_round(stages, 20 if quick else 100) for stages in (4, 8)],
        "rate": [await rate(4, 5 if quick else 20, concurrency) for concurrency in (16, 64)],
    }
    sys.stdout.write(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
