"""Items about whole clusters of processes: exact answers, what is chosen for one device, a stage killed.

The same story serves the torch engine and, where it is installed, TensorRT-LLM.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig

from tests.gpu.items import FLOAT32_TOLERANCE, Host, Skip, Unsplit, distance, prompt
from tests.harness.ports import free_port
from tests.harness.tiny_models import VOCABULARY, WINDOW, save_random
from wavepp import AsyncClient, RetryPolicy, Sampling
from wavepp.errors import WaveppError
from wavepp.local_cluster import LocalCluster, LocalPlan

B = 32
ANSWER_S = 60.0


class Cluster:
    """A cluster that serves, its client, and the unsplit model."""

    def __init__(self, host: Host, engine: str, stages: int, **plan: Any) -> None:
        self.host = host
        exact = engine == "torch"
        model = host.model() if exact else _trtllm_model(host)
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


async def _reuse(cluster: Cluster) -> str:
    """Cold, reused, chunked (longer than a wave), many at once."""
    shared = prompt(6 * B, 1)
    cold = await cluster.answer([*shared, *prompt(30, 2)])
    reused = await cluster.answer([*shared, *prompt(50, 3)])
    assert (cold, reused) == (0, 6 * B), f"{cold} tokens reused by a cold prompt, {reused} by its successor"
    await cluster.answer(prompt(20 * B + 5, 4))
    await asyncio.gather(*(cluster.answer([*shared, *prompt(40 + 9 * seed, seed)]) for seed in range(10, 16)))
    return f"cold, {reused} tokens reused, chunked and together exact"


async def _exhaust(cluster: Cluster) -> str:
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


def torch_cluster(host: Host) -> str:
    async def story(cluster: Cluster) -> str:
        link = (await cluster.pipeline()).link
        assert link == "gloo", f"link {link} for two stages on one device"
        return f"link {link} chosen; {await _reuse(cluster)}; {await _exhaust(cluster)}"

    return Cluster(host, "torch", 2).tell(story)


def killed_stage(host: Host) -> str:
    """SIGKILL in the middle of a prompt; the stage comes back, its GPU memory came back before."""
    made = Cluster(host, "torch", 2)
    made.plain.logits(prompt(200))  # what this process takes of the GPU it has by now
    free = torch.cuda.mem_get_info(host.device)[0] if host.cuda else 0

    async def story(cluster: Cluster) -> str:
        await cluster.answer(prompt(200, 1))
        before = (await cluster.pipeline()).formation
        under_way = asyncio.ensure_future(cluster.answer(prompt(30 * B, 2)))
        child = cluster.local.children[cluster.local.plan.name(1, 0)]
        child.process.send_signal(signal.SIGKILL)
        await child.process.wait()
        killed = time.monotonic()
        await cluster.local.start_stage(1)
        while not ((found := await cluster.pipeline()).state == "serving" and found.formation > before):
            assert time.monotonic() - killed < ANSWER_S, f"not serving again after {ANSWER_S:g} s: {found.state}"
            await asyncio.sleep(0.1)
        seconds = time.monotonic() - killed
        try:
            await under_way
        except WaveppError as error:  # typed: the client's tries may end before the stage is back
            ended = type(error).__name__
        else:
            ended = "tried again and answered"
        await cluster.answer(prompt(200, 1))
        return f"serving again after {seconds:.1f} s; the prompt under way: {ended}"

    said = made.tell(story)
    if host.cuda:
        left = free - torch.cuda.mem_get_info(host.device)[0]
        assert left < 64 << 20, f"{left >> 20} MiB of the GPU are not back"
        said += "; all GPU memory back"
    return said


# --- TensorRT-LLM ---------------------------------------------------------------------------------


def _trtllm_model(host: Host) -> Path:
    """Of heads that its kernels have: the tiny models' are too small for them."""
    config = LlamaConfig(
        num_hidden_layers=5, hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCABULARY, max_position_embeddings=WINDOW, initializer_range=0.05,
    )  # fmt: skip
    return save_random(config, host.folder / "llama-5x256")


def _need_trtllm() -> None:
    if importlib.util.find_spec("tensorrt_llm") is None:
        raise Skip("tensorrt_llm is not installed in this environment")


def doctor(host: Host) -> str:
    """Everything the adapter touches in the installed package, by name and parameters."""
    _need_trtllm()
    asked = [sys.executable, "-m", "wavepp", "doctor", "--engine", "trtllm", "--json"]
    ended = subprocess.run(asked, capture_output=True, text=True, timeout=240, check=False)
    findings = json.loads(ended.stdout)
    missing = [f"{one['what']}: {one['detail']}" for one in findings if not one["ok"]]
    assert ended.returncode == 0, "; ".join(missing)
    return f"{len(findings)} findings, all well"


def trtllm_stage(host: Host) -> str:
    _need_trtllm()

    async def story(cluster: Cluster) -> str:
        return f"{await _reuse(cluster)}; {await _exhaust(cluster)}"

    return Cluster(host, "trtllm", 1).tell(story)


def trtllm_uneven(host: Host) -> str:
    _need_trtllm()
    host.gpus(2)
    return Cluster(host, "trtllm", 2, layers=("0:3", "3:5")).tell(_reuse)
