"""How long a wave takes on each stage of one pipeline, as learnt from wave reports (DESIGN.md).

Owns the models of a pipeline's daemons by place (stage, rank), and what each was learnt of: an engine and a band of
layers. Outlives formations: `pipeline` owns it and says who serves where, so that what was learnt of another band is
scaled, and what was learnt of another engine or model forgotten. Does not read a profile: a calibration may seed it.
The fit of one daemon is `stage_model`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from wavepp_controller.core.stage_model import LEAST_NOISE, SEEDED_ERROR, StageModel, demand_of
from wavepp_proto.errors import InvalidRequest
from wavepp_proto.profile import MAX_COST_US, Demand, Profile, StageCosts
from wavepp_proto.terms import DaemonKey, MemberRecord, Row, StageTimes

Place = tuple[int, int]
"""(stage, rank)."""


class Served(NamedTuple):
    """What a daemon's times depend on, as far as it registers it."""

    engine: str
    model: str
    """Fingerprint."""
    ranks: int
    first_layer: int
    last_layer: int

    @classmethod
    def of(cls, record: MemberRecord) -> Served:
        model = record.model.fingerprint
        return cls(record.engine, model, record.ranks, record.first_layer, record.last_layer)

    def scale_from(self, before: Served) -> float | None:
        """How many times as much work as `before` a wave is; None if the two cannot be compared."""
        if self[:3] != before[:3]:
            return None
        return (self.last_layer - self.first_layer) / max(1, before.last_layer - before.first_layer)


class LatencyModel:
    def __init__(self) -> None:
        self._stages: dict[Place, StageModel] = {}
        self._served: dict[Place, Served] = {}
        """What the model of a place was learnt of; none of a calibration, which is believed to be of these devices."""

    def serve(self, records: Iterable[MemberRecord]) -> None:
        """These daemons serve from now on: keep what was learnt of the like, scale or forget the rest."""
        known, before = self._stages, self._served
        self._stages, self._served = {}, {}
        for record in records:
            place, served = _place(record.key), Served.of(record)
            self._served[place] = served
            model, was = known.get(place), before.get(place, served)
            factor = served.scale_from(was)
            if model is not None and factor is not None:
                self._stages[place] = model if was == served else model.scaled(factor)

    def observe(self, key: DaemonKey, rows: Sequence[Row], void_bitmap: int, times: StageTimes) -> None:
        """One daemon's report of one wave; a wave that computed nothing tells nothing."""
        demand = demand_of(rows, void_bitmap)
        if demand.tokens and times.compute_us > 0:
            model = self._stages.get(_place(key))
            if model is None:
                model = self._stages[_place(key)] = StageModel()
            model.observe(demand, times.compute_us)

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
        return self._stages.get(_place(key))

    # --- kept between lives ---------------------------------------------------------------------

    def to_data(self) -> dict[str, Any]:
        """For JSON."""
        data: dict[str, Any] = {}
        for place, model in sorted(self._stages.items()):
            said = {**asdict(model.costs), "error": model.error, "noise": model.noise, "samples": model.samples}
            if place in self._served:
                said["served"] = self._served[place]._asdict()
            data[f"{place[0]}.{place[1]}"] = said
        return data

    def seed(self, data: Mapping[str, Any]) -> None:
        """Begin with what `to_data` once said; stages that have reported since keep what they know.

        Raises InvalidRequest for anything else.
        """
        if not isinstance(data, Mapping):
            raise InvalidRequest("not a latency model", field="model_file", value=str(data)[:40])
        for name, said in data.items():
            try:
                stage, rank = (int(part) for part in name.split("."))
                costs = StageCosts(*(_finite(said[part]) for part in ("c_us", "b_us", "a_us", "g_us")))
                error = _finite(said.get("error", SEEDED_ERROR))
                samples = int(_finite(said.get("samples", 0)))
                noise = _finite(said.get("noise", LEAST_NOISE))
                served = _served(said["served"]) if "served" in said else None
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as wrong:
                raise InvalidRequest(f"not a latency model: {wrong!r}", field="model_file", value=name) from wrong
            if (stage, rank) in self._stages:
                continue
            self._stages[stage, rank] = StageModel.seed(costs, min(error, SEEDED_ERROR), samples, noise)
            if served is not None:
                self._served[stage, rank] = served


def seed_of(profile: Profile) -> dict[str, Any]:
    """What `LatencyModel.seed` takes, from a calibration."""
    return {f"{number}.0": asdict(stage.costs) for number, stage in enumerate(profile.stages)}


def _place(key: DaemonKey) -> Place:
    return int(key.stage), int(key.rank)


def _served(said: Mapping[str, Any]) -> Served:
    numbers = (int(said[name]) for name in ("ranks", "first_layer", "last_layer"))
    return Served(str(said["engine"]), str(said["model"]), *numbers)


def _finite(value: Any) -> float:
    number = float(value)
    if not 0 <= number <= MAX_COST_US:
        raise ValueError(f"{number} is not within 0..{MAX_COST_US:g}")
    return number
