"""How long a wave takes on one daemon, learnt from its reports (DESIGN.md).

Owns the four coefficients of `wavepp_proto.profile` (c per wave, b per token, a per pair, g per prefix token and
chunk), fitted online: relative errors, no negative coefficient, outliers weighed down, old waves forgotten; and how
wrong its predictions have been lately. Memory and work per report are constant: a report is added to sums, and the fit
is made again when a prediction was off, or after some reports. Which daemon it is about is `latency_model`'s.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from wavepp_controller.core.nnls import solve_nonnegative
from wavepp_proto.profile import Demand, StageCosts
from wavepp_proto.terms import Row

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
KEPT = (1.0, 1.0, 1.0, 0.5)
"""Part of a coefficient that the pull holds on to: what waves of one shape and their noise say of the prefix is put
down to tokens and pairs again, as a prefix that seems to cost keeps waves from being filled up with other requests."""
PULL_ERROR = 0.05
"""Mean error of predictions for which PULL is made. A pull stands against noise, so it goes with the square of it..."""
LEAST_PULL = 1e-4
"""...down to this part: times that follow the rule exactly are believed after a few waves of other shapes."""
ERROR_MEMORY = 8
"""Predictions that the known error averages over."""
FIRST_FIT = 8
"""Reports before a model that nothing seeded may be believed."""
YOUNG = 32
"""Reports up to which every one of them is fitted..."""
FIT_EVERY = 8
"""...and how many make a fit after that, as each moves the coefficients by 1 / MEMORY at most. After a prediction that
was off, so many are fitted one by one again."""
OFF = 3.0
"""Times the known error from which on a prediction was off."""
OUTLIER = 3.0
"""Times the known error from which on a report counts less."""
LEAST_OUTLIER = 0.02
BELIEVED_ERROR = 0.15
"""Most relative error of recent predictions that one may plan with."""
SEEDED_ERROR = 0.1
"""Error of coefficients that nobody has judged yet."""
SEED_WAVES = tuple(
    Demand(1.0, tokens, tokens * (prefix + tokens / 2), prefix)
    for tokens, prefix in ((2_048, 0), (8_192, 0), (16_384, 0), (4_096, 65_536), (16_384, 131_072))
)
"""Waves of all shapes that a seed counts as reports of: the first real ones correct it, and do not replace it. A tiny
wave alone would put all that it was off by into the time of a token."""
SEED_WEIGHT = 0.25
"""...each as a part of a report: a seed that is wrong is outweighed soon."""


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
    _sums: list[float] = field(default_factory=lambda: [0.0] * 14)
    """The normal equations: H by rows from its diagonal on (10), then the right side (4)."""
    _unfitted: int = 0
    """Reports since the last fit."""
    _eager_until: int = YOUNG
    """Number of samples up to which every report is fitted."""

    @classmethod
    def seed(cls, costs: StageCosts, error: float, samples: int = 0) -> StageModel:
        """Coefficients from elsewhere (a calibration, an earlier life with so many `samples`), to be corrected."""
        model = cls(costs, max(0.0, error), samples, seeded=True)
        for demand in SEED_WAVES:
            if (took_us := costs.demand_us(demand)) > 0.0:
                model._add(demand, took_us, took_us, SEED_WEIGHT)
        return model

    @property
    def believed(self) -> bool:
        return self.error <= BELIEVED_ERROR and (self.seeded or self.samples >= FIRST_FIT)

    def observe(self, demand: Demand, took_us: float) -> None:
        """One wave, `took_us` > 0 of computing."""
        predicted = self.costs.demand_us(demand)
        scale = max(took_us, predicted)
        wrong = abs(took_us - predicted) / scale
        limit = max(LEAST_OUTLIER, OUTLIER * self.error)
        if wrong > OFF * self.error:
            self._eager_until = max(self._eager_until, self.samples + FIT_EVERY)
        self._add(demand, scale, took_us, min(1.0, limit / wrong) if wrong else 1.0)
        self._judge(wrong)
        self._unfitted += 1
        if self.samples <= self._eager_until or self._unfitted >= FIT_EVERY:
            self._fit()

    def scaled(self, factor: float) -> StageModel:
        """What to believe of a daemon with so many times the layers, until it has reported."""
        costs = StageCosts(*(factor * value for value in asdict(self.costs).values()))
        return StageModel.seed(costs, max(SEEDED_ERROR, min(self.error, 1.0)))

    def _judge(self, wrong: float) -> None:
        """Note how wrong a prediction was; when that is no longer to be believed, the past says little."""
        was_right = self.error <= BELIEVED_ERROR
        gain = 1 / ERROR_MEMORY if self.seeded else max(1 / ERROR_MEMORY, 2 / (self.samples + 2))
        self.error += (wrong - self.error) * gain
        self.samples += 1
        if was_right and self.error > BELIEVED_ERROR:
            self._sums = [AFTER_DRIFT * value for value in self._sums]

    def _add(self, demand: Demand, scale: float, took_us: float, weight: float) -> None:
        """Written out: this is all that most reports cost."""
        keep = 1.0 - 1.0 / (MEMORY if self.error <= BELIEVED_ERROR else DRIFT_MEMORY)
        waves, tokens, pairs, prefix = demand
        w, t = waves / UNITS[0] / scale, tokens / UNITS[1] / scale
        p, f = pairs / UNITS[2] / scale, prefix / UNITS[3] / scale
        one, two, three, four = weight * w, weight * t, weight * p, weight * f
        y = took_us / scale
        new = (
            one * w, one * t, one * p, one * f, two * t, two * p, two * f, three * p, three * f, four * f,
            one * y, two * y, three * y, four * y,
        )  # fmt: skip
        self._sums = [keep * old + value for old, value in zip(self._sums, new, strict=True)]

    def _fit(self) -> None:
        """The coefficients nearest to the present ones among those that explain the reports best."""
        self._unfitted = 0
        before = [value * unit for value, unit in zip(asdict(self.costs).values(), UNITS, strict=True)]
        ww, wt, wp, wf, tt, tp, tf, pp, pf, ff, *right = self._sums
        matrix = [[ww, wt, wp, wf], [wt, tt, tp, tf], [wp, tp, pp, pf], [wf, tf, pf, ff]]
        least = 1e-12 * max(ww, tt, pp, ff)
        firmness = min(1.0, max(LEAST_PULL, (self.error / PULL_ERROR) ** 2))
        for i, pull in enumerate(PULL):
            firm = firmness * pull * matrix[i][i] + least
            matrix[i][i] += firm
            right[i] += firm * KEPT[i] * before[i]
        found = solve_nonnegative(matrix, right)
        self.costs = StageCosts(*(value / unit for value, unit in zip(found, UNITS, strict=True)))
