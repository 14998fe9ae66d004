"""Policy `mpu` (DESIGN.md): waves just small enough to keep the pipeline filled.

Owns the ladder of budgets, the choice of one by how many waves it would supply, how the choice moves from wave to
wave, and the wait of a lone small wave for company. Counts tokens, not time: `plan_adaptive` plans in time and falls
back on this. A decision is a planned wave. Packing is `planner`'s.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from wavepp_controller.core.latency_model import LatencyModel
from wavepp_controller.core.planner import WaveBudget, pack
from wavepp_controller.core.planning import Decision, PlanView
from wavepp_controller.core.stage_model import demand_of
from wavepp_proto.terms import DaemonKey, Row, StageTimes

WAIT_S = 0.005
"""Wait for company where no wave's time is known: about a prepare round."""
WAIT_PART = 0.25
"""...and of the predicted time of a wave where it is."""
MOST_SPLIT = 0.125
"""Part of the work that a thinner wave may newly split."""
FALL_BELOW = 0.9
"""Part of the wanted supply that must be missing before the budget falls."""


def ladder(wave_tokens: int, least: int, block_tokens: int) -> tuple[int, ...]:
    """b0 = M, b(j+1) = max(b_min, b(j)/2 rounded down to blocks): the budgets, descending.

    `least` (b_min) is rounded down to blocks, and is M at most and a block at least.
    """
    least = min(wave_tokens, max(block_tokens, least // block_tokens * block_tokens))
    budgets = [wave_tokens]
    while budgets[-1] > least:
        budgets.append(max(least, budgets[-1] // 2 // block_tokens * block_tokens))
    return tuple(budgets)


@dataclass(frozen=True, slots=True)
class Supply:
    """What there is to cut into waves."""

    tokens: int
    """W: not scheduled yet, and chunks still in the ring."""
    pieces: Sequence[int]
    """Lengths of both, ascending."""
    suffixes: Sequence[int]
    """Lengths of what is not scheduled, ascending: what could still be split."""

    @classmethod
    def of(cls, view: PlanView) -> Supply:
        suffixes = sorted([lane.prompt_tokens - lane.start for lane in view.lanes])
        pieces = sorted([*suffixes, *[row.length for flight in view.in_flight for row in flight.rows]])
        return cls(sum(pieces), pieces, suffixes)

    def waves(self, budget: int) -> float:
        """n(b) = max(W / b, pieces larger than b / 2): two of those cannot share a wave."""
        return max(self.tokens / budget, len(self.pieces) - bisect_right(self.pieces, budget / 2))

    def newly_split(self, small: int, large: int) -> int:
        """Tokens of suffixes in (small, large]: whole under the larger budget, cut under the smaller."""
        return sum(self.suffixes[bisect_right(self.suffixes, small) : bisect_right(self.suffixes, large)])


def largest_filling(budgets: Sequence[int], supply: Supply, wanted: int) -> int:
    """The index of the largest budget with n(b) >= S = `wanted`, else the last."""
    return next((step for step, budget in enumerate(budgets) if supply.waves(budget) >= wanted), len(budgets) - 1)


def choose(budgets: Sequence[int], supply: Supply, wanted: int, stages: int) -> int:
    """The same, but once a larger budget supplies P waves a smaller one may newly split 12.5 % of W at most."""
    target = largest_filling(budgets, supply, wanted)
    enough = largest_filling(budgets, supply, stages)
    if supply.waves(budgets[enough]) < stages:
        return target
    for step in range(enough + 1, target + 1):
        if supply.newly_split(budgets[step], budgets[enough]) > MOST_SPLIT * supply.tokens:
            return step - 1
    return target


@dataclass(frozen=True, slots=True)
class Steering:
    """Which budget is used, and for how many decisions another has been wanted."""

    step: int
    """Index in the ladder: smaller is a larger budget."""
    rising: int = 0
    falling: int = 0

    def after(self, wanted: int, ring: int, thin: bool) -> Steering:
        """After one more decision at which `wanted` was the choice.

        A rise of several steps (a burst) counts at once, of one step once it has lasted R/2 decisions; a fall once it
        has lasted R decisions, if the present budget supplies too few waves (`thin`).
        """
        if wanted == self.step:
            return Steering(self.step)
        if wanted < self.step:
            rising = self.rising + 1
            done = self.step - wanted > 1 or 2 * rising >= ring
            return Steering(wanted) if done else Steering(self.step, rising=rising)
        falling = self.falling + 1
        return Steering(wanted) if falling >= ring and thin else Steering(self.step, falling=falling)


@dataclass(frozen=True, slots=True)
class Waiting:
    """A lone wave that waits for company: for one iteration, which ends with the next report or vote."""

    lanes: tuple[tuple[str, int], ...]
    """(request, start): a vote shows as another lane."""
    reports: int
    until: float


class MpuPolicy:
    name = "mpu"

    def __init__(self, model: LatencyModel, min_wave_tokens: int, fills: int) -> None:
        self._model = model
        self._least, self._fills = min_wave_tokens, fills
        self._steering: Steering | None = None
        self._waiting: Waiting | None = None
        self._reports = 0

    def plan(self, view: PlanView) -> Decision:
        budgets = ladder(view.wave_tokens, self._least, view.block_tokens)
        steering = self._steer(budgets, view)
        budget = budgets[steering.step]
        room = WaveBudget(budget, view.max_rows, view.block_tokens)
        rows = pack(view.lanes, room, least_cut=max(budgets[-1], budget // 2))
        until = self._wait(view, rows, budget)
        if until is not None:
            return Decision(wait_until=until)
        self._steering, self._waiting = steering, None
        return Decision(rows)

    def observe(self, key: DaemonKey, rows: Sequence[Row], void_bitmap: int, times: StageTimes, now: float) -> None:
        self._reports += 1
        self._model.observe(key, rows, void_bitmap, times)

    def _steer(self, budgets: Sequence[int], view: PlanView) -> Steering:
        supply = Supply.of(view)
        wanted_waves = view.ring + (self._fills - 1) * view.stages
        wanted = choose(budgets, supply, wanted_waves, view.stages)
        if self._steering is None or not view.in_flight:
            return Steering(wanted)  # nothing runs that a sudden change could unsettle
        thin = supply.waves(budgets[self._steering.step]) < FALL_BELOW * wanted_waves
        return self._steering.after(wanted, view.ring, thin)

    def _wait(self, view: PlanView, rows: Sequence[Row], budget: int) -> float | None:
        """Until when a lone wave waits for company; None if it goes.

        Lone: nothing is left beside it, and it is below half of its budget. Company: a round is open, or a request is
        ready for the next. The ring is busy while every stage could have a wave: then waiting leaves no stage idle.
        """
        tokens = sum(row.length for row in rows)
        rest = sum(lane.prompt_tokens - lane.start for lane in view.lanes) - tokens
        if rest or 2 * tokens >= budget or len(view.in_flight) < view.stages or not view.more_soon:
            return None
        lanes = tuple((lane.key.request_id, lane.start) for lane in view.lanes)
        waiting = self._waiting
        if waiting is None:
            predicted = self._model.wave_us(view.stages, demand_of(rows))
            pause = WAIT_S if predicted is None else WAIT_PART * predicted / 1e6
            waiting = self._waiting = Waiting(lanes, self._reports, view.now + pause)
        over = waiting.reports != self._reports or waiting.lanes != lanes or view.now >= waiting.until
        return None if over else waiting.until
