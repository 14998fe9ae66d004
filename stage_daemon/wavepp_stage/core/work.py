"""One wave on one stage as plain data: what the core prepares and an engine runs.

Row i of a wave owns payload rows [sum(lengths before i), + length i), void rows included: the shape
of a payload follows from the wave command alone, so receives can be posted early.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wavepp_proto.terms import Formation, HoldKey, Sampling, TraceContext, WaveOrdinal

BlockTable = npt.NDArray[np.int32]
"""Device block ids of one sequence, in prompt order."""


@dataclass(frozen=True, slots=True)
class RowWork:
    """One chunk, ready to run: positions [start, start + length) of one sequence."""

    key: HoldKey
    start: int
    length: int
    blocks: BlockTable
    """Snapshot covering [0, start + length): len == ceil((start + length) / B)."""
    prefix_hashes: npt.NDArray[np.uint64]
    """Short hashes of the full blocks below `start` + `length` (canaries; shape [n_full])."""
    token_ids: npt.NDArray[np.int32] | None
    """Shape [length] on stages that get tokens, else None."""
    sampling: Sampling | None
    """Set only on the last stage and only when the chunk ends its prompt."""
    void: bool = False
    """The row flows (its payload rows are zero) and computes nothing."""
    trace: TraceContext = TraceContext()


@dataclass(frozen=True, slots=True)
class WaveWork:
    formation: Formation
    ordinal: WaveOrdinal
    rows: tuple[RowWork, ...]
    chunks: bytes
    """First 16 bytes of the SHA-256 over the row list: neighbours must run the same rows."""

    @property
    def tokens(self) -> int:
        return sum(row.length for row in self.rows)
