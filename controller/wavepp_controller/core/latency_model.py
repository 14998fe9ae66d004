"""How long a wave takes on each stage of one pipeline, learnt from wave reports (DESIGN.md section 7).

Owns, per daemon, the coefficients of `wavepp_proto.profile` (c per wave, b per token, a per pair, g per prefix token
and chunk), fitted online: relative errors, no negative coefficient, outliers weighed down, old waves forgotten. Knows
how wrong it has been lately and says whether it may be planned with. Outlives formations: `pipeline` owns it. Memory
and work per report are constant. Does not read a profile: a calibration may seed it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from wavepp_controller.core.nnls import solve_nonnegative
from wavepp_proto.errors import InvalidRequest
from wavepp_proto.profile import Demand, Profile, StageCosts
from wavepp_proto.terms import DaemonKey, Row, StageTimes

UNITS = (1.0, 1e4, 1e9, 1e5)
"""Waves, tokens, pairs and prefix tokens are counted in these: columns of like size."""
MEMORY = 256
"""Waves that the past is worth..."""
DRIFT_MEMORY = 16
"""...and while it predicts badly: the device has changed, or was never known."""
AFTER_DRIFT = 0.05
"""What is left of the past when predictions become bad."""
PULL = (1e-3, 1e-4, 1e-4, 1e-3)
"""How firmly a coefficient stays where it was, as a part of what its own column says: it decides only what waves of
one shape leave open. What cannot be told apart counts as tokens and pairs first: they are what most time goes into."""
ERROR_MEMORY = 8
"""Predictions that the known error averages over."""
FIRST_FIT = 8
"""Reports before a model that nothing seeded may be believed."""
OUTLIER = 3.0
"""Times the known error from which on a report counts less."""
LEAST_OUTLIER = 0.02
BELIEVED_ERROR = 0.15
"""Most relative error of recent predictions that one may plan with."""
SEEDED_ERROR = 0.1


def demand_of(rows: Iterable[Row], void_bitmap: int = 0) -> Demand:
    """What one wave asks of every stage; void rows compute nothing."""
    tokens = prefix = 0
    pairs = 0.0
    for index, row in enumerate(rows):
        if void_bitmap >> index & 1:
            continue
        tokens += row.length
        pairs += row.start * row.length + row.length * row.length / 2
        prefix += row.start
    return Demand(1.0, tokens, pairs, prefix)


@dataclass(slots=True)
class StageModel:
    """One daemon's coefficients, and how well they have predicted."""

    costs: StageCosts = field(default_factory=StageCosts)
    error: float = 1.0
    """Mean relative error of the last predictions, each made before its report."""
    samples: int = 0
    seeded: bool = False
    _normal: list[list[float]] = field(default_factory=lambda: [[0.0] * 4 for _ in range(4)])
    _right: list[float] = field(default_factory=lambda: [0.0] * 4)

    @property
    def believed(self) -> bool:
        return self.error <= BELIEVED_ERROR and (self.seeded or self.samples >= FIRST_FIT)

    def observe(self, demand: Demand, took_us: float) -> None:
        """One wave, `took_us` > 0 of computing."""
        predicted = self.costs.demand_us(demand)
        scale = max(took_us, predicted)
        wrong = abs(took_us - predicted) / scale
        limit = max(LEAST_OUTLIER, OUTLIER * self.error)
        weight = min(1.0, limit / wrong) if wrong else 1.0
        self._add([part / unit / scale for part, unit in zip(demand, UNITS, strict=True)], took_us / scale, weight)
        self._judge(wrong)
        self._fit()

    def _judge(self, wrong: float) -> None:
        """Note how wrong a prediction was; when that is no longer to be believed, the past says little."""
        was_right = self.error <= BELIEVED_ERROR
        gain = 1 / ERROR_MEMORY if self.seeded else max(1 / ERROR_MEMORY, 2 / (self.samples + 2))
        self.error += (wrong - self.error) * gain
        self.samples += 1
        if was_right and self.error > BELIEVED_ERROR:
            self._normal = [[AFTER_DRIFT * value for value in row] for row in self._normal]
            self._right = [AFTER_DRIFT * value for value in self._right]

    def _add(self, columns: Sequence[float], value: float, weight: float) -> None:
        keep = 1.0 - 1.0 / (MEMORY if self.error <= BELIEVED_ERROR else DRIFT_MEMORY)
        for i, one in enumerate(columns):
            row, factor = self._normal[i], weight * one
            for j, other in enumerate(columns):
                row[j] = keep * row[j] + factor * other
            self._right[i] = keep * self._right[i] + factor * value

    def _fit(self) -> None:
        """The coefficients nearest to the present ones among those that explain the reports best."""
        before = _scaled(self.costs)
        matrix = [list(row) for row in self._normal]
        right = list(self._right)
        least = 1e-12 * max(row[i] for i, row in enumerate(matrix))
        for i, pull in enumerate(PULL):
            firm = pull * matrix[i][i] + least
            matrix[i][i] += firm
            right[i] += firm * before[i]
        found = solve_nonnegative(matrix, right)
        self.costs = StageCosts(*(value / unit for value, unit in zip(found, UNITS, strict=True)))


class LatencyModel:
    def __init__(self) -> None:
        self._stages: dict[tuple[int, int], StageModel] = {}
        """By (stage, rank)."""

    def observe(self, key: DaemonKey, rows: Sequence[Row], void_bitmap: int, times: StageTimes) -> None:
        """One daemon's report of one wave; a wave that computed nothing tells nothing."""
        demand = demand_of(rows, void_bitmap)
        if demand.tokens and times.compute_us > 0:
            place = (int(key.stage), int(key.rank))
            model = self._stages.get(place)
            if model is None:
                model = self._stages[place] = StageModel()
            model.observe(demand, times.compute_us)

    def serve(self, daemons: Iterable[DaemonKey]) -> None:
        """Forget places that the pipeline has no longer: nothing would ever correct them."""
        places = {(int(key.stage), int(key.rank)) for key in daemons}
        self._stages = {place: model for place, model in self._stages.items() if place in places}

    def believed(self, stages: int) -> bool:
        """Every one of so many stages is known well enough to plan with."""
        return len({stage for stage, _ in self._stages}) >= stages and all(m.believed for m in self._stages.values())

    def slowest(self, demand: Demand) -> StageCosts:
        """The stage that such work takes longest on; at least one stage is known."""
        return max((model.costs for model in self._stages.values()), key=lambda costs: costs.demand_us(demand))

    def stage_us(self, stage: int, demand: Demand) -> float:
        """Predicted time on the slowest daemon of a stage that is known."""
        return max(model.costs.demand_us(demand) for (at, _), model in self._stages.items() if at == stage)

    def wave_us(self, stages: int, demand: Demand) -> float | None:
        """Predicted time on the slowest stage; None while it is not known."""
        return self.slowest(demand).demand_us(demand) if self.believed(stages) else None

    def stage(self, key: DaemonKey) -> StageModel | None:
        return self._stages.get((int(key.stage), int(key.rank)))

    # --- kept between lives ---------------------------------------------------------------------

    def to_data(self) -> dict[str, Any]:
        """For JSON."""
        return {
            f"{stage}.{rank}": {**asdict(model.costs), "error": model.error, "samples": model.samples}
            for (stage, rank), model in sorted(self._stages.items())
        }

    def seed(self, data: Mapping[str, Any]) -> None:
        """Begin with what `to_data` once said; stages that have reported since keep what they know.

        Raises InvalidRequest for anything else.
        """
        if not isinstance(data, Mapping):
            raise InvalidRequest("not a latency model", field="model_file", value=str(data)[:40])
        for place, said in data.items():
            try:
                stage, rank = (int(part) for part in place.split("."))
                costs = StageCosts(*(_finite(said[name]) for name in ("c_us", "b_us", "a_us", "g_us")))
                error = _finite(said.get("error", SEEDED_ERROR))
            except (ValueError, TypeError, KeyError, AttributeError) as wrong:
                raise InvalidRequest(f"not a latency model: {wrong!r}", field="model_file", value=place) from wrong
            if (stage, rank) not in self._stages:
                self._stages[stage, rank] = StageModel(costs, min(error, SEEDED_ERROR), seeded=True)


def seed_of(profile: Profile) -> dict[str, Any]:
    """What `LatencyModel.seed` takes, from a calibration."""
    return {f"{number}.0": asdict(stage.costs) for number, stage in enumerate(profile.stages)}


def _scaled(costs: StageCosts) -> tuple[float, ...]:
    values = (costs.c_us, costs.b_us, costs.a_us, costs.g_us)
    return tuple(value * unit for value, unit in zip(values, UNITS, strict=True))


def _finite(value: Any) -> float:
    number = float(value)
    if not 0 <= number < float("inf"):
        raise ValueError(f"{number} is no finite number >= 0")
    return number
