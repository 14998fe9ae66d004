"""Where a request takes recurrent snapshots (DESIGN.md, publish).

Owns the choice of positions and how many slots are promised for them: periodic ones, the last full block
of the prompt, and on demand where a hit was lost for want of one or where another request waits for the
shared prefix. The same on all stages. Pure; `admission` asks for counts before a round and for positions
once the endpoint is agreed, `sharing` whether one more place can still be promised.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

PART_OF_SLOTS = 4
"""One request takes at most one slot in so many, so that a few long prompts do not push out everybody's..."""
LEAST_PLACES = 2
"""...but never fewer than this where they fit: with one alone the end of the prompt would always take the turn of the
place on demand, and a prompt of whole blocks, which is reused up to its last block, would never hit."""


@dataclass(frozen=True, slots=True)
class SnapshotPolicy:
    block_tokens: int
    every_tokens: int
    """Distance of periodic snapshots, a multiple of B; 0 = none."""
    most: int
    """Most snapshots of one request; 0 where no stage has recurrent layers."""
    slots: int
    """Fewest slots of any recurrent daemon; 0 likewise."""

    @classmethod
    def of(cls, block_tokens: int, snapshot_tokens: int, fewest_slots: int | None) -> SnapshotPolicy:
        """`fewest_slots` of any recurrent daemon; None if there is no such daemon."""
        every = max(block_tokens, snapshot_tokens // block_tokens * block_tokens) if snapshot_tokens else 0
        slots = fewest_slots or 0
        # A working state and the snapshot begun with take a slot each.
        most = max(1, min(LEAST_PLACES, slots - 2), slots // PART_OF_SLOTS) if slots else 0
        return cls(block_tokens, every, most, slots)

    def promised(self, endpoint: int, prompt_tokens: int) -> int:
        """Snapshots to escrow for a suffix: those known now, and a spare for what turns up on the way.

        Never so many that the request could not be held by an empty stage: its working state and the snapshot
        that it begins with take their slots first."""
        if not self.most:
            return 0
        most = min(self.most, self.slots - 1 - (endpoint > 0))
        return min(most, len(self.positions(endpoint, prompt_tokens, (), most)) + 1)

    def positions(self, start: int, prompt_tokens: int, wanted: Iterable[int], room: int) -> tuple[int, ...]:
        """At most `room` positions in (start, prompt_tokens], ascending multiples of B.

        The end of the prompt goes first (the next turn of a conversation begins there), then `wanted` in
        their order, then periodic ones from the back: the later one saves more.
        """
        end = prompt_tokens // self.block_tokens * self.block_tokens
        chosen: list[int] = []
        for position in (end, *wanted, *self._periodic(start, end)):
            if len(chosen) >= min(room, self.most):
                break
            if start < position <= end and position not in chosen:
                chosen.append(position)
        return tuple(sorted(chosen))

    def _periodic(self, start: int, end: int) -> range:
        """Multiples of the distance in (start, end), last first."""
        if not self.every_tokens:
            return range(0)
        last = (end - 1) // self.every_tokens * self.every_tokens
        return range(last, start, -self.every_tokens)
