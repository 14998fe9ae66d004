"""Items about whole clusters of the torch engine: exact answers, what is chosen for one device, a stage killed."""

from __future__ import annotations

import asyncio
import signal
import time

import torch

# What the stages, processes of their own, need: where it cannot be imported, these items say so.
import wavepp_stage.engine.torch.engine  # noqa: F401
from tests.gpu.cluster import ANSWER_S, B, Cluster, exhaust, reuse
from tests.gpu.items import Host
from tests.gpu.unsplit import prompt
from wavepp.errors import WaveppError


def torch_cluster(host: Host) -> str:
    async def story(cluster: Cluster) -> str:
        link = (await cluster.pipeline()).link
        assert link == "gloo", f"link {link} for two stages on one device"
        return f"link {link} chosen; {await reuse(cluster)}; {await exhaust(cluster)}"

    return Cluster(host, "torch", 2, host.model()).tell(story)


def killed_stage(host: Host) -> str:
    """SIGKILL in the middle of a prompt; the stage comes back, its GPU memory came back before."""
    made = Cluster(host, "torch", 2, host.model())
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
