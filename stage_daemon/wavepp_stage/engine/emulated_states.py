"""Recurrent states of the emulated engine: slots that know which prefix they stand for.

Owns the slots of one stage and the checks of what a row restores, goes on with and snapshots. Knows no
time, no thread and no wave. Called by `emulated_band.py`.

    working slot     (position, state ^ salt, tag, owner)    one sequence's state after `position` tokens
    snapshot slot    (position, state ^ salt, tag, nobody)   the same for whoever has this prefix

The tag is the short hash of the last full block below the position. A slot that was never written, was
given to somebody else, or stands elsewhere than the row says, refuses the row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from wavepp_proto.terms import HoldKey
from wavepp_stage.core.work import RowWork, StateWork
from wavepp_stage.engine.emulated_cache import NON_FINITE, RowRefused
from wavepp_stage.engine.emulated_model import Words, splitmix_one

STATE_BYTES = 24
"""Position, state and tag, a word each."""
NO_TAG = 0
"""Tag of a state inside the first block."""


@dataclass(frozen=True, slots=True)
class _Slot:
    position: int
    """Tokens the state has seen."""
    word: int
    """state ^ salt"""
    tag: int
    owner: HoldKey | None
    """Whose working state this is; None for a snapshot."""

    def __str__(self) -> str:
        whose = "a snapshot" if self.owner is None else f"{self.owner.request_id}'s working state"
        return f"{whose} at {self.position} of prefix {self.tag:#018x}"


class CanaryStates:
    """`slots` recurrent states of one stage, none written."""

    def __init__(self, slots: int, block_tokens: int, place: int) -> None:
        self._block_tokens = block_tokens
        self._slots: list[_Slot | None] = [None] * slots
        self._salt = splitmix_one((place + 1) << 32)

    def state_before(self, row: RowWork) -> int:
        """The state that the row's first token goes on from; 0 is the empty one. Writes nothing.

        Raises RowRefused when a slot the row names is not what it must be."""
        work = self._checked(row)
        if work.restore is not None:
            return self._expect(work.restore, row, None)
        if row.start == 0:
            return 0
        return self._expect(work.working, row, row.key)

    def write(self, row: RowWork, states: Words) -> None:
        """Leave the working state after the row's last token, and its snapshots; `states` has shape [length]."""
        work = self._checked(row)
        self._put(work.working, row, row.start + row.length, states, row.key)
        for position, slot in work.snapshots:
            self._put(slot, row, position, states, None)

    def spoil(self, row: RowWork) -> None:
        """The states that the row left are NaN."""
        work = self._checked(row)
        for slot in (work.working, *(slot for _, slot in work.snapshots)):
            held = self._slots[slot]
            assert held is not None, "the row has written it"
            self._slots[slot] = replace(held, word=NON_FINITE)

    def _checked(self, row: RowWork) -> StateWork:
        work = row.state
        if work is None:
            raise RowRefused("no recurrent state for this row")
        named = [work.working, *(slot for _, slot in work.snapshots)]
        if work.restore is not None:
            named.append(work.restore)
        for slot in named:
            if not 0 <= slot < len(self._slots):
                raise RowRefused(f"slot {slot} is not among the {len(self._slots)} state slots")
        if len(set(named)) != len(named):
            raise RowRefused(f"one state slot has two uses among {named}")
        last = row.start
        for position, _ in work.snapshots:
            if not last < position <= row.start + row.length or position % self._block_tokens:
                raise RowRefused(f"snapshot at {position} in the chunk [{row.start}, {row.start + row.length})")
            last = position
        return work

    def _expect(self, slot: int, row: RowWork, owner: HoldKey | None) -> int:
        held = self._slots[slot]
        if held is None:
            raise RowRefused(f"bad state in slot {slot}: unwritten")
        wanted = replace(held, position=row.start, tag=self._tag(row, row.start), owner=owner)
        if held != wanted:
            raise RowRefused(f"bad state in slot {slot}: {held}, not {wanted}")
        if held.word == NON_FINITE:
            raise RowRefused(f"slot {slot} holds a state that is not finite")
        return held.word ^ self._salt

    def _put(self, slot: int, row: RowWork, position: int, states: Words, owner: HoldKey | None) -> None:
        word = int(states[position - row.start - 1]) ^ self._salt
        self._slots[slot] = _Slot(position, word, self._tag(row, position), owner)

    def _tag(self, row: RowWork, position: int) -> int:
        full = position // self._block_tokens
        return int(row.prefix_hashes[full - 1]) if full else NO_TAG
