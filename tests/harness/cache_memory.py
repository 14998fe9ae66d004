"""What every block, host block and slot of a cache really contains, written as late and read as wide as allowed.

Plays the engine and the copies of a stage: a chunk must find the prefix that its table promises, a copy
moves whatever is there. So a block that was given away too early shows as a wrong prefix (invariant I3).
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.harness.cache_model_parts import Prefix
from tests.harness.stage_core import B
from wavepp_stage.core.work import CopyDirection, CopyLot, StateWork

GARBAGE: Prefix = (-1,)


@dataclass
class Row:
    """A chunk that was prepared and has not retired."""

    start: int
    end: int
    state: StateWork | None


class CacheMemory:
    """Contents by number: the tokens of the whole prefix that a block ends, or that a state has seen."""

    def __init__(self) -> None:
        self._device: dict[int, Prefix] = {}
        self._host: dict[int, Prefix] = {}
        self._slot: dict[int, Prefix] = {}

    def check_prefix(self, table: list[int], tokens: list[int], blocks: int) -> None:
        """The first `blocks` blocks of a table hold the prompt's prefix."""
        for depth in range(1, blocks + 1):
            assert self._device[table[depth - 1]] == tuple(tokens[: depth * B])

    def compute(self, table: list[int], tokens: list[int], row: Row) -> None:
        """Read what the chunk builds on, write what it makes."""
        self.check_prefix(table, tokens, row.start // B)
        for depth in range(row.start // B + 1, row.end // B + 1):
            self._device[table[depth - 1]] = tuple(tokens[: depth * B])
        if row.state is not None:
            self._advance(row.state, tokens, row)

    def _advance(self, state: StateWork, tokens: list[int], row: Row) -> None:
        if state.restore is not None:
            self._slot[state.working] = self._slot[state.restore]
        elif row.start == 0:
            self._slot[state.working] = ()
        assert self._slot[state.working] == tuple(tokens[: row.start])
        for position, slot in state.snapshots:
            self._slot[slot] = tuple(tokens[:position])
        self._slot[state.working] = tuple(tokens[: row.end])

    def copy(self, lot: CopyLot, *, ok: bool) -> None:
        """Move the blocks of a lot; one that fails leaves nothing useful where it wrote."""
        for device, host in zip(lot.device.tolist(), lot.host.tolist(), strict=True):
            if lot.direction is CopyDirection.OFFLOAD:
                self._host[host] = self._device[device] if ok else GARBAGE
            else:
                self._device[device] = self._host[host] if ok else GARBAGE
