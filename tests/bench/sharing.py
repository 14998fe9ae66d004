"""What waiting behind a request with the same prefix saves and costs: one burst, with and without it.

Four emulated stages in this process, real gRPC. The first request of a burst starts cold; `requests - 1` more with
the same `shared` tokens and a suffix of their own arrive with it. Prints one JSON object a mode (medians of rounds).
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from typing import Annotated, Any

import typer

from tests.harness.cluster import Cluster

MODEL = "emulated:layers=8,vocabulary=1000,window=65536,token_us=20,wave_us=500"
SUFFIX = 256


async def burst(cluster: Cluster, requests: int, shared: int, salt: int) -> dict[str, float]:
    """One burst over prefixes never seen before."""
    prefix = [(salt * 7919 + at * 31) % 1000 for at in range(shared)]
    prompts = [prefix + [(salt + own * 13 + at) % 1000 for at in range(SUFFIX)] for own in range(requests)]
    begun = time.perf_counter()

    async def one(prompt: list[int]) -> tuple[int, float, float]:
        result = await cluster.client.prefill(prompt)
        return result.cached_tokens, (time.perf_counter() - begun) * 1e3, result.timings.sharing_wait_ms

    done = await asyncio.gather(*(one(prompt) for prompt in prompts))
    total = requests * (shared + SUFFIX)
    cached = sum(cached for cached, _, _ in done)
    return {
        "prompt_tokens": total,
        "computed_tokens": total - cached,
        "makespan_ms": max(ended for _, ended, _ in done),
        "completion_p50_ms": statistics.median(ended for _, ended, _ in done),
        "sharing_wait_p50_ms": statistics.median(waited for _, _, waited in done),
    }


async def measure(requests: int, shared: int, rounds: int) -> dict[str, Any]:
    """Both modes take turns, so that whatever else runs disturbs both alike."""
    modes: dict[str, list[dict[str, float]]] = {"sharing": [], "no_sharing": []}
    kwargs: dict[str, Any] = {"stages": 4, "model": MODEL, "pool_blocks": (8192,), "wave_tokens": 2048}
    async with Cluster(share_tokens=None, **kwargs) as on, Cluster(share_tokens=0, **kwargs) as off:
        for number in range(rounds):
            modes["sharing"].append(await burst(on, requests, shared, number))
            modes["no_sharing"].append(await burst(off, requests, shared, number))
    report: dict[str, Any] = {"requests": requests, "shared_tokens": shared, "suffix_tokens": SUFFIX, "rounds": rounds}
    for mode, found in modes.items():
        report[mode] = {name: round(statistics.median(one[name] for one in found), 1) for name in found[0]}
    for name in ("computed_tokens", "makespan_ms", "completion_p50_ms"):
        report[f"{name}_ratio"] = round(report["sharing"][name] / report["no_sharing"][name], 3)
    return report


def main(
    requests: Annotated[int, typer.Option(help="Prompts in one burst.")] = 16,
    shared: Annotated[int, typer.Option(help="Tokens of the common prefix.")] = 4096,
    rounds: Annotated[int, typer.Option(help="Bursts of each mode.")] = 5,
) -> None:
    print(json.dumps(asyncio.run(measure(requests, shared, rounds)), indent=2))


if __name__ == "__main__":
    typer.run(main)
