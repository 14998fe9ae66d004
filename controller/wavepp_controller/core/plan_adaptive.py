"""Policy `adaptive` (DESIGN.md): plans in time, with what the latency model has learnt.

Owns how long a wave should take, what of which lane goes into it, and how long it is held back. Lanes are served in
the order given. While the model is not to be believed, `mpu` plans.

* A pipeline that has work enough gets full waves of M: filling costs nothing, every wave costs c.
* Where nobody follows those who ended, latency counts: waves are cut so that those here end soonest (`_soonest`).
* One that has not, with clients in a loop, gets as many waves as keep every stage busy until what has ended comes back
  (`target`), near-equal in time; work that stands alone is cut where filling and c balance (`makespan.best_waves`).
* A rest of a wave is filled with a part of a longer request only if that saves more of c than it reads prefix again.
* A wave that is still small is sent when the slowest stage can begin with it, not before: company may come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, sqrt

from wavepp_controller.core.arrivals import Arrivals
from wavepp_controller.core.flight_clock import FlightClock
from wavepp_controller.core.latency_model import LatencyModel
from wavepp_controller.core.makespan import best_waves, fewest_waves
from wavepp_controller.core.plan_mpu import MpuPolicy
from wavepp_controller.core.planner import Lane
from wavepp_controller.core.planning import Decision, InFlight, PlanView
from wavepp_controller.core.stage_model import demand_of
from wavepp_controller.core.time_budget import TimeBudget
from wavepp_proto.profile import Chunk, Demand, StageCosts
from wavepp_proto.terms import DaemonKey, HoldKey, Row, StageTimes, WaveOrdinal

SLACK_WAVES = 1.0
"""Waves beyond P that hide the way of an ended prompt to the next admission."""
WORSE_PER_LANE = 0.004
"""How much longer than at best the work that finds an empty pipeline may take for the sake of fewer waves: the more
lanes there are, the likelier others come after them, and then it is c that counts."""
MOST_WORSE = 0.03
SMALL = 0.9
"""Part of its target below which a wave may wait for company."""
USUAL_MEMORY = 16
"""Requests over which the usual work of one is averaged at most..."""
LEAST_USUAL = 4
"""...and at least."""
MOST_STALE = 4
"""Times as many lanes as there are may be remembered: to sweep them out costs as much as to plan."""
LEAST_WAIT_S = 0.001
"""Nothing waits for less: what is late moves its prediction along, and would be asked for without end."""
MOST_WAITS = 16
"""Nothing waits more often without a report: predictions that are late for so long say nothing."""
FIRST_TRIAL = 8
"""Waves that were not filled up because it does not pay, after which one is all the same; then twice as many, and so
on. Waves of one shape never tell c from b and g from a, and what was learnt of them would never be put to the test."""
MOST_SINCE = 1024
"""Requests whose beginning is remembered: more than there are lanes."""
AS_SLOW = 0.95
"""Part of the slowest stage's time from which on a stage counts as slow: the first such is never left idle."""
CROWD_MEMORY = 8
"""Waves after which fewer requests than before are believed not to be on their way back."""
MISSING = 0.5
"""Requests fewer than usual from which on somebody is believed to be on the way."""
LEAST_HOPE = 0.125
"""Part of c that a wave waits for them though nobody came the last times: a later one may."""
AHEAD_S = 0.005
"""A wave is sent this long before the slowest stage can begin with it..."""
AHEAD_PART = 0.1
"""...or this part of its own time, if that is longer."""


@dataclass(slots=True)
class _Seen:
    """A lane that was seen before. Times in us of the slowest stage, c apart."""

    begun: int
    """Where it began (tokens)."""
    cut: float = 0.0
    """Its longest chunk so far. Shorter ones after it cost c and gain nothing: the last stage is that far behind."""
    burst: float | None = None
    """Of a lane that found the pipeline empty: the time of a wave that all the work there was cut into."""


class _Flying:
    """A wave in flight, as far as it was asked about."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        self._demand: Demand | None = None
        self.finals = sum([row.final for row in rows])
        """Prompts that end with the wave: others will come for them."""

    @property
    def demand(self) -> Demand:
        if self._demand is None:
            self._demand = demand_of(self._rows)
        return self._demand


class AdaptivePolicy:
    name = "adaptive"

    def __init__(self, model: LatencyModel, min_wave_tokens: int, fills: int) -> None:
        self._model = model
        self._least, self._fills = min_wave_tokens, fills
        self._fallback = MpuPolicy(model, min_wave_tokens, fills)
        self._clock = FlightClock()
        self._arrivals = Arrivals()
        self._since: dict[HoldKey, float] = {}
        """When requests that have not ended were first seen; the newest MOST_SINCE of them."""
        self._last_stage = -1
        self._waiting: tuple[PlanView, Decision] | None = None
        """The last answer, if it was to wait and nothing was reported since."""
        self._waits = 0
        """Answers to wait since the last report or wave."""
        self._refused, self._next_trial = 0, FIRST_TRIAL
        """Waves that were not filled up since the last trial, and how many make the next."""
        self._dated = True
        """Who comes is seen when it comes: the ring has room."""
        self._flights: dict[WaveOrdinal, _Flying] = {}
        self._seen: dict[HoldKey, _Seen] = {}
        self._usual: deque[Chunk] = deque(maxlen=USUAL_MEMORY)
        """Work of the last requests, each as one chunk."""
        self._crowd = 0.0
        """Requests that there usually are: in lanes, ending with waves in flight, or on their way back."""
        self._held: tuple[HoldKey, float, int] | None = None
        """First lane of a wave that waits for company, until when, and its rows when that began."""
        self._hope = 1.0
        """Part of c that it waits: halved when nobody came (down to LEAST_HOPE), whole again when somebody did."""
        self.fell_back = 0
        """Waves that `mpu` planned."""

    def observe(self, key: DaemonKey, rows: Sequence[Row], void_bitmap: int, times: StageTimes, now: float) -> None:
        self._clock.reported(key, now)
        self._waiting, self._waits = None, 0
        if key.stage == self._last_stage and key.rank == 0:
            self._end([row.key for row in rows if row.final], now)
        self._fallback.observe(key, rows, void_bitmap, times, now)

    def plan(self, view: PlanView) -> Decision:
        if self._waiting is not None and _unchanged(*self._waiting, view):
            return self._waiting[1]
        self._waiting = None
        self._remember(view)
        if not self._model.believed(view.stages):
            decision = self._fallback.plan(view)
            self.fell_back += bool(decision.rows)
            return decision
        ahead = _ahead(view.lanes)
        costs = self._model.slowest(ahead)
        if self._arrivals.looped:
            loop = self._loop(view, costs, ahead)
            target = self._target(view, costs, ahead, loop)
            others = self._crowd > len(view.lanes) + 0.5
        else:
            loop, others = costs.demand_us(ahead), False
            target = self._soonest(view, costs, loop)
        trial = self._refused >= self._next_trial
        budget = TimeBudget(view, costs, target, loop, others, not self._arrivals.looped, trial)
        rows, took = budget.fill()
        until = self._hold(view, rows, took, target, costs)
        if until is not None and self._waits < MOST_WAITS:
            self._waits += 1
            self._waiting = (view, Decision(wait_until=until))
            return self._waiting[1]
        self._waits = 0
        self._refused += budget.refused
        if trial:
            self._refused, self._next_trial = 0, 2 * self._next_trial
        if self._held is not None:
            self._hope = 1.0 if len(rows) > self._held[2] else max(LEAST_HOPE, self._hope / 2)
            self._held = None
        self._crowd += (self._count(view) - self._crowd) / CROWD_MEMORY
        for row in [row for row in rows if not row.final]:
            seen = self._seen[row.key]
            seen.cut = max(seen.cut, costs.chunk_us(row.start, row.length))
        return Decision(rows)

    # --- how much work there is -----------------------------------------------------------------

    def _remember(self, view: PlanView) -> None:
        """Forget what is over; learn how much work a request is, and how many there are."""
        self._last_stage = view.stages - 1
        known = self._flights
        self._flights = {one.ordinal: known.get(one.ordinal) or _Flying(one.rows) for one in view.in_flight}
        seen = self._seen
        came = [lane for lane in view.lanes if lane.key not in seen]
        chunks = [(lane.start, lane.prompt_tokens - lane.start) for lane in came]
        self._arrivals.came(chunks, view.now, dated=self._dated)
        self._dated = len(view.in_flight) + 1 < view.ring
        if came:
            self._usual.extend(chunks)
            self._since.update([(lane.key, view.now) for lane in came])
            while len(self._since) > MOST_SINCE:
                del self._since[next(iter(self._since))]  # the oldest: cancelled long ago, most likely
            seen.update([(lane.key, _Seen(lane.start)) for lane in came])
            for one in seen.values():
                one.burst = None  # it does not stand alone any more
        if len(seen) > MOST_STALE * len(view.lanes) + USUAL_MEMORY:
            self._seen = {lane.key: seen[lane.key] for lane in view.lanes}
        self._crowd = max(self._crowd, self._count(view))

    def _end(self, keys: Sequence[HoldKey], now: float) -> None:
        for key in keys:
            if (since := self._since.pop(key, None)) is not None:
                self._arrivals.took(now - since)
        self._arrivals.ended(len(keys), now)

    def _count(self, view: PlanView) -> int:
        return len(view.lanes) + sum(one.finals for one in self._flights.values())

    # --- how long a wave should take ------------------------------------------------------------

    def _loop(self, view: PlanView, costs: StageCosts, ahead: Demand) -> float:
        """Work of everybody there usually is: what waits, and what is on its way back."""
        return costs.demand_us(ahead) + self._usual_us(costs) * max(0.0, self._crowd - len(view.lanes))

    def _target(self, view: PlanView, costs: StageCosts, ahead: Demand, total: float) -> float:
        """Microseconds of the slowest stage, c apart."""
        head, waiting = view.lanes[0], costs.demand_us(ahead)
        if not view.in_flight:
            worse = min(MOST_WORSE, WORSE_PER_LANE * (len(view.lanes) - 1))
            cut = waiting / fewest_waves(waiting, costs.c_us, view.stages, worse)
            for lane in view.lanes:
                self._seen[lane.key].burst = cut
        seen = self._seen[head.key]
        alone = max(self._alone(head, costs, view.stages), seen.cut)
        if seen.burst is not None:
            return max(alone, seen.burst)
        others = total - costs.chunk_us(head.start, head.prompt_tokens - head.start)
        spread = view.stages + SLACK_WAVES
        loop = min(total / spread, max(0.0, others) / (spread - 1.0)) if spread > 1.0 else total
        return max(alone, loop)

    def _soonest(self, view: PlanView, costs: StageCosts, work: float) -> float:
        """The time of waves after which requests end soonest on average, if nobody comes back because of it.

        A wave of T more makes each request end (P - 1) T later; each of the `work` / T waves costs c, which half of the
        lanes (those behind it) and everybody who comes before all is done must wait for.
        """
        head, lanes = view.lanes[0], len(view.lanes)
        seen = self._seen[head.key]
        again = costs.g_us * seen.begun
        if view.stages == 1:
            return max(work, seen.cut)
        behind = (lanes + 1) / 2 + self._arrivals.later(work, costs, view.now)
        return max(seen.cut, again + sqrt((costs.c_us + again) * work * behind / lanes / (view.stages - 1)))

    def _usual_us(self, costs: StageCosts) -> float:
        """Work of a request on its way back: the geometric mean of one round of the crowd, as a few long ones shall not
        stand for all."""
        lately = list(self._usual)[-max(LEAST_USUAL, round(self._crowd)) :]
        return exp(sum([log(max(1.0, costs.chunk_us(*chunk))) for chunk in lately]) / len(lately))

    def _alone(self, head: Lane, costs: StageCosts, stages: int) -> float:
        """Best time of one of its waves if nothing else were there: each cut costs c and its prefix again."""
        begun = self._seen[head.key].begun
        again = costs.g_us * begun
        work = costs.chunk_us(begun, head.prompt_tokens - begun) - again
        return work / best_waves(work, costs.c_us + again, stages) + again

    # --- how long it is held back ---------------------------------------------------------------

    def _hold(self, view: PlanView, rows: Sequence[Row], took: float, target: float, costs: StageCosts) -> float | None:
        """Until when a wave waits; None if it goes.

        While the slowest stage is busy until later, waiting costs nothing, and a short prompt that comes meanwhile does
        not stand behind it: one as long as it should be, a full one too, waits while another one waits before it, one
        that is shorter until the stage is nearly free. That one
        is also worth waiting for up to c if a round is open or somebody of the crowd is missing, as who ended in one
        wave comes back one after the other: so much is saved if they come along.
        """
        if not view.in_flight:
            return None
        tokens = sum(row.length for row in rows)
        rest = sum(lane.prompt_tokens - lane.start for lane in view.lanes) - tokens
        small = not rest and took < SMALL * target
        own_s = (took + costs.c_us) / 1e6
        early = max(AHEAD_S, AHEAD_PART * own_s) if small else max(AHEAD_S, own_s)
        send_at = self._begins(view, demand_of(rows)) - early
        if view.now + LEAST_WAIT_S < send_at:
            return send_at
        if not small or not self._arrivals.looped or not (view.more_soon or self._crowd - self._count(view) > MISSING):
            return None
        key = rows[0].key
        if self._held is None or self._held[0] != key:
            self._held = (key, view.now + self._hope * costs.c_us / 1e6, len(rows))
        return self._held[1] if view.now < self._held[1] else None

    def _begins(self, view: PlanView, demand: Demand) -> float:
        """When a wave sent now must leave so that it reaches the slowest stage just when that is free."""
        took = [self._model.stage_us(stage, demand) for stage in range(view.stages)]
        slowest = next(stage for stage in range(view.stages) if took[stage] >= AS_SLOW * max(took))

        def wave_s(stage: int, flight: InFlight) -> float:
            return self._model.stage_us(stage, self._flights[flight.ordinal].demand) / 1e6

        free = self._clock.free_at(slowest, view.in_flight, wave_s, view.now)
        return free - sum(took[:slowest]) / 1e6


def _unchanged(seen: PlanView, answer: Decision, view: PlanView) -> bool:
    """Whether a view asks for what was answered already: events that concern nothing planned come many a wave."""
    return (
        answer.wait_until is not None
        and view.now < answer.wait_until
        and view.more_soon == seen.more_soon
        and view.in_flight == seen.in_flight
        and view.lanes == seen.lanes
    )


def _ahead(lanes: Sequence[Lane]) -> Demand:
    """What lanes ask of a stage, each as one chunk; waves are not counted."""
    starts = [lane.start for lane in lanes]
    ends = [lane.prompt_tokens for lane in lanes]
    prefix = sum(starts)
    pairs = (sum([end * end for end in ends]) - sum([start * start for start in starts])) / 2
    return Demand(0.0, sum(ends) - prefix, pairs, prefix)
