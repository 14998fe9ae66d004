"""What the next wave carries (DESIGN.md section 7): policy `fixed`, always up to M tokens.

Owns the packing rules: first come first served, several requests in one wave, interior chunk ends on
multiples of B, no empty chunk. Pure: lanes in, rows out. Does not own positions: the caller advances
a lane only by rows it has written to every daemon's stream.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from wavepp_proto.terms import HoldKey, Row


@dataclass(frozen=True, slots=True)
class Lane:
    """One admitted request with tokens left to schedule."""

    key: HoldKey
    start: int
    """First token not in any wave yet; a multiple of B."""
    prompt_tokens: int
    """End of the work; > start."""


@dataclass(slots=True)
class WaveBudget:
    """Room of ONE wave: built for one planning step, spent lane by lane, thrown away."""

    tokens: int
    rows: int
    block_tokens: int

    def try_add(self, lane: Lane) -> Row | None:
        """The lane's chunk, as long as fits; None if not one whole block (or the rest) does."""
        if self.rows == 0:
            return None
        end = min(lane.prompt_tokens, lane.start + self.tokens)
        if end < lane.prompt_tokens:
            end = end // self.block_tokens * self.block_tokens
        if end <= lane.start:
            return None
        self.tokens -= end - lane.start
        self.rows -= 1
        return Row(lane.key, lane.start, end - lane.start, final=end == lane.prompt_tokens)


def plan_fixed(lanes: Iterable[Lane], wave_tokens: int, max_rows: int, block_tokens: int) -> tuple[Row, ...]:
    """Rows of the next wave, in lane order; empty only if there are no lanes.

    `wave_tokens` (M) is a positive multiple of `block_tokens`, so the first lane always advances. A
    lane whose next block does not fit lets shorter ones behind it use the rest: it is first again in
    the next wave, so nobody is overtaken by more than a leftover.
    """
    budget = WaveBudget(wave_tokens, max_rows, block_tokens)
    rows = []
    for lane in lanes:
        if budget.tokens == 0 or budget.rows == 0:
            break
        row = budget.try_add(lane)
        if row is not None:
            rows.append(row)
    return tuple(rows)
