"""Device profiles from throughputs that somebody measured: the fit of DESIGN.md (Engines), and its residuals.

Owns the format of cells, the linear program and its exact solution. Pure; no file, no clock. Called by
`wavepp profile fit` and by whoever makes the profiles that ship.

A cell says how many tokens per second a pipeline reached, endlessly, on prompts of one kind. The coefficients
(c, b, a, g) of the slowest stage give the cell a bound (`Profile.bound`: full waves, no idle time). In the inverse
of throughput, time for each prompt, the bound is linear in the coefficients:

    maximise    sum over fitted cells of  bound time / measured time        the fraction of the bound reached
    such that   bound time <= measured time  in every cell,   c >= least,   b, a, g >= 0

Four unknowns: an optimum lies on a vertex, where four of the constraints are equations. All of them are tried.
Cells whose prompts fill whole waves say only what c/M + b is, so optima come in edges; of equal ones the least c
is taken, which is what the device's memory must take (`weights_us`).
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wavepp_proto import limits
from wavepp_proto.errors import InvalidRequest
from wavepp_proto.profile import Demand, StageCosts

MAX_KINDS = 32
"""Kinds of prompts in one fit: vertices are tried one by one, C(36, 4) of them."""
UNKNOWNS = 4
"""c, b, a and g."""
DIGITS = 9
"""Significant ones of a fitted coefficient; cut off, not rounded, so that no cell comes to lie above its bound."""
_TIE = 1e-9
LEAST, MOST = 1e-9, 1e15
"""Throughputs and shares that somebody can mean; sums and quotients of them are numbers."""
_Floats = npt.NDArray[np.float64]


class Share(NamedTuple):
    """Prompts of one shape in a cell's mix."""

    input_tokens: int
    cached_tokens: int
    share: float


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement. In JSON `parts` is written as `input_tokens` and `cached_tokens`, or, where prompts of
    several shapes are mixed, as a list `parts` of those two and a `share` (of the prompts, by count)."""

    family: str
    c: int
    """Concurrency."""
    tokens_per_s: float
    """Of all requests together, cached tokens included."""
    parts: tuple[Share, ...]
    fitted: bool = True
    """False: the cell bounds the fit (it may not exceed its bound), but does not pull at it."""
    system: str = ""
    """Who measured; shown beside the residual."""

    @property
    def tokens(self) -> float:
        """Of one prompt, on average over the mix (times the sum of shares)."""
        return sum(part.share * part.input_tokens for part in self.parts)

    @property
    def measured_us(self) -> float:
        """Between two prompts."""
        return self.tokens / self.tokens_per_s * 1e6

    def demand(self, wave_tokens: int) -> Demand:
        total = Demand(0.0, 0.0, 0.0, 0.0)
        for part in self.parts:
            total = total.plus(Demand.of(part.input_tokens, part.cached_tokens, wave_tokens).times(part.share))
        return total


class Residual(NamedTuple):
    cell: Cell
    bound_tokens_per_s: float
    fraction: float
    """Of the bound that was measured; at most 1."""

    def as_dict(self) -> dict[str, Any]:
        """As a profile's provenance keeps it."""
        cell = self.cell
        return {
            "family": cell.family,
            "shapes": [list(part) for part in cell.parts],
            "c": cell.c,
            "system": cell.system,
            "fitted": cell.fitted,
            "tokens_per_s": cell.tokens_per_s,
            "bound_tokens_per_s": round(self.bound_tokens_per_s, 1),
            "fraction": round(self.fraction, 4),
        }


def read_cells(text: str) -> tuple[Cell, ...]:
    """A JSON list of cells. Raises InvalidRequest naming the cell, from 0, and the field that is wrong."""
    try:
        told = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the cells are no JSON: {error}", field="cells") from error
    if not isinstance(told, list) or not told:
        raise InvalidRequest("cells are a JSON list with at least one entry", field="cells")
    return tuple(_cell(number, entry) for number, entry in enumerate(told))


def _cell(number: int, told: Any) -> Cell:
    try:
        shapes = told.get("parts", [told])
        parts = tuple(
            Share(int(one["input_tokens"]), int(one["cached_tokens"]), float(one.get("share", 1))) for one in shapes
        )
        cell = Cell(
            str(told["family"]), int(told["c"]), float(told["tokens_per_s"]), parts,
            bool(told.get("fitted", True)), str(told.get("system", "")),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InvalidRequest(f"cell {number} is wrong: {error!r}", field="cells", value=number) from error
    sound = all(
        0 <= part.cached_tokens < part.input_tokens <= limits.MAX_PROMPT_TOKENS and LEAST <= part.share <= MOST
        for part in parts
    )
    if not parts or not sound or not LEAST <= cell.tokens_per_s <= MOST:
        raise InvalidRequest(f"cell {number} has a number out of range", field="cells", value=number)
    return cell


def weights_us(model_bytes: float, stages: int, bytes_per_s: float) -> float:
    """Time to read a stage's share of all weights once (microseconds): what no wave can take less than, as a wave of
    thousands of tokens touches every expert."""
    return model_bytes / stages / bytes_per_s * 1e6


def fit(cells: Sequence[Cell], wave_tokens: int, least_c_us: float = 0.0) -> StageCosts:
    """Coefficients of the slowest stage. Raises InvalidRequest when no coefficients allow every cell, or too many
    kinds of prompts are given."""
    demands = np.array([cell.demand(wave_tokens) for cell in cells], float)
    measured = np.array([cell.measured_us for cell in cells])
    ratios = demands / measured[:, None]
    over = ratios[:, 0] * least_c_us > 1.0
    if over.any():
        cell = cells[int(np.flatnonzero(over)[0])]
        raise InvalidRequest(
            f"{cell.family} at c = {cell.c} is faster than waves of at least {least_c_us:.0f} us allow",
            field="least_c_us", value=least_c_us,
        )  # fmt: skip
    fitted = [cell.fitted for cell in cells]
    pull = ratios[fitted].sum(axis=0) if any(fitted) else ratios.sum(axis=0)
    solution = _best_vertex(_fastest(demands, measured), pull, np.array([least_c_us, 0.0, 0.0, 0.0]))
    c_us, *others = solution
    return StageCosts(float(c_us), *(_cut_off(float(value)) for value in others))


def doubts(costs: StageCosts, cells: Sequence[Cell], wave_tokens: int) -> tuple[str, ...]:
    """Why not to plan with fitted costs, in words; empty where the cells tell all that they claim to."""
    said = []
    kinds = len({cell.demand(wave_tokens) for cell in cells})
    if kinds < UNKNOWNS:
        said.append(
            f"{UNKNOWNS} coefficients cannot be told apart by so few kinds of prompts ({kinds}): "
            "others give the same throughputs (measure other lengths and cached shares)"
        )
    if costs.c_us == 0:
        said.append("c is 0: small waves would be free (give --weights-gb or --least-c-us)")
    if costs.b_us == 0:
        said.append("b is 0: a new token would cost nothing but attention")
    return tuple(said)


def residuals(costs: StageCosts, cells: Iterable[Cell], wave_tokens: int) -> tuple[Residual, ...]:
    found = []
    for cell in cells:
        least_us = costs.demand_us(cell.demand(wave_tokens))
        found.append(Residual(cell, cell.tokens / least_us * 1e6, least_us / cell.measured_us))
    return tuple(found)


def _fastest(demands: _Floats, measured: _Floats) -> _Floats:
    """Rows of demand / time, one for each kind of prompts: only its fastest cell can bind."""
    best: dict[bytes, int] = {}
    for at, row in enumerate(demands):
        known = best.setdefault(row.tobytes(), at)
        if measured[at] < measured[known]:
            best[row.tobytes()] = at
    if len(best) > MAX_KINDS:
        raise InvalidRequest(
            f"{len(best)} kinds of prompts in one fit", field="cells", value=len(best), limit=MAX_KINDS
        )
    chosen = sorted(best.values())
    rows: _Floats = demands[chosen] / measured[chosen, None]
    return rows


def _best_vertex(rows: _Floats, pull: _Floats, least: _Floats) -> _Floats:
    """argmax pull.x  such that  rows.x <= 1 and x >= least."""
    scale = 1.0 / np.maximum(rows.max(axis=0), np.finfo(float).tiny)  # each unknown is about 1
    unknowns = len(least)
    left = np.vstack([rows * scale, -np.eye(unknowns)])
    right = np.concatenate([np.ones(len(rows)), -least / scale])
    corners = np.array(list(itertools.combinations(range(len(right)), unknowns)))
    corners = corners[np.abs(np.linalg.det(left[corners])) > 1e-12]
    points = np.linalg.solve(left[corners], right[corners][:, :, None])[:, :, 0]
    points = points[(points @ left.T <= right + _TIE).all(axis=1)]
    # Never empty: the fit checked that `least` itself is allowed, and every unknown has an upper bound.
    worth = points @ (pull * scale)
    equal = points[worth >= worth.max() * (1.0 - _TIE)]
    chosen = equal[np.argmin(equal[:, 0])]
    solution: _Floats = np.maximum(chosen * scale, least)
    return solution


def _cut_off(value: float) -> float:
    if value <= 0.0:
        return 0.0
    step = 10.0 ** (math.floor(math.log10(value)) - DIGITS + 1)
    return float(f"{math.floor(value / step) * step:.{DIGITS}g}")
