"""How many block hashes a second a controller takes in from the digests of four stages (DESIGN.md, Bars).

The controller is the real one, in this process, so that its index can be read without asking. The stages are real
daemons, each a process of its own, but for the core's digest: it tells deltas of `MAX_DIGEST_HASHES` hashes without
end, adding until `KNOWN` are known and then removing as many. Bare gRPC carries as many bytes before and after.
Prints one JSON object: `python -m tests.bench.ingest [--quick]`. With other arguments it IS such a daemon.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.digest_floor import messages_per_s
from wavepp.local_cluster import LocalCluster, LocalPlan
from wavepp_controller.core.config import ControllerConfig
from wavepp_controller.core.index import ReuseIndex
from wavepp_controller.runtime.controller import Controller
from wavepp_controller.runtime.settings import ControllerSettings
from wavepp_proto import convert
from wavepp_proto.digest import MASK, checksum
from wavepp_proto.limits import MAX_DIGEST_HASHES
from wavepp_proto.runtime.etcd_server import EtcdServer
from wavepp_proto.runtime.etcd_store import EtcdStore
from wavepp_proto.terms import (
    CacheGroup,
    Capacity,
    DaemonKey,
    Digest,
    DigestKind,
    GroupDigest,
    Incarnation,
    PipelineId,
    StageIndex,
)
from wavepp_stage.core.machine import StageMachine
from wavepp_stage.runtime.core_shell import CoreShell

MODULE = "tests.bench.ingest"
STAGES = 4
CHUNKS = 256
KNOWN = CHUNKS * MAX_DIGEST_HASHES
"""Hashes that each stage holds at most."""
BATCH = 64
"""Deltas that wait for a reader: as many as a daemon's backlog holds."""
SILENCE_MS = 10_000
BAR = 1_000_000


class Deltas:
    """One stage's digests: the same for every stage, as in a pipeline."""

    def __init__(self) -> None:
        self._chunks = np.random.default_rng(7).integers(0, 2**64, (CHUNKS, MAX_DIGEST_HASHES), dtype=np.uint64)
        self._sums = [checksum(chunk) for chunk in self._chunks]
        self._seq = self._at = self._count = self._sum = 0

    def since(self, seq: int, incarnation: Incarnation, capacity: Capacity) -> list[Digest]:
        if seq == 0 or seq != self._seq:
            self._seq += 1
            self._at = self._count = self._sum = 0
            nothing = GroupDigest(CacheGroup.ATTENTION, b"", b"", 0, 0)
            return [Digest(incarnation, self._seq, DigestKind.SNAPSHOT, (nothing,), capacity)]
        return [self._next(incarnation, capacity) for _ in range(BATCH)]

    def _next(self, incarnation: Incarnation, capacity: Capacity) -> Digest:
        place, adding = self._at % CHUNKS, self._at // CHUNKS % 2 == 0
        sign = 1 if adding else -1
        self._at, self._seq = self._at + 1, self._seq + 1
        self._count += sign * MAX_DIGEST_HASHES
        self._sum = (self._sum + sign * self._sums[place]) & MASK
        packed = self._chunks[place].tobytes()
        added, removed = (packed, b"") if adding else (b"", packed)
        group = GroupDigest(CacheGroup.ATTENTION, added, removed, self._count, self._sum)
        return Digest(incarnation, self._seq, DigestKind.DELTA, (group,), capacity)


class TellingShell(CoreShell):
    """A stage's core whose digest readers hear of changes that never were."""

    def __init__(self, machine: StageMachine, on_digest: Any) -> None:
        super().__init__(machine, on_digest)
        self._deltas = Deltas()

    def digests_since(self, seq: int) -> list[Digest]:
        told = self.read(
            lambda machine: self._deltas.since(seq, machine.standing.incarnation, machine.capacity())
        )  # fmt: skip
        self._on_digest()
        return told


class Listened(LocalCluster):
    """The controller runs in this process, the stages do nothing but tell."""

    async def listen_to(self) -> None:
        """Bring everything up and wait until every stage's digest has grown to its most."""
        self.etcd = await EtcdServer.start()
        self._store = EtcdStore(self._etcd_options())
        settings = ControllerSettings(ControllerConfig(silence_ms=SILENCE_MS), listen="127.0.0.1:0")
        self.controller = Controller(settings, self._store)
        await self.controller.start()
        for stage in range(self.plan.stages):
            await self.start_stage(stage)
        async with asyncio.timeout(self.plan.timeout_s):
            while not self.controller.machine.pipelines or self.index.distinct_blocks() < KNOWN:
                self._check_children()
                await asyncio.sleep(0.05)

    def _command(self, module: str, argv: list[str]) -> list[str]:
        return [sys.executable, "-m", MODULE, *argv]  # found in the checkout, the current folder

    @property
    def index(self) -> ReuseIndex:
        (pipeline,) = self.controller.machine.pipelines.values()
        return pipeline.index

    def applied(self) -> int:
        """Digests that were taken in, of all stages."""
        pipeline = PipelineId(self.plan.pipeline)
        return sum(self.index.seq_of(DaemonKey(pipeline, StageIndex(at))) for at in range(self.plan.stages))

    async def close(self) -> None:
        await self.controller.close()
        await self._store.close()
        await super().close()


async def taken_in(seconds: float) -> dict[str, float]:
    """Blocks a second, and blocks for each second of the controller's CPU."""
    plan = LocalPlan(
        model="emulated:layers=8,vocabulary=1000,window=65536", engine="emulated", stages=STAGES,
        pool_blocks=(2 * KNOWN,), listen="127.0.0.1:0", log_level="warning", silence_ms=SILENCE_MS,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        cluster = Listened(plan, Path(folder))
        try:
            await cluster.listen_to()
            began, cpu, before = time.perf_counter(), time.process_time(), cluster.applied()
            await asyncio.sleep(seconds)
            blocks = (cluster.applied() - before) * MAX_DIGEST_HASHES
            took, spent = time.perf_counter() - began, time.process_time() - cpu
            counters = cluster.controller.machine.status(requests=False).counters
            assert not counters.get("digest_resyncs"), dict(counters)
            assert cluster.index.check() == []
        finally:
            await cluster.close()
    return {"blocks_per_s": blocks / took, "blocks_per_cpu_s": blocks / spent, "cpu_share": spent / took}


def message_bytes() -> int:
    """Of one delta on the wire."""
    deltas = Deltas()
    deltas.since(0, Incarnation(1), Capacity(1, 0, 0))
    return convert.digest_to_pb(deltas.since(1, Incarnation(1), Capacity(1, 0, 0))[0]).ByteSize()


async def measure(seconds: float) -> dict[str, Any]:
    size = message_bytes()
    bare = [await messages_per_s(STAGES, size, seconds / 2)]
    found = await taken_in(seconds)
    bare.append(await messages_per_s(STAGES, size, seconds / 2))
    return {
        "senders": STAGES,
        "hashes_a_message": MAX_DIGEST_HASHES,
        "message_bytes": size,
        "known_blocks": KNOWN,
        **{name: round(value, 2) for name, value in found.items()},
        "bare_blocks_per_s": round(statistics.mean(bare) * MAX_DIGEST_HASHES),
        "bar": BAR,
    }


def serve() -> None:
    """A stage daemon, with the command line of one."""
    from wavepp_stage.__main__ import main
    from wavepp_stage.runtime import daemon

    vars(daemon).update(CoreShell=TellingShell)
    main()


if __name__ == "__main__":
    if sys.argv[1:] in ([], ["--quick"]):
        with suppress(KeyboardInterrupt):
            print(json.dumps(asyncio.run(measure(2.0 if sys.argv[1:] else 8.0)), indent=2))
    else:
        serve()
