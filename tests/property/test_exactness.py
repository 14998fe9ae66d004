"""Real models over the real control plane answer as the unsplit model does (float32).

Daemons are objects in one process over real gRPC and real activation links, standing per (family, P,
link); examples draw prompts, shared prefixes, concurrency, and now and then other bands, pool sizes
and wave budgets (a Reform, no restart). |difference of logits| <= 1e-4, the same argmax, and exact
cached counts for a repeated prompt.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.harness import tiny_models
from tests.harness.cluster import Cluster
from wavepp import PrefillResult, Sampling
from wavepp_controller.core.events import StageShape
from wavepp_proto.hashing import reuse_cap
from wavepp_proto.terms import LinkKind

TOLERANCE = 1e-4
B = 16
MAX_PROMPT = 600
LEAST_POOL = MAX_PROMPT // B + 2
EDGES = [1, B - 1, B, B + 1, 2 * B, 8 * B - 1, 8 * B, 8 * B + 1]
"""Around blocks, and around the wave budget a cluster starts with."""
FULL = Sampling(full_logits=True)
MATRIX = [
    (family, stages, link)
    for family in ("llama", "qwen3", "qwen3_moe")
    for stages in (1, 2, 3, 4)
    for link in ((LinkKind.GLOO, LinkKind.GRPC) if stages > 1 else (LinkKind.NONE,))
]


@functools.lru_cache(maxsize=4096)
def reference(folder: Path, token_ids: tuple[int, ...]) -> tuple[np.ndarray, int]:
    logits = tiny_models.unsplit_logits(folder, list(token_ids)).numpy()
    return logits, int(logits.argmax())


def assert_exact(folder: Path, tokens: list[int], result: PrefillResult) -> None:
    expected, best = reference(folder, tuple(tokens))
    assert result.logits is not None
    assert np.abs(result.logits - expected).max() <= TOLERANCE
    assert result.first_token == int(result.logits.argmax()) == best


@dataclass(frozen=True)
class Draw:
    cuts: tuple[int, ...]
    """Places in [0, 1] that cut the layers into bands."""
    pools: tuple[int, ...]
    wave_blocks: int
    reform: bool


draws = st.builds(
    Draw,
    cuts=st.tuples(*[st.floats(0, 1)] * 3),
    pools=st.tuples(*[st.integers(LEAST_POOL, 3 * LEAST_POOL)] * 4),
    wave_blocks=st.sampled_from([1, 2, 5, 16]),
    reform=st.booleans(),
)
prompts = st.lists(
    st.tuples(st.one_of(st.integers(1, MAX_PROMPT), st.sampled_from(EDGES)), st.floats(0, 1)),
    min_size=1,
    max_size=6,
)
"""(tokens, share of the prompt taken from the shared text)."""


class Standing:
    """One cluster and its event loop for all examples of a parameter set."""

    def __init__(self, folder: Path, stages: int, link: LinkKind) -> None:
        self.folder, self.stages = folder, stages
        self.loop = asyncio.new_event_loop()
        self.cluster = Cluster(
            stages=stages, model=str(folder), engine="torch", pool_blocks=(2 * LEAST_POOL,), block_tokens=B,
            wave_tokens=8 * B, link=link,
        )  # fmt: skip
        self.loop.run_until_complete(self.cluster.__aenter__())

    def close(self) -> None:
        try:
            self.loop.run_until_complete(self.cluster.__aexit__(None, None, None))
        finally:
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()

    async def reform(self, draw: Draw) -> None:
        status = self.cluster.controller.machine.status().pipelines[0]
        limits = bounds(draw.cuts, self.stages)
        shapes = tuple(
            StageShape(stage, limits[stage], limits[stage + 1], draw.pools[stage]) for stage in range(self.stages)
        )
        await self.cluster.reform(shapes, draw.wave_blocks * B)
        await self.cluster.serving(status.formation + 1)

    async def run(self, wanted: list[list[int]], concurrency: int) -> None:
        many = self.cluster.client.prefill_many(wanted, concurrency=concurrency, sampling=FULL, deadline=120)
        outcomes = [outcome async for outcome in many]
        assert sorted(outcome.index for outcome in outcomes) == list(range(len(wanted)))
        for outcome in outcomes:
            assert outcome.result is not None, outcome.error
            assert_exact(self.folder, wanted[outcome.index], outcome.result)

    async def again(self, tokens: list[int]) -> None:
        """The same prompt twice in a row: everything but the end is reused."""
        await self.cluster.client.prefill(tokens)
        result = await self.cluster.client.prefill(tokens, sampling=FULL)
        assert result.cached_tokens == reuse_cap(len(tokens), B)
        assert_exact(self.folder, tokens, result)


def bounds(cuts: tuple[float, ...], stages: int) -> list[int]:
    """Band limits with at least one layer a stage."""
    spare = tiny_models.LAYERS - stages
    taken = sorted(round(cut * spare) for cut in cuts[: stages - 1])
    return [0, *(extra + stage + 1 for stage, extra in enumerate(taken)), tiny_models.LAYERS]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(params=MATRIX, ids=lambda case: f"{case[0]}-{case[1]}-{case[2].value}")
def standing(request: pytest.FixtureRequest, root: Path) -> Iterator[Standing]:
    family, stages, link = request.param
    found = Standing(tiny_models.build(family, root, tied=stages % 2 == 0), stages, link)
    yield found
    found.close()


def test_answers_equal_the_unsplit_model_whatever_is_drawn(standing: Standing) -> None:
    @settings(max_examples=20, suppress_health_check=list(HealthCheck))
    @given(draw=draws, wanted=prompts, concurrency=st.integers(1, 6), seed=st.integers(0, 3))
    def explore(draw: Draw, wanted: list[tuple[int, float]], concurrency: int, seed: int) -> None:
        rng = Random(seed)
        shared = [rng.randrange(tiny_models.VOCABULARY) for _ in range(MAX_PROMPT)]
        tokens = []
        for length, share in wanted:
            head = round(share * length)
            tokens.append(shared[:head] + [rng.randrange(tiny_models.VOCABULARY) for _ in range(length - head)])
        if draw.reform:
            standing.loop.run_until_complete(standing.reform(draw))
        standing.loop.run_until_complete(standing.run(tokens, concurrency))
        standing.loop.run_until_complete(standing.again(tokens[0]))

    explore()
