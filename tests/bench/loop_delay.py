"""How late the event loop of ONE daemon runs while its executor computes (DESIGN.md, Bars).

Run as a module it IS a stage daemon, with a finer probe than the one that feeds its heartbeats: every
millisecond instead of ten times a second, and only while a wave is executed. It prints what it saw when
it ends. `measure` runs it in a cluster of one stage whose executor a client keeps busy, beside a process
that does nothing but probe: what that one sees is the machine's share. Used by `admission.py`.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from wavepp import AsyncClient
from wavepp.local_cluster import LocalCluster, LocalPlan

PROBE_S = 0.001
TOKENS = 16_384
MARK = "loop delays: "
MODULE = "tests.bench.loop_delay"


class ProbedCluster(LocalCluster):
    def _command(self, module: str, argv: list[str]) -> list[str]:
        if module != "wavepp_stage":
            return super()._command(module, argv)
        return [sys.executable, "-m", MODULE, *argv]  # found in the checkout, the current folder


async def measure(seconds: float) -> dict[str, Any]:
    """Delays in ms, of the daemon and of the process that only probes."""
    plan = LocalPlan(
        model="emulated", engine="emulated", stages=1, pool_blocks=(4096,), listen="127.0.0.1:0",
        log_level="warning", silence_ms=10_000,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        running = ProbedCluster(plan, Path(folder))
        await running.start()
        try:
            bare = await asyncio.create_subprocess_exec(
                sys.executable, "-m", MODULE, str(seconds), stdout=asyncio.subprocess.PIPE
            )
            requests = await _keep_busy(running.address, seconds)
            log = running.children["stage-0"].log
            alone = _told((await bare.communicate())[0].decode())
        finally:
            await running.close()
        found = _told(log.read_text())
    return {"requests": requests, "prompt_tokens": TOKENS, "daemon": found, "only_probing": alone, "bar_p99_ms": 2.0}


async def _keep_busy(address: str, seconds: float) -> int:
    rng = np.random.default_rng(5)
    requests = 0
    async with AsyncClient(address) as client:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            batch = [rng.integers(0, 1000, TOKENS, dtype=np.int32) for _ in range(4)]
            await asyncio.gather(*(client.prefill(prompt) for prompt in batch))
            requests += len(batch)
    return requests


def _told(text: str) -> dict[str, float]:
    line = next(line for line in text.splitlines() if line.startswith(MARK))
    found: dict[str, float] = json.loads(line.removeprefix(MARK))
    return found


class Probe:
    def __init__(self, counts: Callable[[], bool]) -> None:
        """`counts` says whether a delay that is seen now is kept."""
        self._counts = counts
        self._delays: list[float] = []

    async def run(self) -> None:
        while True:
            counts, before = self._counts(), time.perf_counter()
            await asyncio.sleep(PROBE_S)
            if counts or self._counts():
                self._delays.append(max(0.0, time.perf_counter() - before - PROBE_S))

    def report(self) -> None:
        found = {f"p{q}_ms": round(float(np.percentile(self._delays, q)) * 1e3, 3) for q in (50, 99)}
        sys.stdout.write(f"{MARK}{json.dumps({**found, 'n': len(self._delays)})}\n")


def serve() -> None:
    """A stage daemon, with the command line of one."""
    from wavepp_stage.__main__ import main
    from wavepp_stage.runtime import daemon
    from wavepp_stage.runtime.executor import Executor

    executors: list[Executor] = []

    class Watched(Executor):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            executors.append(self)

    probe = Probe(lambda: executors[0].executing is not None)
    vars(daemon).update(Executor=Watched, probe_loop=lambda _: probe.run())
    atexit.register(probe.report)
    main()


async def only_probe(seconds: float) -> None:
    probe = Probe(lambda: True)
    running = asyncio.create_task(probe.run())
    await asyncio.wait([running], timeout=seconds)
    probe.report()


if __name__ == "__main__":
    if len(sys.argv) == 2:
        asyncio.run(only_probe(float(sys.argv[1])))
    else:
        serve()
