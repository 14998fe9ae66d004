"""One stage's engine in the simulator: the emulated engine's arithmetic and canaries, without its clock.

Every block that is read must carry the tag of exactly this prefix (I3), and every state must equal the
previous stage's. A row that fails is a violation, unless a scenario asked for the fault. Owns which
sequence wrote which block last, so that a block given to two living sequences is seen at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from wavepp_proto.terms import Fence, HoldKey, RowResult
from wavepp_simulator.ledger import Violation
from wavepp_stage.core.work import RowWork, WaveWork
from wavepp_stage.engine import emulated_model as model
from wavepp_stage.engine.emulated_cache import CanaryCache, RowRefused
from wavepp_stage.engine.emulated_model import Words

VOCABULARY = 32_000
Payload = dict[int, Words]
"""(mix, state) of each token by row, shape [length, 2]; void rows are absent."""


@dataclass(frozen=True, slots=True)
class Outcome:
    payload: Payload
    results: tuple[RowResult, ...]
    faults: dict[int, str]
    """Rows that a scenario made wrong, with the cause."""


class SimEngine:
    def __init__(self, stage: int, pool_blocks: int, block_tokens: int, owns: Callable[[HoldKey], bool]) -> None:
        """`owns` says whether a hold still has its blocks."""
        self.shape = (pool_blocks, block_tokens)
        self.broken: set[str] = set()
        """Requests whose next row this stage finds wrong, by a scenario's wish."""
        self._stage = stage
        self._owns = owns
        self._cache = CanaryCache(pool_blocks, block_tokens, stage)
        self._writers: dict[int, tuple[Fence, HoldKey]] = {}

    def run(self, fence: Fence, work: WaveWork, payload: Payload | None) -> Outcome:
        """`fence` is of the formation that runs; `payload` is None on the first stage only."""
        out: Payload = {}
        results: list[RowResult] = []
        faults: dict[int, str] = {}
        for index, row in enumerate(work.rows):
            if row.void:
                continue
            if row.key.request_id in self.broken:
                faults[index] = "bad canary (asked for)"
                continue
            try:
                out[index] = self._compute(fence, row, None if payload is None else payload.get(index))
            except RowRefused as fault:
                raise Violation(
                    "I3", f"stage {self._stage} wave {work.ordinal} {row.key.request_id}: {fault}"
                ) from None
            if row.sampling is not None:
                token = model.choose(int(out[index][-1, 1]), VOCABULARY, row.sampling)
                results.append(RowResult(index, token))
        return Outcome(out, tuple(results), faults)

    def _compute(self, fence: Fence, row: RowWork, upstream: Words | None) -> Words:
        self._cache.check_table(row)
        self._cache.check_canaries(row)
        if upstream is not None:
            mixed = upstream[:, 0]
        elif row.token_ids is not None:
            mixed = model.mix(row.token_ids, row.start)
        else:
            raise RowRefused("neither tokens nor activations came for this row")
        states = model.continue_state(self._cache.state_before(row), mixed)
        if upstream is not None and not np.array_equal(states, upstream[:, 1]):
            raise RowRefused("this cache is of another prefix than the previous stage's")
        self._claim(fence, row)
        self._cache.write(row, states)
        return np.stack((mixed, states), axis=1)

    def _claim(self, fence: Fence, row: RowWork) -> None:
        """Nobody else that still has blocks in this formation wrote here: keys may come back in a later one."""
        mine = (fence, row.key)
        for block in row.blocks[row.start // self.shape[1] :].tolist():
            before = self._writers.get(block, mine)
            if before != mine and before[0] == fence and self._owns(before[1]):
                raise RowRefused(f"block {block} still belongs to {before[1].request_id}")
            self._writers[block] = mine
