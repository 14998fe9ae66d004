"""P torch engines in one thread, payloads passed by hand: the engine's behaviour without a control plane.

Owns a toy block allocator (blocks in shuffled order, never reused) and turns chunks of sequences
into the waves that a daemon would build. Used by unit, property and bench code of the torch engine.
"""

from __future__ import annotations

import random
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from wavepp_proto.terms import Attempt, CacheGroup, Formation, HoldKey, RequestId, RowResult, Sampling, WaveOrdinal
from wavepp_stage.engine.base import CopyDirection, CopyLot, EnginePlan, RowWork, StateWork, WaveOutcome, WaveWork
from wavepp_stage.engine.torch.engine import TorchEngine

NO_HASHES = np.zeros(0, np.uint64)


@dataclass(eq=False)
class Sequence:
    """One prompt and its blocks; `computed` tokens of it are in the cache."""

    name: str
    token_ids: list[int]
    blocks: list[int]
    computed: int = 0
    slot: int | None = None
    """Of its working state, on a pipeline with state slots."""
    restore: int | None = None
    """Slot of the snapshot at `computed`, to be loaded by the next chunk."""
    sampling: Sampling = field(default_factory=lambda: Sampling(full_logits=True))

    @property
    def rest(self) -> int:
        return len(self.token_ids) - self.computed


@dataclass(frozen=True)
class Chunk:
    """The next `length` tokens of a sequence, or (void) a row that must do nothing."""

    sequence: Sequence
    length: int
    void: bool = False
    snapshots: tuple[tuple[int, int], ...] = ()
    """(position, slot)."""


class Pipeline:
    """`bounds` are the band limits: (0, 2, 5) makes two stages of layers [0, 2) and [2, 5)."""

    def __init__(self, model: Path, bounds: Rows[int], *, block_tokens: int = 16, pool_blocks: int = 128,
                 wave_tokens: int = 4096, seed: int = 0,
                 host_pool_blocks: int = 0, state_slots: int = 0, device: str = "cpu",
                 dtype: str = "float32") -> None:  # fmt: skip
        self.model = model
        self.block_tokens = block_tokens
        self.free = list(range(pool_blocks))
        random.Random(seed).shuffle(self.free)
        self.free_slots = list(range(state_slots))
        limits = (block_tokens, pool_blocks, wave_tokens, 64, host_pool_blocks, state_slots)
        self.plans = [
            EnginePlan(str(model), stage, len(bounds) - 1, first, last, *limits)
            for stage, (first, last) in enumerate(pairwise(bounds))
        ]
        self.engines = [TorchEngine(device=device, dtype=dtype, threads=1) for _ in self.plans]
        self.facts = [
            engine.load(plan, lambda done, total: None) for engine, plan in zip(self.engines, self.plans, strict=True)
        ]
        self.waves = self.lots = 0

    def sequence(self, name: str, token_ids: list[int], *, reuse: Sequence | None = None, reused_blocks: int = 0,
                 restore: int | None = None, sampling: Sampling | None = None) -> Sequence:  # fmt: skip
        """A new prompt, its first `reused_blocks` blocks those of `reuse`, its state from the snapshot in `restore`."""
        shared = reuse.blocks[:reused_blocks] if reuse is not None else []
        own = [self.free.pop() for _ in range(-(-len(token_ids) // self.block_tokens) - len(shared))]
        made = Sequence(name, token_ids, shared + own, computed=len(shared) * self.block_tokens, restore=restore)
        if self.free_slots:
            made.slot = self.free_slots.pop()
        if sampling is not None:
            made.sampling = sampling
        return made

    def work(self, stage: int, chunks: Rows[Chunk]) -> WaveWork:
        rows = tuple(self._row(stage, chunk) for chunk in chunks)
        return WaveWork(Formation(1), WaveOrdinal(self.waves), rows, bytes(16))

    def _row(self, stage: int, chunk: Chunk) -> RowWork:
        plan, sequence, start = self.plans[stage], chunk.sequence, chunk.sequence.computed
        end = start + chunk.length
        state = None
        if CacheGroup.RECURRENT in self.facts[stage].groups and not chunk.void:
            assert sequence.slot is not None
            state = StateWork(sequence.slot, sequence.restore, chunk.snapshots)
        return RowWork(
            key=HoldKey(RequestId(sequence.name), Attempt(0)),
            start=start,
            length=chunk.length,
            blocks=np.array(sequence.blocks[: -(-end // self.block_tokens)], np.int32),
            prefix_hashes=NO_HASHES,
            token_ids=np.array(sequence.token_ids[start:end], np.int32) if plan.is_first else None,
            sampling=sequence.sampling if plan.is_last and end == len(sequence.token_ids) else None,
            void=chunk.void,
            state=state,
        )

    def outcomes(self, chunks: Rows[Chunk]) -> list[WaveOutcome]:
        """Run one wave on every stage; the computed position of live rows moves on."""
        made: list[WaveOutcome] = []
        payload: Any = None
        for stage, engine in enumerate(self.engines):
            made.append(engine.run(self.work(stage, chunks), payload))
            payload = made[-1].payload
        self.waves += 1
        for chunk in chunks:
            if not chunk.void:
                chunk.sequence.computed += chunk.length
                chunk.sequence.restore = None
        return made

    def run(self, *chunks: Chunk) -> tuple[RowResult, ...]:
        return self.outcomes(chunks)[-1].results

    def copy(self, direction: CopyDirection, device: Rows[int], host: Rows[int]) -> None:
        """One lot, on every stage."""
        self.lots += 1
        for engine in self.engines:
            engine.copy(CopyLot(self.lots, direction, np.array(device, np.int32), np.array(host, np.int32)))

    def prefill(self, sequence: Sequence, chunk: int = 512) -> RowResult:
        """All that is left of one prompt, alone."""
        results: tuple[RowResult, ...] = ()
        while sequence.rest:
            results = self.run(Chunk(sequence, min(chunk, sequence.rest)))
        (result,) = results
        return result
