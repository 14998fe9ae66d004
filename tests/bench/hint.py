"""How long a hint takes: a 200K-token prompt against an index that knows a million blocks.

Prints one JSON object (microseconds). Bars of DESIGN.md: median <= 24 us, p99 <= 1 ms, and
(<= 100 bytes per distinct block over all daemons). Also: the same with recurrent snapshots to scan for, the
look at everybody in flight for a shared prefix, and what the index costs to fill and to sweep.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Iterator

import numpy as np

from wavepp_controller.core.config import ControllerConfig
from wavepp_controller.core.index import ReuseIndex
from wavepp_controller.core.phases import PhaseLog
from wavepp_controller.core.request import Request
from wavepp_controller.core.sharing import Sharing
from wavepp_controller.core.snapshot_policy import SnapshotPolicy
from wavepp_proto.digest import Hashes, checksum, pack_hashes
from wavepp_proto.hashing import HashScope
from wavepp_proto.limits import MAX_DIGEST_HASHES, MAX_LANES
from wavepp_proto.terms import (
    CacheGroup,
    Capacity,
    DaemonKey,
    Digest,
    DigestKind,
    GroupDigest,
    Incarnation,
    PipelineId,
    PrefillRequest,
    RequestId,
    StageIndex,
)

STAGES = 4
KNOWN_BLOCKS = 1_000_000
PROMPT_TOKENS, BLOCK = 200_000, 32
CONCURRENCY = 64
REPEATS = 200
SNAPSHOT_BLOCKS = 256
"""Every 8192 tokens of a chain has a recurrent snapshot."""
DENSE, SPARSE = CacheGroup.ATTENTION, CacheGroup.RECURRENT
LIFE = Incarnation(1)


def pages(hashes: Hashes, states: Hashes | None) -> Iterator[Digest]:
    """One snapshot of everything, in pages of the wire's size."""
    count, total = len(hashes), checksum(hashes)
    starts = range(0, count, MAX_DIGEST_HASHES)
    for page, start in enumerate(starts):
        last = page == len(starts) - 1
        added = pack_hashes(hashes[start : start + MAX_DIGEST_HASHES])
        groups = [GroupDigest(DENSE, added, b"", count, total)]
        if states is not None and last:
            groups.append(GroupDigest(SPARSE, pack_hashes(states), b"", len(states), checksum(states)))
        yield Digest(LIFE, 1, DigestKind.SNAPSHOT, tuple(groups), Capacity(1, 0, 0), page, last)


def fill(index: ReuseIndex, hashes: Hashes, states: Hashes | None = None) -> float:
    """Blocks per second over all daemons."""
    began = time.perf_counter()
    for stage in range(STAGES):
        key = DaemonKey(PipelineId("p"), StageIndex(stage))
        index.attach(key, LIFE, 2 * KNOWN_BLOCKS, (DENSE,) if states is None else (DENSE, SPARSE))
        for digest in pages(hashes, states):
            index.apply(key, digest)
    return STAGES * len(hashes) / (time.perf_counter() - began)


def hints(index: ReuseIndex, chains: list[tuple[Hashes, int]], repeats: int) -> list[float]:
    """Microseconds of each hint, ascending; each must be right."""
    samples = []
    for _ in range(repeats):
        for chain, expected in chains:
            began = time.perf_counter_ns()
            found = index.hint_blocks(chain)
            samples.append((time.perf_counter_ns() - began) / 1e3)
            assert found == expected
    return sorted(samples)


def recurrent(known: Hashes, chains: list[tuple[Hashes, int]], states: Hashes, *, none_common: bool) -> list[float]:
    """The same hints where every stage needs a snapshot too; with `none_common` the scan goes all the way back."""
    index = ReuseIndex()
    fill(index, known[: CONCURRENCY * chains[0][0].size], states)
    if none_common:
        key = DaemonKey(PipelineId("p"), StageIndex(0))
        gone = GroupDigest(SPARSE, b"", pack_hashes(states), 0, 0)
        index.apply(key, Digest(LIFE, 2, DigestKind.DELTA, (gone,), Capacity(1, 0, 0)))
    expected = [(chain, 0 if none_common else depth // SNAPSHOT_BLOCKS * SNAPSHOT_BLOCKS) for chain, depth in chains]
    return hints(index, expected, REPEATS // 10)


def offers(chains: list[tuple[Hashes, int]]) -> list[float]:
    """Microseconds to look for a shared prefix among 128 holders, all of which share a part."""
    policy = SnapshotPolicy.of(BLOCK, 0, None)
    sharing = Sharing(policy, ControllerConfig())
    holders = []
    for at in range(MAX_LANES):
        chain = chains[0][0].copy()
        chain[chain.size * (1 + at * 37 % MAX_LANES) // (MAX_LANES + 2) :] = at
        holders.append(request(str(at), chain))
    max_shared = chains[0][0].size * MAX_LANES // (MAX_LANES + 2) * BLOCK
    wanted, samples = request("wanted", chains[0][0]), []
    for _ in range(REPEATS):
        began = time.perf_counter_ns()
        offer = sharing.offer(wanted, holders)
        samples.append((time.perf_counter_ns() - began) / 1e3)
        assert offer is not None
        assert offer.boundary == max_shared
    return sorted(samples)


def request(name: str, chain: Hashes) -> Request:
    prefill = PrefillRequest(RequestId(name), bytes(4 * PROMPT_TOKENS))
    made = Request(prefill, HashScope("m", "l"), BLOCK, 0.0, 1.0, 0.0, PhaseLog(prefill.request_id, 0.0, 0.0))
    made.chain = chain
    return made


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
    samples = hints(index, chains, REPEATS)
    index.detach(DaemonKey(PipelineId("p"), StageIndex(0)))
    sweeps = []
    more = True
    while more:
        began = time.perf_counter_ns()
        more = index.sweep(1)
        sweeps.append((time.perf_counter_ns() - began) / 1e3)
    states = known[: CONCURRENCY * blocks].reshape(CONCURRENCY, blocks)[:, SNAPSHOT_BLOCKS - 1 :: SNAPSHOT_BLOCKS]
    near = recurrent(known, chains, states.ravel(), none_common=False)
    far = recurrent(known, chains, states.ravel(), none_common=True)
    shares = offers(chains)
    return {
        "prompt_blocks": blocks,
        "known_blocks": KNOWN_BLOCKS,
        "daemons": STAGES,
        "hint_us_p50": round(samples[len(samples) // 2], 2),
        "hint_us_p99": round(samples[len(samples) * 99 // 100], 2),
        "hint_us_max": round(samples[-1], 2),
        "recurrent_hint_us_p50": round(near[len(near) // 2], 2),
        "recurrent_hint_us_p99": round(near[len(near) * 99 // 100], 2),
        "recurrent_hint_none_common_us_p50": round(far[len(far) // 2], 2),
        "shared_prefix_among_128_us_p50": round(shares[len(shares) // 2], 2),
        "ingest_blocks_per_s": round(rate),
        "bytes_per_block": round(grown / KNOWN_BLOCKS, 1),
        "sweep_us_p50": round(sorted(sweeps)[len(sweeps) // 2], 1),
        "sweep_us_max": round(max(sweeps), 1),
    }


if __name__ == "__main__":
    print(json.dumps(measure()))
