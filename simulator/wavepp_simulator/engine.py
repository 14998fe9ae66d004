"""One stage's engine in the simulator: the emulated engine's arithmetic and canaries, without its clock.

Every block, tier, recurrent slot and snapshot that is read must be of exactly this prefix (I3), and every
state must equal the previous stage's. A row that fails is a violation, unless a scenario asked for the fault.
Owns which sequence wrote which block last, so that a block given to two living sequences is seen at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from wavepp_proto.errors import NonFinite
from wavepp_proto.terms import CacheGroup, Fence, HoldKey, RowResult
from wavepp_simulator.ledger import Violation
from wavepp_stage.core.work import CopyLot, RowWork, WaveWork
from wavepp_stage.engine import emulated_model as model
from wavepp_stage.engine.emulated_band import EmulatedBand
from wavepp_stage.engine.emulated_cache import RowRefused
from wavepp_stage.engine.emulated_model import Words

VOCABULARY = 32_000
DTYPE = "bfloat16"
"""What stages say that they compute in, unless a mishap gives one another."""
Payload = dict[int, Words]
"""(mix, state) of each token by row, shape [length, 2]; void rows are absent."""


@dataclass(frozen=True, slots=True)
class EngineShape:
    """What an engine is loaded for: another one is another engine."""

    groups: tuple[CacheGroup, ...]
    pool_blocks: int
    block_tokens: int
    host_pool_blocks: int
    state_slots: int


@dataclass(frozen=True, slots=True)
class Outcome:
    payload: Payload
    results: tuple[RowResult, ...]
    faults: dict[int, str | NonFinite]
    """Rows that a scenario made wrong, with the cause."""


class SimEngine:
    def __init__(self, name: str, place: int, shape: EngineShape, owns: Callable[[HoldKey], bool]) -> None:
        """`place` among all daemons: each stores its own. `owns` says whether a hold still has its blocks."""
        self.shape = shape
        self.broken: set[str] = set()
        """Requests whose next row this stage finds wrong, by a scenario's wish."""
        self.not_finite: set[str] = set()
        """Requests whose rows compute NaN on this stage from now on, by a scenario's wish."""
        self._name = name
        self._owns = owns
        self._band = EmulatedBand(
            shape.groups, shape.pool_blocks, shape.block_tokens, place, shape.host_pool_blocks, shape.state_slots
        )
        self._writers: dict[int, tuple[Fence, HoldKey]] = {}

    def run(self, fence: Fence, work: WaveWork, payload: Payload | None) -> Outcome:
        """`fence` is of the formation that runs; `payload` is None on the first stage only."""
        out: Payload = {}
        results: list[RowResult] = []
        faults: dict[int, str | NonFinite] = {}
        for index, row in enumerate(work.rows):
            if row.void:
                continue
            if row.key.request_id in self.broken:
                faults[index] = "bad canary (asked for)"
                continue
            try:
                out[index] = self._compute(fence, row, None if payload is None else payload[index])
            except RowRefused as fault:
                where = f"stage {self._name} wave {work.ordinal} {row.key.request_id}"
                raise Violation("I3", f"{where}: {fault}") from None
            if row.key.request_id in self.not_finite:
                self._band.spoil(row)
                out[index] = np.zeros_like(out[index])
                faults[index] = NonFinite(f"values of stage {self._name} are not finite", row=index)
                continue
            if row.sampling is not None:
                token = model.choose(int(out[index][-1, 1]), VOCABULARY, row.sampling)
                results.append(RowResult(index, token))
        return Outcome(out, tuple(results), faults)

    def begin_copy(self, lot: CopyLot) -> None:
        """Raises EngineFault for a lot that does not fit this engine."""
        self._band.begin_copy(lot)

    def end_copy(self, lot: CopyLot) -> None:
        """Raises EngineFault when a source holds no full block."""
        self._band.end_copy(lot)

    def _compute(self, fence: Fence, row: RowWork, upstream: Words | None) -> Words:
        self._claim(fence, row)
        return self._band.compute(row, upstream)

    def _claim(self, fence: Fence, row: RowWork) -> None:
        """Nobody else that still has blocks in this formation wrote here: keys may come back in a later one."""
        mine = (fence, row.key)
        for block in row.blocks[row.start // self.shape.block_tokens :].tolist():
            before = self._writers.get(block, mine)
            if before != mine and before[0] == fence and self._owns(before[1]):
                raise RowRefused(f"block {block} still belongs to {before[1].request_id}")
            self._writers[block] = mine
