"""Policy `adaptive` (DESIGN.md section 7): plans in time, with what the latency model has learnt.

Owns how long a wave should take, what of which lane goes into it, and how long it is held back. Lanes are served in
the order given. While the model is not to be believed, `mpu` plans.

* A pipeline that has work enough gets full waves of M: filling costs nothing, every wave costs c.
* One that has not gets as many waves as keep every stage busy until what has ended comes back (`target`), near-equal
  in time; work that stands alone is cut where filling and c balance (`makespan.best_waves`).
* A rest of a wave is filled with a part of a longer request only if that saves more of c than it reads prefix again.
* A wave that is still small is sent when the slowest stage can begin with it, not before: company may come.
"""

from __future__ import annotations

from collections.abc import Sequence

from wavepp_controller.core.flight_clock import FlightClock
from wavepp_controller.core.latency_model import LatencyModel, demand_of
from wavepp_controller.core.makespan import best_waves, extra_prefix, tokens_for
from wavepp_controller.core.plan_mpu import MpuPolicy
from wavepp_controller.core.planner import Lane, WaveBudget
from wavepp_controller.core.planning import Decision, InFlight, PlanView
from wavepp_proto.profile import Demand, StageCosts
from wavepp_proto.terms import DaemonKey, HoldKey, Row, StageTimes, WaveOrdinal

SLACK_WAVES = 1.0
"""Waves beyond P that hide the way of an ended prompt to the next admission."""
SMALL = 0.75
"""Part of its target below which a wave may wait for company."""
AHEAD_S = 0.005
"""A wave is sent this long before the slowest stage can begin with it..."""
AHEAD_PART = 0.1
"""...or this part of its own time, if that is longer."""


class AdaptivePolicy:
    name = "adaptive"

    def __init__(self, model: LatencyModel, min_wave_tokens: int, fills: int) -> None:
        self._model = model
        self._least, self._fills = min_wave_tokens, fills
        self._fallback = MpuPolicy(model, min_wave_tokens, fills)
        self._clock = FlightClock()
        self._demands: dict[WaveOrdinal, Demand] = {}
        """Of waves in flight."""
        self._begun: dict[HoldKey, int] = {}
        """Where lanes that were seen began."""
        self._burst: dict[HoldKey, float] = {}
        """Lanes that found the pipeline empty, and the wave time (us) that their work was cut into."""
        self._held: tuple[HoldKey, float] | None = None
        """First lane of a wave that waits for a round that is open, and until when."""
        self.fell_back = 0
        """Waves that `mpu` planned."""

    def observe(self, key: DaemonKey, rows: Sequence[Row], void_bitmap: int, times: StageTimes, now: float) -> None:
        self._clock.reported(key, now)
        self._fallback.observe(key, rows, void_bitmap, times, now)

    def plan(self, view: PlanView) -> Decision:
        if not self._model.believed(view.stages):
            decision = self._fallback.plan(view)
            self.fell_back += bool(decision.rows)
            return decision
        self._remember(view)
        ahead, flying = self._work(view)
        costs = self._model.slowest(ahead)
        target = self._target(view, costs, ahead, flying)
        rows, took = _fill(view, costs, target)
        until = self._hold(view, rows, took, target, costs)
        if until is not None:
            return Decision(wait_until=until)
        self._held = None
        return Decision(rows)

    # --- how much work there is -----------------------------------------------------------------

    def _remember(self, view: PlanView) -> None:
        known = self._demands
        self._demands = {one.ordinal: known.get(one.ordinal) or demand_of(one.rows) for one in view.in_flight}
        begun, burst = self._begun, self._burst
        self._begun = {lane.key: begun.get(lane.key, lane.start) for lane in view.lanes}
        self._burst = {lane.key: burst[lane.key] for lane in view.lanes if lane.key in burst} if burst else burst

    def _work(self, view: PlanView) -> tuple[Demand, Demand]:
        """What lanes ask of a stage, and what waves in flight do; waves not counted."""
        tokens = prefix = 0
        pairs = 0.0
        for lane in view.lanes:
            start, rest = lane.start, lane.prompt_tokens - lane.start
            tokens += rest
            pairs += rest * (start + rest / 2)
            prefix += start
        flights = self._demands.values()
        return (
            Demand(0.0, tokens, pairs, prefix),
            Demand(
                0.0,
                sum(one.tokens for one in flights),
                sum(one.pairs for one in flights),
                sum(one.prefix for one in flights),
            ),
        )

    # --- how long a wave should take ------------------------------------------------------------

    def _target(self, view: PlanView, costs: StageCosts, ahead: Demand, flying: Demand) -> float:
        """Microseconds of the slowest stage, c apart."""
        head = view.lanes[0]
        waiting = costs.demand_us(ahead)
        if not view.in_flight:
            cut = best_waves(waiting, costs.c_us, view.stages)
            self._burst = {lane.key: waiting / cut for lane in view.lanes}
        alone = self._alone(head, costs, view.stages)
        if head.key in self._burst:
            return max(alone, self._burst[head.key])
        total = waiting + costs.demand_us(flying)
        own = costs.chunk_us(self._begun[head.key], head.prompt_tokens - self._begun[head.key])
        spread = view.stages + SLACK_WAVES
        loop = min(total / spread, max(0.0, total - own) / (spread - 1.0)) if spread > 1.0 else total
        return max(alone, loop)

    def _alone(self, head: Lane, costs: StageCosts, stages: int) -> float:
        """Best time of one of its waves if nothing else were there: each cut costs c and its prefix again."""
        begun = self._begun[head.key]
        again = costs.g_us * begun
        work = costs.chunk_us(begun, head.prompt_tokens - begun) - again
        return work / best_waves(work, costs.c_us + again, stages) + again

    # --- how long it is held back ---------------------------------------------------------------

    def _hold(self, view: PlanView, rows: Sequence[Row], took: float, target: float, costs: StageCosts) -> float | None:
        """Until when a wave that is still small waits; None if it goes.

        While the slowest stage is busy until later, waiting costs nothing. Else it is worth up to c, if a round is
        open: that much is saved if its requests come along.
        """
        small = took < SMALL * min(target, _full(view, costs)) and len(rows) == len(view.lanes)
        if (
            not small
            or not view.in_flight
            or sum(row.length for row in rows) < sum(lane.prompt_tokens - lane.start for lane in view.lanes)
        ):
            return None
        begins = self._begins(view, demand_of(rows))
        send_at = begins - max(AHEAD_S, AHEAD_PART * (took + costs.c_us) / 1e6)
        if view.now < send_at:
            return send_at
        if not view.more_soon:
            return None
        key = rows[0].key
        if self._held is None or self._held[0] != key:
            self._held = (key, view.now + costs.c_us / 1e6)
        return self._held[1] if view.now < self._held[1] else None

    def _begins(self, view: PlanView, demand: Demand) -> float:
        """When a wave sent now must leave so that it reaches the slowest stage just when that is free."""
        took = [self._model.stage_us(stage, demand) for stage in range(view.stages)]
        slowest = max(range(view.stages), key=lambda stage: took[stage])

        def wave_s(stage: int, flight: InFlight) -> float:
            return self._model.stage_us(stage, self._demands[flight.ordinal]) / 1e6

        free = self._clock.free_at(slowest, view.in_flight, wave_s, view.now)
        return free - sum(took[:slowest]) / 1e6


def _full(view: PlanView, costs: StageCosts) -> float:
    """Time of M tokens from the first lane's start on."""
    return costs.chunk_us(view.lanes[0].start, view.wave_tokens)


def _fill(view: PlanView, costs: StageCosts, target: float) -> tuple[tuple[Row, ...], float]:
    """Rows of the next wave, and its time (us) without c; the first lane always advances."""
    budget = WaveBudget(view.wave_tokens, view.max_rows, view.block_tokens)
    rows: list[Row] = []
    took = 0.0
    for lane in view.lanes:
        if not budget.tokens or not budget.rows or took >= target:
            break
        most = _first(lane, view, costs, target) if not rows else _next(lane, view, costs, target, took, budget.tokens)
        row = budget.try_add(lane, most) if most else None
        if row is not None:
            rows.append(row)
            took += costs.chunk_us(row.start, row.length)
    return tuple(rows), took


def _first(lane: Lane, view: PlanView, costs: StageCosts, target: float) -> int:
    """Tokens of the first row: the rest of its request in near-equal times, as many as come nearest to the target."""
    rest = lane.prompt_tokens - lane.start
    again = costs.g_us * lane.start
    work = costs.chunk_us(lane.start, rest) - again
    least = -(-rest // view.wave_tokens)
    pieces = max(least, round(work / max(target - again, 1.0)) if target > again else least)
    if pieces <= 1:
        return rest
    return min(view.wave_tokens, _whole_blocks(tokens_for(costs, lane.start, work / pieces + again), view.block_tokens))


def _next(lane: Lane, view: PlanView, costs: StageCosts, target: float, took: float, room: int) -> int:
    """Tokens of a later row: all of a request that fits better than it misses, a part where that pays; else 0."""
    rest, left = lane.prompt_tokens - lane.start, target - took
    if rest <= room and costs.chunk_us(lane.start, rest) - left <= left:
        return rest
    cut = min(room, _whole_blocks(tokens_for(costs, lane.start, left), view.block_tokens), rest - 1)
    cut = cut // view.block_tokens * view.block_tokens
    if cut <= 0:
        return 0
    saved = costs.c_us * cut / view.wave_tokens
    return cut if saved > costs.g_us * extra_prefix(lane.start, rest, cut, view.wave_tokens) else 0


def _whole_blocks(tokens: float, block_tokens: int) -> int:
    """The nearest number of whole blocks, at least one."""
    return max(1, round(min(tokens, 1e12) / block_tokens)) * block_tokens
