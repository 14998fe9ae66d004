"""What a stage's blocks and slots hold, for tests: the engine and the copy thread as pure bookkeeping.

Each block on the device and on the host, and each slot of recurrent state, remembers the prompt prefix
that was written into it. Reading anything else is a failed assertion, so a row that reads before it was
written, after it was freed, or from the wrong tier cannot pass unseen.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.harness.stage_core import B
from wavepp_stage.core.work import CopyDirection, CopyLot, RowWork, StateWork

Prefix = tuple[int, ...]
TORN: Prefix = (-1,)
"""What a copy leaves behind where it was, and where it failed."""


class StageMemory:
    """Blocks of both tiers, and slots; each by number."""

    def __init__(self, *, attention: bool) -> None:
        self._attention = attention
        self._device: dict[int, Prefix] = {}
        self._host: dict[int, Prefix] = {}
        self._slots: dict[int, Prefix] = {}

    def compute(self, row: RowWork, tokens: Sequence[int]) -> None:
        """Run one row of a prompt `tokens`: check all that it reads, write what it computes."""
        if self._attention:
            self._read_blocks(row, tokens)
        if row.state is not None:
            self._run_state(row, row.state, tokens)
        end = row.start + row.length
        for at in range(row.start // B, len(row.blocks)):
            self._device[int(row.blocks[at])] = tuple(tokens[: min(end, (at + 1) * B)])

    def _read_blocks(self, row: RowWork, tokens: Sequence[int]) -> None:
        for at in range(-(-row.start // B)):
            assert self._device[int(row.blocks[at])] == tuple(tokens[: min(row.start, (at + 1) * B)])

    def _run_state(self, row: RowWork, state: StateWork, tokens: Sequence[int]) -> None:
        end = row.start + row.length
        if state.restore is not None:
            assert row.start, "the empty state needs no snapshot"
            assert self._slots[state.restore] == tuple(tokens[: row.start])
        elif row.start:
            assert self._slots[state.working] == tuple(tokens[: row.start])
        taken = [position for position, _ in state.snapshots]
        assert taken == sorted(set(taken))
        assert all(row.start < position <= end for position in taken)
        slots = [state.working, *(slot for _, slot in state.snapshots)]
        assert len(set(slots)) == len(slots)
        for position, slot in state.snapshots:
            self._slots[slot] = tuple(tokens[:position])
        self._slots[state.working] = tuple(tokens[:end])

    def copy(self, lot: CopyLot, ok: bool) -> None:
        """Move the blocks of a lot; a failed one tears its targets."""
        if lot.direction is CopyDirection.OFFLOAD:
            source, read, target, written = self._device, lot.device, self._host, lot.host
        else:
            source, read, target, written = self._host, lot.host, self._device, lot.device
        for old, new in zip(read.tolist(), written.tolist(), strict=True):
            target[new] = source[old] if ok else TORN
            if ok:
                source[old] = TORN
