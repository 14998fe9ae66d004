"""The torch engine answers as the unsplit model does, whatever the split, chunks, sharing and batching.

Float32 throughout: |difference of logits| <= 1e-4, and the same argmax. The engines are driven
directly; the control plane's own property test runs the same models over real gRPC.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness import tiny_models
from tests.harness.torch_pipeline import Chunk, Pipeline, Sequence
from wavepp_proto.terms import RowResult

TOLERANCE = 1e-4
POOL_TOKENS = 4096
Shape = tuple[str, bool, tuple[int, ...], int]
"""(family, tied head, band limits inside the model, block tokens)."""
_built: dict[Shape, Pipeline] = {}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield tmp_path_factory.mktemp("models")
    _built.clear()


@functools.cache
def reference(folder: Path, token_ids: tuple[int, ...]) -> tuple[np.ndarray, int]:
    logits = tiny_models.unsplit_logits(folder, list(token_ids)).numpy()
    return logits, int(logits.argmax())


def assert_exact(folder: Path, sequence: Sequence, result: RowResult) -> None:
    expected, best = reference(folder, tuple(sequence.token_ids))
    found = np.frombuffer(result.logits, "<f4")
    assert np.abs(found - expected).max() <= TOLERANCE
    assert result.token_id == int(found.argmax()) == best


def standing(root: Path, family: str, tied: bool, cuts: tuple[int, ...], block_tokens: int) -> Pipeline:
    """One pipeline per shape for all examples: its pool still holds what earlier examples wrote."""
    key = (family, tied, cuts, block_tokens)
    if key not in _built:
        model = tiny_models.build(family, root, tied=tied, sharded=tied)
        bounds = (0, *cuts, tiny_models.layers_of(family))
        _built[key] = Pipeline(model, bounds, block_tokens=block_tokens, pool_blocks=POOL_TOKENS // block_tokens)
    return _built[key]


prompts = st.lists(st.tuples(st.integers(1, 600), st.floats(0, 1)), min_size=1, max_size=4)
"""(prompt tokens, share of the longest reusable prefix that is really reused)."""
shapes = st.tuples(
    st.sampled_from(sorted(set(tiny_models.FAMILIES) - {"qwen3_next"})),
    st.booleans(),
    st.sets(st.integers(1, tiny_models.LAYERS - 1), max_size=3).map(lambda cuts: tuple(sorted(cuts))),
    st.sampled_from([4, 16, 64]),
)


@settings(max_examples=200)
@given(
    shape=shapes, prompts=prompts, scattered=st.booleans(), seed=st.integers(0, 2**32 - 1),
    rng=st.randoms(use_true_random=False),
)  # fmt: skip
def test_logits_equal_unsplit_model_when_split_chunked_shared_and_batched(
    root: Path, shape: Shape, prompts: list[tuple[int, float]], scattered: bool, seed: int, rng: Random
) -> None:
    pipeline = standing(root, *shape)
    # Taken from the end: a run of consecutive blocks for each prompt unless scattered.
    pipeline.free = list(range(POOL_TOKENS // pipeline.block_tokens))[::-1]
    if scattered:
        Random(seed).shuffle(pipeline.free)
    sequences, donors = make_sequences(pipeline, prompts, seed, rng)
    results = {}
    while unfinished := [sequence for sequence in sequences if sequence.rest]:
        chunks = draw_wave([one for one in unfinished if is_ready(one, donors)], sequences, rng)
        for result in pipeline.run(*chunks):
            results[chunks[result.row].sequence] = result
    for sequence in sequences:
        assert_exact(pipeline.model, sequence, results[sequence])


def make_sequences(
    pipeline: Pipeline, prompts: list[tuple[int, float]], seed: int, rng: Random
) -> tuple[list[Sequence], dict[Sequence, tuple[Sequence, int]]]:
    """Prompts that begin alike; some reuse an earlier one's first blocks: (donor, tokens it must have computed)."""
    text = np.random.default_rng(seed).integers(0, tiny_models.VOCABULARY, 600).tolist()
    sequences: list[Sequence] = []
    donors: dict[Sequence, tuple[Sequence, int]] = {}
    for number, (length, share) in enumerate(prompts):
        token_ids = [*text[: length - 1], number]
        donor = rng.choice(sequences) if sequences else None
        common = min(len(donor.token_ids), length) - 1 if donor else 0
        blocks = int(common * share) // pipeline.block_tokens
        sequences.append(pipeline.sequence(str(number), token_ids, reuse=donor, reused_blocks=blocks))
        if donor and blocks:
            donors[sequences[-1]] = (donor, blocks * pipeline.block_tokens)
    return sequences, donors


def is_ready(sequence: Sequence, donors: dict[Sequence, tuple[Sequence, int]]) -> bool:
    """The blocks it reuses are computed, by its donor or by the donor's own donor."""
    if sequence not in donors:
        return True
    donor, tokens = donors[sequence]
    return donor.computed >= tokens and is_ready(donor, donors)


def draw_wave(ready: list[Sequence], everyone: list[Sequence], rng: Random) -> list[Chunk]:
    """Some of the ready sequences, each with some of its rest, and sometimes a void row among them."""
    chosen = rng.sample(ready, rng.randint(1, len(ready)))
    chunks = [Chunk(sequence, rng.randint(max(1, sequence.rest // 4), sequence.rest)) for sequence in chosen]
    victim = rng.choice(everyone)
    if victim.rest and rng.random() < 0.3:
        chunks.insert(rng.randint(0, len(chunks)), Chunk(victim, rng.randint(1, victim.rest), void=True))
    return chunks
