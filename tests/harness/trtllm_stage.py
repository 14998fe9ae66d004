"""One stage of the trtllm engine on the TensorRT-LLM stand-in, in this process, without a shell.

Plays the machine and the executor of a pipeline of one stage: `admit` takes a prompt to where waves may
name it, `run` executes one wave and publishes it, every step is followed by the cache's own check. Used
by tests of the adapter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tests.harness.digest_reader import DigestReader
from tests.harness.installed_package import STAND_IN, installed
from tests.harness.stage_core import hashes, join_plan, key
from wavepp_proto.terms import CacheGroup, Formation, Incarnation, RowResult, Sampling, WaveOrdinal
from wavepp_stage.core.cache_manager import Escrow, Lease
from wavepp_stage.core.digest_feed import DigestFeed
from wavepp_stage.engine.base import EnginePlan, RowWork, WaveOutcome, WaveWork
from wavepp_stage.engine.trtllm.cache import TrtllmCache
from wavepp_stage.engine.trtllm.engine import TrtllmEngine

BLOCK = 16
"""Tokens."""
NO_BLOCKS = np.zeros(0, np.int32)
NO_HASHES = np.zeros(0, np.uint64)


@dataclass
class Prompt:
    tokens: list[int]
    computed: int


@dataclass
class TrtllmStage:
    engine: TrtllmEngine
    cache: TrtllmCache
    feed: DigestFeed
    plan: EnginePlan
    prompts: dict[str, Prompt] = field(default_factory=dict)
    waves: int = 0

    # --- admission --------------------------------------------------------------------------------

    def lease(self, name: str, tokens: list[int], candidate: int = 0) -> Lease:
        lease = self.cache.lease(
            key(name), len(tokens), hashes(tokens, BLOCK), candidate, tokens=np.array(tokens, np.int32)
        )
        self.cache.check()
        if not lease.shortfall:
            self.prompts[name] = Prompt(tokens, lease.endpoint)
        return lease

    def escrow(self, name: str) -> Escrow:
        escrow = self.cache.escrow(key(name))
        self.cache.check()
        return escrow

    def admit(self, name: str, tokens: list[int], candidate: int = 0) -> int:
        """Lease, escrow, commit, materialise; the endpoint."""
        lease = self.lease(name, tokens, candidate)
        assert not lease.shortfall
        assert not self.escrow(name).shortfall
        assert not self.cache.commit(key(name)).shortfall
        self.cache.materialise(key(name))
        self.cache.check()
        return lease.endpoint

    def release(self, name: str) -> None:
        self.cache.release(key(name))
        self.cache.check()
        self.prompts.pop(name, None)

    # --- execution --------------------------------------------------------------------------------

    def wave(self, chunks: Sequence[tuple[str, int]], void: frozenset[str] = frozenset()) -> WaveWork:
        rows = []
        for name, length in chunks:
            prompt = self.prompts[name]
            end = prompt.computed + length
            final = end == len(prompt.tokens)
            rows.append(
                RowWork(
                    key=key(name),
                    start=prompt.computed,
                    length=length,
                    blocks=NO_BLOCKS,
                    prefix_hashes=NO_HASHES,
                    token_ids=np.array(prompt.tokens[prompt.computed : end], np.int32),
                    sampling=Sampling() if final else None,
                    void=name in void,
                )
            )
        return WaveWork(Formation(1), WaveOrdinal(self.waves), tuple(rows), bytes(16))

    def run(self, *chunks: tuple[str, int], void: frozenset[str] = frozenset()) -> WaveOutcome:
        """One wave of the next `length` tokens of each, published afterwards."""
        outcome = self.engine.run(self.wave(chunks, void), None)
        self.waves += 1
        for name, length in chunks:
            if name in void:
                self.cache.discard(key(name))
            else:
                self.prompts[name].computed += length
                self.cache.publish(key(name), self.prompts[name].computed)
        self.cache.check()
        return outcome

    def prefill(self, name: str, tokens: list[int], candidate: int = 0, chunk: int = 64) -> int:
        """A whole prompt, admitted, computed and released; its first token."""
        self.admit(name, tokens, candidate)
        results: tuple[RowResult, ...] = ()
        while rest := len(tokens) - self.prompts[name].computed:
            results = self.run((name, min(chunk, rest))).results
        self.release(name)
        (result,) = results
        return result.token_id

    # --- what is there ----------------------------------------------------------------------------

    def held(self) -> int:
        return self.cache.census().held

    def resident(self, tokens: list[int]) -> int:
        """Blocks of this prompt that a reader of the digest believes to be reusable."""
        reader = DigestReader(Incarnation(1))
        reader.read(self.cache)
        shown = reader.known.get(CacheGroup.ATTENTION, set())
        return sum(short in shown for short in hashes(tokens, BLOCK).shorts.tolist())

    def reload(self) -> None:
        self.engine.load(self.plan, lambda done, total: None)


@contextmanager
def trtllm_stage(
    model: Path,
    *,
    pool_blocks: int = 32,
    host_pool_blocks: int = 0,
    floor_blocks: int = 0,
    wave_tokens: int = 128,
    lanes: int = 4,
    layers: int = 5,
) -> Iterator[TrtllmStage]:
    """A loaded stage; at the end its prompts are released, and unless it is fenced nothing may be held then."""
    with installed(STAND_IN):
        engine = TrtllmEngine(device="cpu", dtype="float32")
        plan = EnginePlan(str(model), 0, 1, 0, layers, BLOCK, pool_blocks, wave_tokens, lanes, host_pool_blocks)
        engine.load(plan, lambda done, total: None)
        feed = DigestFeed(Incarnation(1))
        joined = join_plan(stages=1, pool_blocks=pool_blocks, host_pool_blocks=host_pool_blocks,
                           floor_blocks=floor_blocks, layers=(0, layers), block_tokens=BLOCK)  # fmt: skip
        stage = TrtllmStage(engine, TrtllmCache(engine, joined, feed), feed, plan)
        yield stage
        for name in list(stage.prompts):
            stage.release(name)
        assert stage.engine.fenced or stage.held() == 0
        engine.close()
