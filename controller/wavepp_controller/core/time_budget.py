"""One wave filled by time instead of tokens (DESIGN.md): the packing of `plan_adaptive`.

Owns which lanes come in, whole or in part, so that the wave takes about a given time: in the order of the lanes, within
M tokens, by the rules of `planner.WaveBudget`. Built for one decision and thrown away. Times are microseconds of the
slowest stage, c apart.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from wavepp_controller.core.makespan import extra_prefix, tokens_for
from wavepp_controller.core.planner import Lane, WaveBudget
from wavepp_controller.core.planning import PlanView
from wavepp_proto.errors import InternalError
from wavepp_proto.profile import StageCosts
from wavepp_proto.terms import Row

SPARE_WAVES = 2.0
"""Full waves beyond P that there must be before requests are cut just to fill waves up: a request in two waves comes
back one wave later, and the way of an ended prompt to the next admission takes another."""
DEEP = 2.0
"""Times as many waves from which on a request that comes back one wave later makes no stage wait."""
JUDGED = 64
"""Requests over which the habit of filling waves up is judged."""


@dataclass(slots=True)
class TimeBudget:
    view: PlanView
    costs: StageCosts
    target: float
    """What the wave should take; it may be more than M tokens do."""
    loop: float
    """All the work that there usually is, on its way back included."""
    others: bool
    """Others than the lanes are usually there: they fill up what the last wave of a request leaves."""
    whole_first: bool = False
    """Who fits in whole goes before the parts of who does not: it ends a wave earlier, and they end no later."""
    trial: bool = False
    """Fill the wave up with a part of a request whether that pays or not."""
    refused: bool = field(init=False, default=False)
    """A part would have fitted and did not pay, where trying it all the same costs nobody anything but c and prefix."""

    def fill(self) -> tuple[tuple[Row, ...], float]:
        """Rows of the wave, and its time; the first lane always advances."""
        view, costs, target = self.view, self.costs, self.target
        budget = WaveBudget(view.wave_tokens, view.max_rows, view.block_tokens)
        first = view.lanes[0]
        row = budget.try_add(first, self._first(first))
        if row is None:
            raise InternalError("not one block fits into an empty wave", field="wave_tokens", value=view.wave_tokens)
        rows, took = [row], costs.chunk_us(row.start, row.length)
        linear, pairs, prefix = costs.b_us, costs.a_us, costs.g_us
        longer: list[Lane] = []
        for lane in view.lanes[1:]:
            if took >= target or not budget.tokens or not budget.rows:
                break
            start = lane.start
            rest = lane.prompt_tokens - start
            adds = linear * rest + pairs * (start * rest + rest * rest / 2) + prefix * start  # chunk_us: no call a lane
            if rest > budget.tokens or adds > 2.0 * (target - took):
                if self.whole_first:
                    longer.append(lane)
                else:
                    took += self._add_part(lane, budget, rows, took)
                continue
            row = budget.try_add(lane)
            if row is not None:
                rows.append(row)
                took += adds if row.length == rest else costs.chunk_us(start, row.length)
        for lane in longer:
            if took >= target or not budget.tokens or not budget.rows:
                break
            took += self._add_part(lane, budget, rows, took)
        return tuple(rows), took

    def _add_part(self, lane: Lane, budget: WaveBudget, rows: list[Row], took: float) -> float:
        """Add a part of the lane to `rows`, if that pays; its time."""
        most = self._part(lane, took, budget.tokens)
        row = budget.try_add(lane, most) if most else None
        if row is None:
            return 0.0
        rows.append(row)
        return self.costs.chunk_us(row.start, row.length)

    def _first(self, lane: Lane) -> int:
        """Tokens of the first row: the rest of its request in near-equal times, as many as come nearest to the target.

        Full waves where those do not take longer, and others fill up what the last one leaves; and where clients in a
        loop bring work for more waves than stages: shorter ones would only let others overtake a long prompt.
        """
        wave_tokens, costs = self.view.wave_tokens, self.costs
        rest, again = lane.prompt_tokens - lane.start, costs.g_us * lane.start
        least = 1
        if rest <= wave_tokens or (len(self.view.lanes) == 1 and not self.others):
            least = -(-rest // wave_tokens)
        elif (full := costs.chunk_us(lane.start, wave_tokens)) <= self.target or self._plenty(full):
            return wave_tokens
        work, room = costs.chunk_us(lane.start, rest) - again, self.target - again
        pieces = max(least, round(work / room)) if room > 0.0 else least
        if pieces <= 1:
            return min(rest, wave_tokens)
        return min(wave_tokens, self._blocks(tokens_for(costs, lane.start, work / pieces + again)))

    def _part(self, lane: Lane, took: float, room: int) -> int:
        """Tokens of a later row of which not all fits: a part where that pays, else 0."""
        costs, rest, left = self.costs, lane.prompt_tokens - lane.start, self.target - took
        if not self._may_cut(took):
            return 0
        cut = min(room, self._blocks(tokens_for(costs, lane.start, left)), rest - 1)
        cut = cut // self.view.block_tokens * self.view.block_tokens
        if cut <= 0:
            return 0
        if self.trial or self._pays(lane.start, rest, cut):
            return cut
        full = costs.chunk_us(self.view.lanes[0].start, self.view.wave_tokens)
        self.refused = self.loop >= DEEP * self._spare(full)
        return 0

    def _pays(self, start: int, rest: int, cut: int) -> bool:
        """Whether a part of a request, given to a wave that has room, saves more of c than it reads prefix again.

        Room of x is worth c x / M at most. It is so at once if the request then needs a wave less; else it has only
        moved to the request's own last wave, beside the room that was there anyway, and has to be filled again there:
        what that comes to on average, request after request, counts too.
        """
        costs, full = self.costs, self.view.wave_tokens

        def again(part: int) -> float:
            return costs.g_us * extra_prefix(start, rest, part, full)

        worth = costs.c_us / full
        if again(cut) >= worth * cut:
            return False
        if -(-(rest - cut) // full) < -(-rest // full):
            return True
        parts = range(full // 8, min(full, rest), max(1, full // 4))
        usual = sum([min(worth * part, again(part)) for part in parts]) / max(1, len(parts))
        return worth * cut > JUDGED * (usual - worth * (-rest % full))

    def _may_cut(self, took: float) -> bool:
        full = self.costs.chunk_us(self.view.lanes[0].start, self.view.wave_tokens)
        return self.loop >= self._spare(full) or took < min(self.target, full) / 2

    def _plenty(self, full: float) -> bool:
        return not self.whole_first and self.loop >= self._spare(full)

    def _spare(self, full: float) -> float:
        return (self.view.stages + SPARE_WAVES) * full

    def _blocks(self, tokens: float) -> int:
        """The nearest number of whole blocks, at least one, in tokens."""
        block = self.view.block_tokens
        return max(1, round(min(tokens, 1e12) / block)) * block
