"""How lanes fill one wave (DESIGN.md), whatever the policy.

Owns the packing rules: lanes in the order given, several requests in one wave, interior chunk ends on
multiples of B and by preference on snapshot points, every stop a chunk end, no empty chunk. Pure: lanes in,
rows out. Does not own positions: the caller advances a lane only by rows it has written to every daemon's stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from wavepp_proto.terms import HoldKey, Row


@dataclass(frozen=True, slots=True)
class Lane:
    """One admitted request with tokens left to schedule."""

    key: HoldKey
    start: int
    """First token not in any wave yet; a multiple of B."""
    prompt_tokens: int
    """End of the work; > start."""
    snapshots: tuple[int, ...] = ()
    """Positions > start where a recurrent snapshot is taken, ascending multiples of B."""
    stops: tuple[int, ...] = ()
    """Positions > start where a chunk must end, ascending multiples of B: somebody waits for what lies before."""


@dataclass(slots=True)
class WaveBudget:
    """Room of ONE wave: built for one planning step, spent lane by lane, thrown away."""

    tokens: int
    rows: int
    block_tokens: int

    def try_add(self, lane: Lane, most: int | None = None, least_cut: int = 0) -> Row | None:
        """The lane's chunk, as long as fits but at most `most` tokens; None if not one whole block (or the rest) does.

        None too if the chunk were cut off from a longer rest with fewer than `least_cut` tokens.
        """
        if self.rows == 0:
            return None
        room, rest = self.tokens if most is None else min(self.tokens, most), lane.prompt_tokens - lane.start
        if rest <= room and not lane.stops and not lane.snapshots:  # so often that it is most of what a plan costs
            self.tokens -= rest
            self.rows -= 1
            return Row(lane.key, lane.start, rest, True)
        end = self._end(lane, room)
        if end <= lane.start or (end - lane.start < least_cut and _cuts(lane, end)):
            return None
        self.tokens -= end - lane.start
        self.rows -= 1
        snapshots = tuple(place for place in lane.snapshots if place <= end) if lane.snapshots else ()
        return Row(lane.key, lane.start, end - lane.start, end == lane.prompt_tokens, snapshots)

    def _end(self, lane: Lane, tokens: int) -> int:
        """Where the lane's chunk would end: at the first stop, else as far as `tokens` go.

        An interior end moves back to the last snapshot point if that costs less than half of the chunk:
        the engine then need not split its scan, and a wave is not given away for it.
        """
        end = min(lane.prompt_tokens, lane.start + tokens)
        if lane.stops and lane.stops[0] <= end:
            return lane.stops[0]
        if end == lane.prompt_tokens:
            return end
        end = end // self.block_tokens * self.block_tokens
        half = lane.start + (end - lane.start) // 2
        return max((place for place in lane.snapshots if half < place <= end), default=end)


@dataclass(slots=True)
class ShortFirst:
    """Lets what ends within one wave go before a longer prompt that came earlier, for a share of the tokens.

    Every wave earns `share` of its tokens, up to the share of a full one; a lane that is moved ahead spends its own,
    and the last one may overdraw. Once the credit is whole, lanes with a rest of at most M go before a first lane with
    more: earlier, every wave would be cut for them and prefixes read again. So a short prompt waits for the waves that
    are under way and for the short ones before it, and a long one gets 1 - share of the tokens at least: it takes
    1 / (1 - share) times as long at most, and one wave more.
    """

    share: float
    wave_tokens: int
    """M."""
    _credit: float = field(init=False)
    """Tokens; below zero where the last lane that was moved ahead was longer than what was left."""
    _ahead: frozenset[HoldKey] = field(init=False, default=frozenset())
    """Lanes that were moved ahead for the wave that is planned."""

    def __post_init__(self) -> None:
        self._credit = self.share * self.wave_tokens

    def order(self, lanes: Sequence[Lane], peers: int) -> Sequence[Lane]:
        """`lanes` as the policy is to serve them; only the first `peers`, of one class, change places."""
        self._ahead = frozenset()
        first = lanes[0]
        whole = self._credit >= self.share * self.wave_tokens
        if not self.share or not whole or first.prompt_tokens - first.start <= self.wave_tokens:
            return lanes
        short: list[Lane] = []
        left = self._credit
        for lane in lanes[1:peers]:
            if left <= 0:
                break
            rest = lane.prompt_tokens - lane.start
            if rest <= self.wave_tokens:
                short.append(lane)
                left -= rest
        if not short:
            return lanes
        self._ahead = frozenset(lane.key for lane in short)
        return [*short, *(lane for lane in lanes if lane.key not in self._ahead)]

    def sent(self, rows: Sequence[Row]) -> None:
        """The wave that was planned with the last order."""
        tokens = sum(row.length for row in rows)
        spent = sum(row.length for row in rows if row.key in self._ahead)
        self._credit = min(self._credit + self.share * tokens - spent, self.share * self.wave_tokens)


def _cuts(lane: Lane, end: int) -> bool:
    """Whether a chunk up to `end` leaves a rest for no other reason than its length."""
    return end != lane.prompt_tokens and end not in lane.stops


def pack(lanes: Iterable[Lane], budget: WaveBudget, least_cut: int = 0) -> tuple[Row, ...]:
    """Rows of the next wave, in lane order; empty only if there are no lanes.

    The budget is a positive multiple of B, so the first lane always advances. A lane whose next block does not fit
    lets shorter ones behind it use the rest: it is first again in the next wave, so nobody is overtaken by more than a
    leftover. What is left after the first row is not filled with a fragment of fewer than `least_cut` tokens.
    """
    rows: list[Row] = []
    for lane in lanes:
        if budget.tokens == 0 or budget.rows == 0:
            break
        row = budget.try_add(lane, least_cut=least_cut if rows else 0)
        if row is not None:
            rows.append(row)
    return tuple(rows)


def plan_fixed(lanes: Iterable[Lane], wave_tokens: int, max_rows: int, block_tokens: int) -> tuple[Row, ...]:
    """The wave of policy `fixed`: up to M = `wave_tokens`, a positive multiple of B."""
    return pack(lanes, WaveBudget(wave_tokens, max_rows, block_tokens))
