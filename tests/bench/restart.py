"""From a controller's restart to a pipeline that serves with the index it had (DESIGN.md, Bars).

Real processes: etcd, a controller and four emulated stages whose pools were filled with `BLOCKS` blocks each by real
prompts of a million tokens. The controller is asked to end, and started again; the clock runs from its start until
Admin.Status shows the pipeline serving and every daemon's digest complete, with as many blocks as before. Bare: how
long the same four snapshots take when a reader only parses them. Prints one JSON object:
`python -m tests.bench.restart [--quick]` (a tenth of the blocks).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import psutil

from wavepp import AsyncClient
from wavepp.local_cluster import LocalCluster, LocalPlan
from wavepp_proto import convert
from wavepp_proto.runtime.channels import open_channel
from wavepp_proto.terms import Epoch, Fence, Formation, Incarnation
from wavepp_proto.v1 import admin_pb2, digest_pb2_grpc

STAGES = 4
BLOCK_TOKENS = 16
PROMPT_TOKENS = 1 << 20
PROMPT_BLOCKS = PROMPT_TOKENS // BLOCK_TOKENS
BLOCKS = 16 * PROMPT_BLOCKS
VOCABULARY = 1000
POLL_S = 0.02
LONGEST_S = 60.0
BAR_S = 3.0


def prompt(seed: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, PROMPT_TOKENS, dtype=np.int32)


async def measure(prompts: int) -> dict[str, Any]:
    plan = LocalPlan(
        model=f"emulated:layers=8,vocabulary={VOCABULARY},window={2 * PROMPT_TOKENS}", engine="emulated",
        stages=STAGES, block_tokens=BLOCK_TOKENS, pool_blocks=((prompts + 2) * PROMPT_BLOCKS,), wave_tokens=65_536,
        headroom_blocks=0, listen="127.0.0.1:0", log_level="warning", silence_ms=10_000,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        cluster = LocalCluster(plan, Path(folder))
        await cluster.start()
        try:
            filled_s = await _fill(cluster, prompts)
            had = _indexed(await cluster.status())
            found = await _restart(cluster, had)
            async with AsyncClient(cluster.address) as client:
                again = await client.prefill(prompt(0))
            assert again.cached_tokens == PROMPT_TOKENS - BLOCK_TOKENS, again
            memory = psutil.Process(cluster.children["controller"].process.pid).memory_info().rss
            bare_s, bare_blocks = await _bare(cluster)
        finally:
            await cluster.close()
    return {
        "blocks_a_stage": had[0],
        "stages": STAGES,
        "fill_s": round(filled_s, 2),
        **{name: round(value, 3) for name, value in found.items()},
        "bare_snapshots_s": round(bare_s, 3),
        "bare_blocks": bare_blocks,
        "controller_mib": round(memory / 2**20, 1),
        "bar_s": BAR_S,
    }


async def _fill(cluster: LocalCluster, prompts: int) -> float:
    began = time.perf_counter()
    async with AsyncClient(cluster.address) as client:
        for seed in range(prompts):
            await client.prefill(prompt(seed))
    wanted = [prompts * PROMPT_BLOCKS] * STAGES
    async with asyncio.timeout(LONGEST_S):
        while True:
            if _indexed(await cluster.status()) == wanted:
                break
            await asyncio.sleep(POLL_S)
    return time.perf_counter() - began


async def _restart(cluster: LocalCluster, had: list[int]) -> dict[str, float]:
    old = cluster.children["controller"].process
    asked = time.perf_counter()
    old.send_signal(signal.SIGTERM)
    await old.wait()
    began = time.perf_counter()
    await cluster.start_controller(cluster.address)
    serving = None
    async with asyncio.timeout(LONGEST_S):
        while True:
            try:
                status = await cluster.status()
            except grpc.aio.AioRpcError:
                status = admin_pb2.StatusResponse()
            if serving is None and any(p.state == "serving" for p in status.pipelines):
                serving = time.perf_counter()
            if serving is not None and _indexed(status) == had:
                break
            await asyncio.sleep(POLL_S)
    ended = time.perf_counter()
    spent = psutil.Process(cluster.children["controller"].process.pid).cpu_times()
    return {
        "restart_s": ended - began,
        "controller_cpu_s": spent.user + spent.system,
        "serving_s": serving - began,
        "index_after_serving_s": ended - serving,
        "with_the_end_of_the_old_one_s": ended - asked,
    }


def _indexed(status: admin_pb2.StatusResponse) -> list[int]:
    """Blocks of every daemon whose digest is complete."""
    return [d.indexed_blocks for p in status.pipelines for d in p.daemons if d.digest_in_sync]


async def _bare(cluster: LocalCluster) -> tuple[float, int]:
    """Seconds and blocks of all stages' snapshots for a reader that keeps nothing; the controller is stopped."""
    status = await cluster.status()
    (pipeline,) = status.pipelines
    os.kill(cluster.children["controller"].process.pid, signal.SIGSTOP)

    async def read(daemon: admin_pb2.StageStatus) -> int:
        fence = Fence(Epoch(status.epoch), Formation(pipeline.formation), Incarnation(daemon.incarnation))
        blocks = 0
        async with open_channel(daemon.address) as channel:
            stub = digest_pb2_grpc.StageDigestStub(channel)
            async for page in stub.Watch(convert.watch_digest_to_pb(fence, 0)):
                blocks += sum(len(group.added) // 8 for group in page.groups)
                if page.last_page:
                    break
        return blocks

    began = time.perf_counter()
    blocks = sum(await asyncio.gather(*(read(daemon) for daemon in pipeline.daemons)))
    return time.perf_counter() - began, blocks


if __name__ == "__main__":
    share = 2 if "--quick" in sys.argv[1:] else 16
    print(json.dumps(asyncio.run(measure(share)), indent=2))
