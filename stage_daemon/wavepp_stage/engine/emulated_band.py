"""One stage's band of the emulated model: how a row passes through its cells and its states.

Owns what of the two a band has (cache groups) and the order of checks; a row that fails one leaves both
untouched. Knows no time, no thread and no wave, so the simulator runs it in virtual time. Called by
`emulated.py` on the executor thread (`compute`) and on the copy thread (`begin_copy`, `end_copy`).

A payload row is (mix, state) of one token: the next stage checks both against its own cache. Attention
reads the state before a chunk from the last cell, a recurrent layer carries it in a slot; where a band
has both kinds of layers, the two must agree.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from wavepp_proto.errors import EngineFault
from wavepp_proto.terms import CacheGroup
from wavepp_stage.core.work import CopyLot, RowWork
from wavepp_stage.engine import emulated_model as model
from wavepp_stage.engine.emulated_cache import WORD_BYTES, CanaryCache, RowNotFinite, RowRefused, check_table
from wavepp_stage.engine.emulated_model import Words
from wavepp_stage.engine.emulated_states import STATE_BYTES, CanaryStates

PAYLOAD_WORDS = 2


class EmulatedBand:
    """Cells on a band that attends, states on a band with recurrent layers; all unwritten."""

    def __init__(
        self,
        groups: Collection[CacheGroup],
        pool_blocks: int,
        block_tokens: int,
        place: int,
        host_pool_blocks: int = 0,
        state_slots: int = 0,
        nan_token: int | None = None,
    ) -> None:
        """`nan_token`: a chunk that holds it computes NaN here."""
        attends, recurs = CacheGroup.ATTENTION in groups, CacheGroup.RECURRENT in groups
        self._pools = {"device": pool_blocks, "host": host_pool_blocks}
        self._block_tokens = block_tokens
        self._nan_token = nan_token
        # Without attention layers the blocks are only numbers: nothing is stored in them.
        self._cells = CanaryCache(pool_blocks, block_tokens, place, host_pool_blocks) if attends else None
        self._states = CanaryStates(state_slots, block_tokens, place) if recurs else None

    @property
    def bytes_per_block(self) -> int:
        return 0 if self._cells is None else (self._block_tokens + 1) * WORD_BYTES

    @property
    def bytes_per_state(self) -> int:
        return 0 if self._states is None else STATE_BYTES

    def compute(self, row: RowWork, upstream: Words | None) -> Words:
        """Check what the row reads, then write its cells, tags and states; returns its payload, shape [length, 2].

        `upstream` is the previous stage's, None on the first. Raises RowRefused with the cause, RowNotFinite before
        anything is written."""
        check_table(row, self._pools["device"], self._block_tokens)
        if upstream is not None:
            mixed = upstream[:, 0]
        elif row.token_ids is not None and len(row.token_ids) == row.length:
            mixed = model.mix(row.token_ids, row.start)
        else:
            raise RowRefused(f"no token ids for [{row.start}, {row.start + row.length})")
        states = model.continue_state(self._state_before(row), mixed)
        if upstream is not None:
            _check_states(row, states, upstream[:, 1])
        if self._nan_token is not None:
            planted = model.mix(np.full(row.length, self._nan_token, np.int32), row.start)
            if bool((mixed == planted).any()):
                raise RowNotFinite
        if self._cells is not None:
            self._cells.write(row, states)
        if self._states is not None:
            self._states.write(row, states)
        return np.stack((mixed, states), axis=1)

    def spoil(self, row: RowWork) -> None:
        """Let what `compute` wrote for this row be NaN: whoever reads any of it is refused."""
        if self._cells is not None:
            self._cells.spoil(row)
        if self._states is not None:
            self._states.spoil(row)

    def begin_copy(self, lot: CopyLot) -> None:
        """The lot is under way: what it writes may not be read. Raises EngineFault for a lot that does not fit."""
        self._check_lot(lot)
        if self._cells is not None:
            self._cells.begin_copy(lot)

    def end_copy(self, lot: CopyLot) -> None:
        """The lot is complete. Raises EngineFault, and moves nothing, when a source is not a full block."""
        if self._cells is not None:
            self._cells.end_copy(lot)

    def _state_before(self, row: RowWork) -> int:
        """What both kinds of layers say the state ahead of the chunk is."""
        found: list[int] = []
        if self._cells is not None:
            self._cells.check_canaries(row)
            found.append(self._cells.state_before(row))
        if self._states is not None:
            found.append(self._states.state_before(row))
        if len(set(found)) > 1:
            raise RowRefused(f"cells and recurrent state differ before token {row.start}")
        return found[0]

    def _check_lot(self, lot: CopyLot) -> None:
        if not self._pools["host"]:
            raise EngineFault("this stage has no host tier", field="host_pool_blocks", value=0, limit=1)
        if len(lot.device) != len(lot.host):
            pair = f"{len(lot.device)} device and {len(lot.host)} host blocks"
            raise EngineFault(f"lot {lot.number} names {pair}", field="host", value=len(lot.host))
        for field, blocks in (("device", lot.device), ("host", lot.host)):
            limit = self._pools[field]
            for block in blocks[(blocks < 0) | (blocks >= limit)].tolist():
                raise EngineFault(f"lot {lot.number} leaves the {field} pool", field=field, value=block, limit=limit)
            if len(np.unique(blocks)) != len(blocks):
                raise EngineFault(f"lot {lot.number} names a {field} block twice", field=field, value=lot.number)


def _check_states(row: RowWork, states: Words, upstream: Words) -> None:
    """This stage's own cache and the previous stage's must be of the same prefix."""
    wrong = np.flatnonzero(states != upstream)
    if wrong.size:
        position = row.start + int(wrong[0])
        raise RowRefused(
            f"state at token {position} differs from the previous stage's: this cache is of another prefix"
        )
