"""The report of the paper's tables: ours beside the paper's figures, the share of the bound, the ablation.

Owns what is compared and the Markdown; `paper_html` has the page. Pure: results in, text out. The paper's figures
come with the profiles (their provenance), as they were fitted to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.bench.paper_cells import COMBINATIONS, ORACLE, profile_of
from wavepp_proto import workload

Result = dict[str, Any]
WINNER, RIVAL = "overlapped+adaptive", "lockstep+fixed"
NAMES = tuple(f"{mode}+{policy}" for mode, policy in COMBINATIONS)
AT_BOUND = 0.995
"""Share of the bound from which on there is nothing left to win..."""
EVEN = 0.001
"""...if the other side has as much: closer than this, how the measured time falls on waves decides."""
TITLES = {
    "glm": "GLM 5.2, PP4 on 4 x B300",
    "minimax": "MiniMax M2.7, PP4 on 4 x B300",
    "k3": "Kimi K3, PP8 on 8 x GB300",
}


class Place(NamedTuple):
    """A cell of a model."""

    model: str
    family: str
    tokens: int
    concurrency: int

    def __str__(self) -> str:
        return f"{self.model} {self.family} {self.tokens} c={self.concurrency}"


@dataclass(frozen=True, slots=True)
class Row:
    """One cell: the paper's figures and ours, tokens per second."""

    place: Place
    paper: dict[str, int]
    """By system."""
    bound: float
    ours: dict[str, Result]
    """By mode+policy, `oracle` among them."""

    def speed(self, name: str) -> float | None:
        return self.ours[name]["tokens_per_s"] if name in self.ours else None

    def share(self, name: str) -> float | None:
        return self.ours[name]["result"]["work_of_bound"] if name in self.ours else None

    def ratio(self, name: str, other: str) -> float | None:
        ours, theirs = self.speed(name), self.speed(other)
        return ours / theirs if ours and theirs else None

    def p95(self, name: str) -> float | None:
        return self.ours[name]["result"]["completion_s"].get("p95") if name in self.ours else None

    @property
    def verdict(self) -> str:
        """`ahead`, `level` (both at the bound) or `behind`: WINNER against RIVAL; empty while one is missing."""
        ratio, ours, theirs = self.ratio(WINNER, RIVAL), self.share(WINNER), self.share(RIVAL)
        if ratio is None or ours is None or theirs is None:
            return ""
        if min(ours, theirs) >= AT_BOUND and abs(ratio - 1) <= EVEN:
            return "level"
        return "ahead" if ratio > 1 else "behind"


class Tables:
    def __init__(self, results: Iterable[Result]) -> None:
        self.cells: dict[Place, Row] = {}
        self.round_ms: dict[str, float] = {}
        for result in results:
            row = self._row(result)
            name = ORACLE[0] if result["mode"] == ORACLE[0] else f"{result['mode']}+{result['policy']}"
            row.ours[name] = result
            self.round_ms[result["model"]] = result["round_ms"]

    def _row(self, result: Result) -> Row:
        place = place_of(result)
        if place not in self.cells:
            self.cells[place] = Row(place, paper_figures(place), result["bound"], {})
        return self.cells[place]

    def of(self, model: str) -> list[Row]:
        return [row for place, row in self.cells.items() if place.model == model]

    def behind(self) -> list[str]:
        """Cells in which the default neither beats the comparison nor stands at the bound with it, and by how much."""
        return [told(row) for row in self.judged("behind")]

    def judged(self, verdict: str) -> list[Row]:
        return [row for row in self.rows if row.verdict == verdict]

    @property
    def rows(self) -> list[Row]:
        return list(self.cells.values())


def place_of(result: Result) -> Place:
    """The cell that a result is of, by the length of its longest prompt."""
    cell, model = workload.Cell(**result["cell"]), result["model"]
    family = workload.family(cell.family, model, cell.concurrency, tokens=cell.tokens)
    tokens = max(family.prompt(number).tokens for number in range(4))
    return Place(model, cell.family, tokens, cell.concurrency)


def told(row: Row) -> str:
    ours, theirs = percent(row.share(WINNER), 3), percent(row.share(RIVAL), 3)
    won = (row.ratio(WINNER, RIVAL) or 1.0) - 1.0
    return f"{row.place}: {row.verdict}, {ours} of the bound against {theirs} ({won * 100:+.3f} %)"


def standing(tables: Tables) -> str:
    """In how many cells the default is ahead."""
    level = tables.judged("level")
    higher = sum((row.ratio(WINNER, RIVAL) or 0.0) > 1 for row in level)
    return (
        f"{WINNER} against {RIVAL}: ahead in {len(tables.judged('ahead'))} of {len(tables.rows)} cells, level at the "
        f"bound (both at {AT_BOUND:.1%} of it or more, within {EVEN:.1%} of each other; a hair higher in {higher}) in "
        f"{len(level)}, behind in {len(tables.judged('behind'))}."
    )


def paper_figures(place: Place) -> dict[str, int]:
    """Tokens per second by system, of the cell that the profile was fitted to."""
    known = profile_of(place.model).provenance["residuals"]
    return {
        one["system"]: one["tokens_per_s"]
        for one in known
        if (one["family"], one["c"]) == (place.family, place.concurrency)
        and max(shape[0] for shape in one["shapes"]) == place.tokens
    }


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def percent(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value * 100:.{digits}f} %"


def columns(model: str) -> list[str]:
    systems = sorted({one["system"] for one in profile_of(model).provenance["residuals"]})
    paper = [f"paper: {system}" for system in systems]
    ours = [part for name in NAMES for part in (name, "of bound")]
    return [
        "family",
        "tokens",
        "c",
        *paper,
        "wavepp of bound",
        "bound",
        *ours,
        "oracle of bound",
        "won by",
        "of oracle",
    ]


def cells(row: Row) -> list[str]:
    systems = sorted({one["system"] for one in profile_of(row.place.model).provenance["residuals"]})
    wavepp = row.paper.get("wavepp")
    ours = [text for name in NAMES for text in (number(row.speed(name)), percent(row.share(name)))]
    won = row.ratio(WINNER, RIVAL)
    return [
        row.place.family,
        str(row.place.tokens),
        str(row.place.concurrency),
        *(number(row.paper.get(system)) for system in systems),
        percent(wavepp / row.bound if wavepp else None),
        number(row.bound),
        *ours,
        percent(row.share(ORACLE[0])),
        "-" if won is None else f"{(won - 1) * 100:+.2f} %",
        percent(row.ratio(WINNER, ORACLE[0])),
    ]


def about(tables: Tables) -> list[str]:
    rounds = ", ".join(f"{model} {ms:.2f} ms" for model, ms in tables.round_ms.items())
    return [
        "Input tokens per second, cached ones included, in virtual time: the real controller and stage cores on device "
        "profiles that were fitted to the paper's own figures. What ours shows is planning and admission on such a "
        "device, not a device: compare ours with ours, and shares of the bound with the paper's.",
        f"Every mode and policy pays the same: prepare rounds of {rounds} (measured by scripts/bench-admission on two "
        "cores; other messages take half of it), links as in the profile, hashing at 10 ns a token. "
        "Prompts that are sent at once come one after the other, 25 ns a token, and announcing takes another 15 ns a "
        "token, as on the real clock.",
        "The bound is the slowest stage with full waves and no idle time. Throughput is counted in work done during "
        "max(2c, 24) requests (mixed: 48 at least, cold: 32) after one warm-up round: which prompts of a mixed cell "
        "ended in that time does not matter. The oracle is the best of fixed budgets M, M/2, ... with free, instant "
        "admission.",
    ]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(line) + " |" for line in (head, ["---"] * len(head), *rows)]
