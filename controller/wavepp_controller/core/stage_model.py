"""How long a wave takes on one daemon, learnt from its reports (DESIGN.md).

Owns the four coefficients of `wavepp_proto.profile` (c per wave, b per token, a per pair, g per prefix token and
chunk), fitted online: relative errors, no negative coefficient, outliers weighed down, old waves forgotten; how wrong
its predictions have been lately, and how much of that is noise. Memory and work per report are constant: a report is
added to sums, and the fit is made again when a prediction was off, or after some reports. Which daemon it is about is
`latency_model`'s.
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
"""Most relative error of recent predictions that one may plan with, whatever it comes from. What is more must be noise:
it is at most..."""
MOST_ERROR = 0.45
NOISY = 2.5
"""...and so many times the running median of what predictions are off by beyond their `_shift`..."""
MOST_NOISE = 0.4
"""...which itself is at most this: times without any rule have a median too..."""
SHIFTED = 1.75
"""...while the last few of any size cancel down to BELIEVED_ERROR or so many times the median, else the device became
faster or slower..."""
MOST_LEAN = 0.12
"""...and those of each size cancel down to this, else the coefficients are wrong, or the rule is."""
LEAN_MEMORY = 64
"""Waves over which errors of waves of like size must cancel."""
LEAST_NOISE = 0.02
NOISE_STEP = 1.08
"""The running median goes up or down by this factor with each report: a change of the device that is learnt within a
dozen waves does not pass for noise, an outlier counts like any other, and 20 % are known for noise after 30 waves."""
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
    noise: float = LEAST_NOISE
    """Running median of relative errors, what all of the last few share apart."""
    _sums: list[float] = field(default_factory=lambda: [0.0] * 14)
    """The normal equations: H by rows from its diagonal on (10), then the right side (4)."""
    _unfitted: int = 0
    """Reports since the last fit."""
    _eager_until: int = YOUNG
    """Number of samples up to which every report is fitted."""
    _shift: float = 0.0
    """As `error`, with its sign: below 0 where waves took less than predicted."""
    _leans: dict[tuple[int, bool], float] = field(default_factory=dict)
    """Sums of signed errors by size: octave of tokens, and whether more lies before them than they are."""
    _lean_weight: float = 0.0
    """Waves in those sums, old ones for less."""

    @classmethod
    def seed(cls, costs: StageCosts, error: float, samples: int = 0, noise: float = LEAST_NOISE) -> StageModel:
        """Coefficients from elsewhere (a calibration, an earlier life with so many `samples`), to be corrected."""
        model = cls(costs, max(0.0, error), samples, seeded=True, noise=max(LEAST_NOISE, noise))
        if noise > LEAST_NOISE:
            model._lean_weight = LEAN_MEMORY / 2  # it cancelled in that life
        for demand in SEED_WAVES:
            if (took_us := costs.demand_us(demand)) > 0.0:
                model._add(demand, took_us, took_us, SEED_WEIGHT)
        return model

    @property
    def believed(self) -> bool:
        right = self.error <= BELIEVED_ERROR or (self._steady and self.lean <= MOST_LEAN)
        return right and (self.seeded or self.samples >= FIRST_FIT)

    @property
    def lean(self) -> float:
        """Mean relative error that does not cancel among waves of like size, what all of the last few share apart."""
        return sum([abs(value) for value in self._leans.values()]) / max(1.0, self._lean_weight)

    @property
    def _steady(self) -> bool:
        """Predictions are off by no more than they usually are: the device has not changed."""
        if self.error <= BELIEVED_ERROR:
            return True
        noise = self.noise if self.noise <= MOST_NOISE else 0.0
        return self.error <= min(MOST_ERROR, NOISY * noise) and abs(self._shift) <= max(BELIEVED_ERROR, SHIFTED * noise)

    def observe(self, demand: Demand, took_us: float) -> None:
        """One wave, `took_us` > 0 of computing."""
        predicted = self.costs.demand_us(demand)
        scale = max(took_us, predicted)
        wrong = abs(took_us - predicted) / scale
        limit = max(LEAST_OUTLIER, OUTLIER * self.error)
        if wrong > OFF * self.error:
            self._eager_until = max(self._eager_until, self.samples + FIT_EVERY)
        self._add(demand, scale, took_us, min(1.0, limit / wrong) if wrong else 1.0)
        signed = wrong if took_us >= predicted else -wrong
        if self.seeded or self.samples >= YOUNG:
            self._note_noise(demand, wrong, signed)
        self._judge(wrong, signed)
        self._unfitted += 1
        if self.samples <= self._eager_until or self._unfitted >= FIT_EVERY:
            self._fit()

    def scaled(self, factor: float) -> StageModel:
        """What to believe of a daemon with so many times the layers, until it has reported."""
        costs = StageCosts(*(factor * value for value in asdict(self.costs).values()))
        return StageModel.seed(costs, max(SEEDED_ERROR, min(self.error, 1.0)), noise=self.noise)

    def _judge(self, wrong: float, signed: float) -> None:
        """Note how wrong a prediction was; when that is more than noise, the past says little."""
        was_steady = self._steady
        gain = 1 / ERROR_MEMORY if self.seeded else max(1 / ERROR_MEMORY, 2 / (self.samples + 2))
        self.error += (wrong - self.error) * gain
        self._shift += (signed - self._shift) * gain
        self.samples += 1
        if was_steady and not self._steady:
            self._sums = [AFTER_DRIFT * value for value in self._sums]

    def _note_noise(self, demand: Demand, wrong: float, signed: float) -> None:
        """Waves of like size share one sum, so that what one of them took too long another may make up for. What waves
        of all sizes share is a change of the device, and no noise."""
        apart = signed - self._shift
        self.noise = max(LEAST_NOISE, self.noise * NOISE_STEP if abs(apart) > self.noise else self.noise / NOISE_STEP)
        keep = 1.0 - 1.0 / LEAN_MEMORY
        self._leans = {size: keep * value for size, value in self._leans.items()}
        size = (int(demand.tokens).bit_length(), demand.prefix > demand.tokens)
        self._leans[size] = self._leans.get(size, 0.0) + apart
        self._lean_weight = keep * self._lean_weight + 1.0

    def _add(self, demand: Demand, scale: float, took_us: float, weight: float) -> None:
        """Written out: this is all that most reports cost."""
        keep = 1.0 - 1.0 / (MEMORY if self._steady else DRIFT_MEMORY)
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
