"""Critical sections of one stage's core, as JSON (DESIGN.md, Bars).

A 100,000-block pool full of cached prompts; a 6,250-block prompt is leased, escrowed and committed,
then revised, materialised, published and released. Then the same pool with a host tier that is full as
well: whatever comes in moves a block to the host and drops one there. A line is one call under the mutex, in CPU
time of its thread (what others on the machine take is theirs); `wall_p99_us` is beside it.
Bar: lease + escrow + commit, each at most 200 us. Run: `python -m tests.bench.stage_core`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np

from tests.harness.stage_core import StageDriver, join_plan, key
from wavepp_proto.hashing import HASH_BYTES
from wavepp_proto.terms import HoldKey, Incarnation, Prepare, Release
from wavepp_stage.core import events as ev
from wavepp_stage.core.block_cache import BlockCache
from wavepp_stage.core.block_hashes import BlockHashes
from wavepp_stage.core.cache_manager import Materialised
from wavepp_stage.core.cache_shape import CacheShape
from wavepp_stage.core.digest_feed import DigestFeed
from wavepp_stage.core.holds import Phase
from wavepp_stage.core.machine import StageMachine

POOL_BLOCKS = 100_000
PROMPT_BLOCKS = 6_250
BLOCK_TOKENS = 32
PREFIX_BLOCKS = PROMPT_BLOCKS - 64
REPEATS = 200


def random_hashes(rng: np.random.Generator, blocks: int) -> bytes:
    return rng.bytes(blocks * HASH_BYTES)


def percentiles(taken: Iterable[tuple[float, float]]) -> dict[str, float]:
    """Of (CPU, wall) pairs in microseconds."""
    cpu, wall = np.sort(np.array(list(taken)), axis=0).T
    return {
        "p50_us": round(float(cpu[len(cpu) // 2]), 1),
        "p99_us": round(float(cpu[-2]), 1),
        "wall_p99_us": round(float(wall[-2]), 1),
    }


class Timed:
    def __init__(self) -> None:
        self.taken: dict[str, list[tuple[float, float]]] = {}

    def run(self, name: str, call: Callable[[], object]) -> None:
        wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
        call()
        spent = time.thread_time_ns() - cpu
        self.taken.setdefault(name, []).append((spent / 1e3, (time.perf_counter_ns() - wall) / 1e3))

    def report(self) -> dict[str, dict[str, float]]:
        return {name: percentiles(values) for name, values in self.taken.items()}


def fill(cache: BlockCache, packed: bytes) -> None:
    """Cache one prompt of random hashes, as a sequence would."""
    tokens = len(packed) // HASH_BYTES * BLOCK_TOKENS
    hold = key("fill")
    cache.lease(hold, tokens, BlockHashes.unpack(packed), 0)
    cache.escrow(hold)
    cache.commit(hold)
    while cache.materialise(hold) is not Materialised.DONE:
        for lot in cache.take_lots():
            cache.copied(lot.number, True)
    cache.publish(hold, tokens)
    cache.release(hold)


def one_prompt(timed: Timed, cache: BlockCache, packed: bytes, hold: HoldKey) -> None:
    """A prompt whose first PREFIX_BLOCKS blocks are cached, through its whole life."""
    tokens = PROMPT_BLOCKS * BLOCK_TOKENS
    prefix = PREFIX_BLOCKS * BLOCK_TOKENS
    hashes = BlockHashes.unpack(packed)
    timed.run("lease", lambda: cache.lease(hold, tokens, hashes, prefix))
    timed.run("escrow", lambda: cache.escrow(hold))
    timed.run("commit", lambda: cache.commit(hold))
    timed.run("revise", lambda: cache.revise(hold, prefix - 16 * BLOCK_TOKENS))
    timed.run("materialise 80 blocks, evicting", lambda: cache.materialise(hold))
    timed.run("publish 80 blocks", lambda: cache.publish(hold, tokens))
    timed.run("release", lambda: cache.release(hold))
    timed.run("digest delta", lambda: cache.digests_since(cache._store._feed.seq))


def cold_prompt(timed: Timed, cache: BlockCache, packed: bytes, hold: HoldKey) -> None:
    """A prompt of which nothing is cached, in a pool that must evict for all of it; published by waves."""
    tokens, hashes = PROMPT_BLOCKS * BLOCK_TOKENS, BlockHashes.unpack(packed)
    timed.run("cold lease", lambda: cache.lease(hold, tokens, hashes, 0))
    cache.escrow(hold)
    cache.commit(hold)
    while cache._ledger.holds[hold].phase is not Phase.OWNED:
        timed.run("cold materialise, a slice", lambda: cache.materialise(hold))
    for end in range(512, PROMPT_BLOCKS + 512, 512):
        computed = min(end, PROMPT_BLOCKS) * BLOCK_TOKENS
        timed.run("cold publish, 512 blocks", lambda: cache.publish(hold, computed))  # noqa: B023 (called at once)
    timed.run("cold release", lambda: cache.release(hold))


def cache_sections() -> dict[str, dict[str, float]]:
    rng = np.random.default_rng(1)
    cache = BlockCache(CacheShape(POOL_BLOCKS, BLOCK_TOKENS), DigestFeed(Incarnation(1)))
    shared = random_hashes(rng, PREFIX_BLOCKS)
    fill(cache, shared)
    while cache.capacity().free_blocks > 1000:
        fill(cache, random_hashes(rng, 1000))
    timed = Timed()
    for repeat in range(REPEATS):
        one_prompt(timed, cache, shared + random_hashes(rng, PROMPT_BLOCKS - PREFIX_BLOCKS), key(str(repeat)))
    for _ in range(20):
        cold_prompt(timed, cache, random_hashes(rng, PROMPT_BLOCKS), key("cold"))
        timed.run("digest snapshot of the pool", lambda: cache.digests_since(0))
    cache.check()
    return timed.report()


def tier_sections() -> dict[str, dict[str, float]]:
    """Cold prompts whose room is made by off-loading; then one that comes back from the host."""
    rng = np.random.default_rng(2)
    shape = CacheShape(POOL_BLOCKS, BLOCK_TOKENS, 0, POOL_BLOCKS // 2)
    cache, timed = BlockCache(shape, DigestFeed(Incarnation(1))), Timed()
    while cache.capacity().host_free_blocks:
        fill(cache, random_hashes(rng, 1000))
    tokens, hold = PROMPT_BLOCKS * BLOCK_TOKENS, key("tiered")
    prompts = [random_hashes(rng, PROMPT_BLOCKS) for _ in range(20)]
    for packed in [*prompts, *prompts]:  # the second time each prompt is on the host
        hashes = BlockHashes.unpack(packed)
        hit = cache.lease(hold, tokens, hashes, tokens).endpoint
        cache.escrow(hold)
        cache.commit(hold)
        while cache._ledger.holds[hold].phase is not Phase.OWNED:
            name = "materialise, a slice, off-loading" + (" and bringing back" if hit else "")
            timed.run(name, lambda: cache.materialise(hold))
            for lot in cache.take_lots():
                timed.run("copies ended, one lot", partial(cache.copied, lot.number, True))
        cache.publish(hold, tokens)
        cache.release(hold)
    cache.check()
    return timed.report()


def whole_round() -> dict[str, dict[str, float]]:
    """One prepare of a 4,096-block prompt through the machine, votes included."""
    plan = join_plan(pool_blocks=POOL_BLOCKS, block_tokens=BLOCK_TOKENS)
    driver = StageDriver.joined(plan, StageMachine(plan.fence.incarnation))
    timed = Timed()
    driver.announce("prompt", range(4096 * BLOCK_TOKENS), send_tokens=False)
    for _ in range(REPEATS):
        asked = driver.next_round(prepares=[Prepare(key("prompt"), 0)])
        timed.run("round with one prepare", lambda: driver.machine.handle(asked))  # noqa: B023 (called at once)
        driver.machine.handle(ev.ReleaseArrived(driver.fence(), Release(key("prompt")), 0.0))
    return timed.report()


if __name__ == "__main__":
    sections = cache_sections() | tier_sections() | whole_round()
    print(json.dumps({"pool_blocks": POOL_BLOCKS, "prompt_blocks": PROMPT_BLOCKS, "bar_us": 200, **sections}, indent=2))
