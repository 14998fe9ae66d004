"""The trtllm engine and its cache as the only stage, in the test's own thread, step by step.

Plays the core: leases, escrows, commits, materialises, runs and publishes as rounds and waves would, in either version
of the stand-in, and compares answers with the unsplit model. `trtllm_stage.py` takes it all at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.harness import tiny_models
from tests.harness.installed_package import STAND_IN, installed
from tests.harness.stage_core import join_plan, key
from wavepp_proto.hashing import HashScope, hash_blocks
from wavepp_proto.terms import Formation, HoldKey, Incarnation, RowResult, Sampling, WaveOrdinal
from wavepp_stage.core.block_hashes import BlockHashes
from wavepp_stage.core.cache_manager import Escrow, Lease, Materialised
from wavepp_stage.core.digest_feed import DigestFeed
from wavepp_stage.core.work import RowWork, WaveWork
from wavepp_stage.engine.base import EnginePlan, WaveOutcome
from wavepp_stage.engine.trtllm.cache import TrtllmCache
from wavepp_stage.engine.trtllm.desk import Desk
from wavepp_stage.engine.trtllm.engine import TrtllmEngine

B = 16
"""Tokens in a block."""
EVERYTHING = 1 << 20
NO_HASHES = np.zeros(0, np.uint64)


@contextmanager
def stand_in(monkeypatch: pytest.MonkeyPatch, vintage: str = "newer", **knobs: object) -> Iterator[None]:
    """`tensorrt_llm` is the stand-in, imported anew: which names it has is settled then."""
    monkeypatch.setenv("FAKE_TRTLLM_VINTAGE", vintage)
    for name, value in knobs.items():
        monkeypatch.setenv(f"FAKE_TRTLLM_{name.upper()}", str(value))
    with installed(STAND_IN):
        yield


def prompt(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, tiny_models.VOCABULARY, length)]


def hashes_of(tokens: Sequence[int], salt: str = "") -> BlockHashes:
    packed = hash_blocks(HashScope("model", "layout", salt), np.asarray(tokens, "<i4").tobytes(), B)
    return BlockHashes.unpack(packed)


@dataclass
class Prompted:
    """One prompt on its way: `at` tokens of it are computed."""

    key: HoldKey
    tokens: list[int]
    at: int = 0
    sampling: Sampling = Sampling(full_logits=True)


@dataclass
class AloneStage:
    model: Path
    pool_blocks: int = 32
    floor_blocks: int = 0
    host_pool_blocks: int = 0
    lanes: int = 8
    layers: int = tiny_models.LAYERS
    engine: TrtllmEngine = field(init=False)
    cache: TrtllmCache = field(init=False)
    waves: int = 0

    def __post_init__(self) -> None:
        self.engine = TrtllmEngine(device="cpu", dtype="auto")
        self.renew_cache()
        self.load()

    @property
    def plan(self) -> EnginePlan:
        return EnginePlan(str(self.model), 0, 1, 0, self.layers, B, self.pool_blocks, 512, self.lanes,
                          self.host_pool_blocks)  # fmt: skip

    @property
    def desk(self) -> Desk:
        assert self.engine.desk is not None
        return self.engine.desk

    @property
    def manager(self) -> Any:
        return self.desk.manager

    def load(self) -> None:
        self.engine.load(self.plan, lambda done, total: None)

    def renew_cache(self) -> None:
        plan = join_plan(
            stages=1, layers=(0, self.layers), block_tokens=B, pool_blocks=self.pool_blocks,
            floor_blocks=self.floor_blocks, host_pool_blocks=self.host_pool_blocks,
        )  # fmt: skip
        self.cache = TrtllmCache(self.engine, plan, DigestFeed(Incarnation(7)))

    # --- admission --------------------------------------------------------------------------------

    def lease(self, name: str, tokens: list[int], candidate: int = EVERYTHING, salt: str = "", **how: Any) -> Lease:
        lease = self.cache.lease(
            key(name), len(tokens), hashes_of(tokens, salt), candidate, tokens=np.array(tokens, np.int32), **how
        )
        self.cache.check()
        return lease

    def escrow(self, name: str) -> Escrow:
        escrow = self.cache.escrow(key(name))
        self.cache.check()
        return escrow

    def commit(self, name: str, tokens: list[int], candidate: int = EVERYTHING, salt: str = "") -> int:
        """Endpoint of a hold that is committed at what it could lease."""
        lease = self.lease(name, tokens, candidate, salt)
        assert not lease.shortfall
        assert not self.escrow(name).shortfall
        assert not self.cache.commit(key(name)).shortfall
        self.cache.check()
        return lease.endpoint

    def admit(self, name: str, tokens: list[int], candidate: int = EVERYTHING, salt: str = "") -> Prompted:
        endpoint = self.commit(name, tokens, candidate, salt)
        return self.materialise(name, tokens, endpoint)

    def materialise(self, name: str, tokens: list[int], endpoint: int) -> Prompted:
        assert self.cache.materialise(key(name)) is Materialised.DONE
        self.cache.check()
        return Prompted(key(name), tokens, endpoint)

    def revise(self, name: str, endpoint: int) -> Escrow:
        escrow = self.cache.revise(key(name), endpoint)
        self.cache.check()
        return escrow

    def release(self, name: str) -> None:
        self.cache.release(key(name))
        self.cache.check()

    # --- waves ------------------------------------------------------------------------------------

    def row(self, prompted: Prompted, length: int, void: bool = False) -> RowWork:
        end = prompted.at + length
        final = end == len(prompted.tokens)
        return RowWork(
            prompted.key, prompted.at, length, self.cache.table(prompted.key), NO_HASHES,
            np.array(prompted.tokens[prompted.at : end], np.int32), prompted.sampling if final and not void else None,
            void,
        )  # fmt: skip

    def run(self, *rows: RowWork) -> WaveOutcome:
        self.waves += 1
        return self.engine.run(WaveWork(Formation(1), WaveOrdinal(self.waves), rows, bytes(16)), None)

    def advance(self, *chunks: tuple[Prompted, int]) -> WaveOutcome:
        """One wave of live rows, published."""
        outcome = self.run(*(self.row(prompted, length) for prompted, length in chunks))
        for prompted, length in chunks:
            prompted.at += length
            self.cache.publish(prompted.key, prompted.at)
        self.cache.check()
        return outcome

    def finish(self, prompted: Prompted, chunk: int = 512) -> RowResult:
        """All that is left of one prompt, alone."""
        results: tuple[RowResult, ...] = ()
        while prompted.at < len(prompted.tokens):
            results = self.advance((prompted, min(chunk, len(prompted.tokens) - prompted.at))).results
        (result,) = results
        return result

    def prefill(self, name: str, tokens: list[int], candidate: int = EVERYTHING, salt: str = "") -> int:
        """A whole life, its answer exact; the endpoint that it began at."""
        prompted = self.admit(name, tokens, candidate, salt)
        endpoint = prompted.at
        assert_exact(self.model, tokens, self.finish(prompted))
        self.release(name)
        return endpoint

    # --- looking ----------------------------------------------------------------------------------

    def available(self) -> int:
        capacity = self.cache.capacity()
        return capacity.free_blocks + capacity.evictable_blocks

    def shown(self) -> int:
        """Blocks in the digest."""
        return self.cache.digests_since(0)[-1].groups[0].count


def assert_exact(model: Path, tokens: list[int], result: RowResult) -> None:
    expected = tiny_models.unsplit_logits(model, tokens).numpy()
    assert np.abs(np.frombuffer(result.logits, "<f4") - expected).max() <= 1e-4
    assert result.token_id == int(expected.argmax())
