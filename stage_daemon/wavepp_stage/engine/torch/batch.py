"""One wave as the model sees it: live rows concatenated, with positions, slots and block tables.

Owns the check of a wave against the plan and the arithmetic from rows to tensors, done once per wave
and shared by all layers. Void rows are left out here, so that they compute nothing and touch no
cache. Called by `engine.py`; read by `attention.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wavepp_proto.errors import EngineFault
from wavepp_stage.engine.base import EnginePlan, RowWork, WaveWork
from wavepp_stage.engine.torch.paged_cache import BlockRun
from wavepp_stage.engine.torch.state_plan import Scan, check_states, make_scan

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Span:
    """One live row inside the concatenated batch."""

    index: int
    """Row index in the wave."""
    begin: int
    """Batch rows [begin, end) belong to it."""
    end: int
    start: int
    """L: positions before this chunk, already in the cache."""
    table: BlockRun | Tensor
    """Blocks of [0, start + length): a run, or int64 ids [n] on the engine's device."""

    @property
    def keys(self) -> int:
        """Positions that the row's last token attends to."""
        return self.start + self.end - self.begin


@dataclass(frozen=True, slots=True)
class WaveBatch:
    spans: tuple[Span, ...]
    positions: Tensor
    """int64 [1, live tokens]: each token's position in its own sequence."""
    slots: Tensor
    """int64 [live tokens]: where each token's K and V go."""
    live: Tensor | None
    """int64 [live tokens] payload rows that are live; None when no row is void."""
    scans: tuple[Scan, ...]
    """Per span, on a band with recurrent layers."""


def check_wave(wave: WaveWork, plan: EnginePlan, *, recurrent: bool) -> None:
    """Raises EngineFault when the wave breaks the plan (a bug upstream: the formation ends).

    `recurrent`: the band has recurrent layers, so that live rows need a state."""
    if not 0 < wave.tokens <= plan.wave_tokens:
        raise EngineFault("wave tokens outside the plan", field="tokens", value=wave.tokens, limit=plan.wave_tokens)
    if len(wave.rows) > plan.lanes:
        raise EngineFault("more rows than lanes", field="rows", value=len(wave.rows), limit=plan.lanes)
    for index, row in enumerate(wave.rows):
        if row.length < 1 or row.start < 0:
            raise EngineFault("not a token range", field=f"rows[{index}]", value=f"[{row.start}, +{row.length})")
        if not row.void:
            _check_table(index, row, plan)
    if recurrent:
        check_states(wave.rows, plan)


def _check_table(index: int, row: RowWork, plan: EnginePlan) -> None:
    needed = -(-(row.start + row.length) // plan.block_tokens)
    if len(row.blocks) != needed:
        raise EngineFault("block table does not cover the chunk", field=f"rows[{index}].blocks",
                          value=len(row.blocks), limit=needed)  # fmt: skip
    low, high = int(row.blocks.min()), int(row.blocks.max())
    if low < 0 or high >= plan.pool_blocks:
        raise EngineFault("block id outside the pool", field=f"rows[{index}].blocks",
                          value=low if low < 0 else high, limit=plan.pool_blocks)  # fmt: skip


def make_batch(wave: WaveWork, block_tokens: int, device: torch.device, *, recurrent: bool) -> WaveBatch | None:
    """The wave's live rows as one batch; None when every row is void."""
    spans: list[Span] = []
    positions: list[Indices] = []
    slots: list[Indices] = []
    live: list[Indices] = []
    begin = offset = 0
    for index, row in enumerate(wave.rows):
        if not row.void:
            where = np.arange(row.start, row.start + row.length, dtype=np.int64)
            blocks = row.blocks.astype(np.int64)
            spans.append(Span(index, begin, begin + row.length, row.start, _table(blocks, device)))
            positions.append(where)
            slots.append(blocks[where // block_tokens] * block_tokens + where % block_tokens)
            live.append(np.arange(offset, offset + row.length, dtype=np.int64))
            begin += row.length
        offset += row.length
    if not spans:
        return None
    return WaveBatch(
        tuple(spans),
        _on(device, np.concatenate(positions))[None],
        _on(device, np.concatenate(slots)),
        None if begin == offset else _on(device, np.concatenate(live)),
        tuple(make_scan(row, row.state) for row in wave.rows if recurrent and not row.void and row.state is not None),
    )


def _table(blocks: Indices, device: torch.device) -> BlockRun | Tensor:
    first, last = int(blocks[0]), int(blocks[-1])
    if last - first == len(blocks) - 1 and bool((np.diff(blocks) == 1).all()):
        return BlockRun(first, last + 1)
    return _on(device, blocks)


def _on(device: torch.device, values: npt.NDArray[np.integer]) -> Tensor:
    return torch.from_numpy(values).to(device, non_blocking=True)
