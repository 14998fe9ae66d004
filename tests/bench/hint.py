"""How long a hint takes: a 200K-token prompt against an index that knows a million blocks.

Prints one JSON object (microseconds). Bars: DESIGN.md section 15 (median <= 24 us, p99 <= 1 ms).
Also: what the index costs to fill, in memory and in digest ingest without the wire.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Iterator

import numpy as np

from wavepp_controller.core.index import ReuseIndex
from wavepp_proto.digest import Hashes, checksum, pack_hashes
from wavepp_proto.limits import MAX_DIGEST_HASHES
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

STAGES = 4
KNOWN_BLOCKS = 1_000_000
PROMPT_TOKENS, BLOCK = 200_000, 32
CONCURRENCY = 64
REPEATS = 200
LIFE = Incarnation(1)


def pages(hashes: Hashes) -> Iterator[Digest]:
    """One snapshot of everything, in pages of the wire's size."""
    count, total = len(hashes), checksum(hashes)
    starts = range(0, count, MAX_DIGEST_HASHES)
    for page, start in enumerate(starts):
        added = pack_hashes(hashes[start : start + MAX_DIGEST_HASHES])
        group = GroupDigest(CacheGroup.ATTENTION, added, b"", count, total)
        yield Digest(LIFE, 1, DigestKind.SNAPSHOT, (group,), Capacity(1, 0, 0), page, page == len(starts) - 1)


def fill(index: ReuseIndex, hashes: Hashes) -> float:
    """Blocks per second over all daemons."""
    began = time.perf_counter()
    for stage in range(STAGES):
        key = DaemonKey(PipelineId("p"), StageIndex(stage))
        index.attach(key, LIFE, KNOWN_BLOCKS)
        for digest in pages(hashes):
            index.apply(key, digest)
    return STAGES * len(hashes) / (time.perf_counter() - began)


def measure() -> dict[str, float]:
    """Microseconds of a hint, and what the index costs to fill, to keep and to sweep."""
    rng = np.random.default_rng(1)
    known = rng.integers(0, 2**64, KNOWN_BLOCKS, dtype=np.uint64)
    blocks = PROMPT_TOKENS // BLOCK
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    index = ReuseIndex()
    rate = fill(index, known)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    chains = []
    for at in range(CONCURRENCY):
        # The controller holds 32-byte hashes: short ones are every fourth word of them.
        packed = np.zeros((blocks, 4), dtype=np.uint64)
        depth = int(rng.integers(0, blocks))
        packed[:, 0] = rng.integers(0, 2**64, blocks, dtype=np.uint64)
        packed[:depth, 0] = known[at * blocks : at * blocks + depth]
        chains.append((packed[:, 0], depth))
    samples = []
    for _ in range(REPEATS):
        for chain, depth in chains:
            began = time.perf_counter_ns()
            found = index.hint_blocks(chain)
            samples.append((time.perf_counter_ns() - began) / 1e3)
            assert found == depth
    samples.sort()
    index.detach(DaemonKey(PipelineId("p"), StageIndex(0)))
    sweeps = []
    more = True
    while more:
        began = time.perf_counter_ns()
        more = index.sweep(1)
        sweeps.append((time.perf_counter_ns() - began) / 1e3)
    return {
        "prompt_blocks": blocks,
        "known_blocks": KNOWN_BLOCKS,
        "daemons": STAGES,
        "hint_us_p50": round(samples[len(samples) // 2], 2),
        "hint_us_p99": round(samples[len(samples) * 99 // 100], 2),
        "hint_us_max": round(samples[-1], 2),
        "ingest_blocks_per_s": round(rate),
        "bytes_per_block": round(grown / KNOWN_BLOCKS, 1),
        "sweep_us_p50": round(sorted(sweeps)[len(sweeps) // 2], 1),
        "sweep_us_max": round(max(sweeps), 1),
    }


if __name__ == "__main__":
    print(json.dumps(measure()))
