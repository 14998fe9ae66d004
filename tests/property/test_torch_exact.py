"""The torch engine answers as the unsplit model does, whatever the split, chunks, sharing, batching and tiers.

Float32 throughout: |difference of logits| <= 1e-4, and the same argmax. The engines are driven
directly; the control plane's own property test runs the same models over real gRPC.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness import tiny_models
from tests.harness.torch_pipeline import Chunk, Pipeline, Sequence
from wavepp_proto.terms import RowResult
from wavepp_stage.engine.base import CopyDirection

TOLERANCE = 1e-4
POOL_TOKENS = 4096
HOST_BLOCKS = 100
STATE_SLOTS = 8
"""Four working states and as many snapshots: every example uses slots that held others' states."""
HYBRIDS = frozenset({"qwen3_next"})
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
    """One pipeline per shape for all examples: its pools still hold what earlier examples wrote."""
    key = (family, tied, cuts, block_tokens)
    if key not in _built:
        model = tiny_models.build(family, root, tied=tied, sharded=tied)
        bounds = (0, *cuts, tiny_models.layers_of(family))
        _built[key] = Pipeline(
            model, bounds, block_tokens=block_tokens, pool_blocks=POOL_TOKENS // block_tokens,
            host_pool_blocks=HOST_BLOCKS, state_slots=STATE_SLOTS if family in HYBRIDS else 0,
        )  # fmt: skip
    return _built[key]


class HostTier:
    """Which blocks are away on the host; a block that is away keeps its device number as its name.

    What an off-loaded block leaves on the device is spoilt at once, so that nothing reads it by luck."""

    def __init__(self, pipeline: Pipeline, sequences: list[Sequence], rng: Random) -> None:
        self._pipeline = pipeline
        self._sequences = sequences
        self._rng = rng
        self._free = rng.sample(range(HOST_BLOCKS), HOST_BLOCKS)
        self._away: dict[int, int] = {}

    def offload(self) -> None:
        """Some blocks, of whichever sequence, computed or not."""
        here = sorted({block for one in self._sequences for block in one.blocks} - self._away.keys())
        count = self._rng.randint(0, min(len(here), len(self._free)))
        if not count:
            return
        leaving = self._rng.sample(here, count)
        self._away |= (moved := {block: self._free.pop() for block in leaving})
        self._pipeline.copy(CopyDirection.OFFLOAD, leaving, list(moved.values()))
        for engine in self._pipeline.engines:
            for pool in engine.cache.pools:
                pool[leaving] = torch.nan

    def onboard(self, chunks: list[Chunk]) -> None:
        """What the wave reads or writes, to other places on the device."""
        needed = {block for chunk in chunks for block in chunk.sequence.blocks} & self._away.keys()
        if not needed:
            return
        coming = self._rng.sample(sorted(needed), len(needed))
        places = dict(zip(coming, self._rng.sample(coming, len(coming)), strict=True))
        hosts = [self._away.pop(block) for block in coming]
        self._pipeline.copy(CopyDirection.ONBOARD, list(places.values()), hosts)
        self._free += hosts
        for one in self._sequences:
            one.blocks = [places.get(block, block) for block in one.blocks]


prompts = st.lists(st.tuples(st.integers(1, 600), st.floats(0, 1)), min_size=1, max_size=4)
"""(prompt tokens, share of the longest reusable prefix that is really reused)."""


def shapes_of(families: Set[str], layers: int) -> st.SearchStrategy[Shape]:
    cuts = st.sets(st.integers(1, layers - 1), max_size=3).map(lambda cuts: tuple(sorted(cuts)))
    return st.tuples(st.sampled_from(sorted(families)), st.booleans(), cuts, st.sampled_from([4, 16, 64]))


@settings(max_examples=60)
@given(
    shape=shapes_of(tiny_models.FAMILIES.keys() - HYBRIDS, tiny_models.LAYERS), prompts=prompts,
    scattered=st.booleans(), tiers=st.booleans(), seed=st.integers(0, 2**32 - 1),
    rng=st.randoms(use_true_random=False),
)  # fmt: skip
def test_logits_equal_unsplit_model_when_split_chunked_shared_and_batched(
    root: Path,
    shape: Shape,
    prompts: list[tuple[int, float]],
    scattered: bool,
    tiers: bool,
    seed: int,
    rng: Random,
) -> None:
    prefill_all(standing(root, *shape), prompts, scattered, tiers, seed, rng)


@settings(max_examples=40)
@given(
    shape=shapes_of(HYBRIDS, tiny_models.HYBRID_LAYERS), prompts=prompts, scattered=st.booleans(),
    tiers=st.booleans(), seed=st.integers(0, 2**32 - 1), rng=st.randoms(use_true_random=False),
)  # fmt: skip
def test_logits_equal_unsplit_model_when_states_are_snapshot_and_restored(
    root: Path,
    shape: Shape,
    prompts: list[tuple[int, float]],
    scattered: bool,
    tiers: bool,
    seed: int,
    rng: Random,
) -> None:
    prefill_all(standing(root, *shape), prompts, scattered, tiers, seed, rng)


def prefill_all(
    pipeline: Pipeline, prompts: list[tuple[int, float]], scattered: bool, tiers: bool, seed: int, rng: Random
) -> None:
    # Taken from the end: a run of consecutive blocks for each prompt unless scattered.
    pipeline.free = list(range(POOL_TOKENS // pipeline.block_tokens))[::-1]
    if scattered:
        Random(seed).shuffle(pipeline.free)
    slots = pipeline.plans[0].state_slots
    pipeline.free_slots = rng.sample(range(slots), slots)
    sequences, donors = make_sequences(pipeline, prompts, seed, rng)
    tier = HostTier(pipeline, sequences, rng)
    results = {}
    while unfinished := [sequence for sequence in sequences if sequence.rest]:
        chunks = draw_wave([one for one in unfinished if is_ready(one, donors)], sequences, rng)
        if tiers:
            tier.onboard(chunks)
        for result in pipeline.run(*(snapshots_of(chunk, donors) for chunk in chunks)):
            results[chunks[result.row].sequence] = result
        if tiers:
            tier.offload()
    for sequence in sequences:
        assert_exact(pipeline.model, sequence, results[sequence])


@dataclass(frozen=True)
class Reuse:
    """What a sequence takes over: the first `tokens` of `donor`, and on a hybrid the snapshot there."""

    donor: Sequence
    tokens: int
    slot: int | None


Donors = dict[Sequence, Reuse]


def make_sequences(
    pipeline: Pipeline, prompts: list[tuple[int, float]], seed: int, rng: Random
) -> tuple[list[Sequence], Donors]:
    """Prompts that begin alike; some reuse an earlier one's first blocks."""
    text = np.random.default_rng(seed).integers(0, tiny_models.VOCABULARY, 600).tolist()
    sequences: list[Sequence] = []
    donors: Donors = {}
    for number, (length, share) in enumerate(prompts):
        token_ids = [*text[: length - 1], number]
        donor = rng.choice(sequences) if sequences else None
        common = min(len(donor.token_ids), length) - 1 if donor else 0
        blocks = int(common * share) // pipeline.block_tokens
        reuse = None
        if donor and blocks:
            reuse = reuse_of(pipeline, donor, blocks * pipeline.block_tokens, donors)
        made = pipeline.sequence(str(number), token_ids, reuse=donor, reused_blocks=blocks,
                                 restore=reuse.slot if reuse else None)  # fmt: skip
        if reuse:
            donors[made] = reuse
        sequences.append(made)
    return sequences, donors


def reuse_of(pipeline: Pipeline, donor: Sequence, tokens: int, donors: Donors) -> Reuse:
    """Of the sequence that computes position `tokens`: the donor, or the one that it took that part from."""
    while donor in donors and donors[donor].tokens >= tokens:
        if donors[donor].tokens == tokens:
            return donors[donor]
        donor = donors[donor].donor
    for other in donors.values():
        if (other.donor, other.tokens) == (donor, tokens):
            return other
    return Reuse(donor, tokens, pipeline.free_slots.pop() if pipeline.free_slots else None)


def snapshots_of(chunk: Chunk, donors: Donors) -> Chunk:
    """The chunk with the snapshots that others wait for, at the positions inside it or at its end."""
    start = chunk.sequence.computed
    due = {
        (reuse.tokens, reuse.slot)
        for reuse in donors.values()
        if reuse.donor is chunk.sequence and start < reuse.tokens <= start + chunk.length and reuse.slot is not None
    }
    return chunk if chunk.void else replace(chunk, snapshots=tuple(sorted(due)))


def is_ready(sequence: Sequence, donors: Donors) -> bool:
    """The blocks it reuses are computed."""
    if sequence not in donors or sequence.computed > donors[sequence].tokens:
        return True
    return donors[sequence].donor.computed >= donors[sequence].tokens


def draw_wave(ready: list[Sequence], everyone: list[Sequence], rng: Random) -> list[Chunk]:
    """Some of the ready sequences, each with some of its rest, and sometimes a void row among them."""
    chosen = rng.sample(ready, rng.randint(1, len(ready)))
    chunks = [Chunk(sequence, rng.randint(max(1, sequence.rest // 4), sequence.rest)) for sequence in chosen]
    victim = rng.choice(everyone)
    if victim.rest and rng.random() < 0.3:
        chunks.insert(rng.randint(0, len(chunks)), Chunk(victim, rng.randint(1, victim.rest), void=True))
    return chunks
