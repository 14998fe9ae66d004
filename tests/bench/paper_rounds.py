"""How long a prepare round takes in virtual time: as scripts/bench-admission measured it on this machine.

Owns reading a stored result of that bench, and the words for the report. Without one the simulator's own figures
hold. Called by `paper`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.bench.paper_cells import profile_of
from wavepp_simulator.planning import Overheads

STORED = Path("bench-results/admission.json")
DIGITS = 1
"""Of milliseconds: finer differences between two measurements are not worth playing everything again."""


@dataclass(frozen=True, slots=True)
class Rounds:
    by_model: Mapping[str, float]
    """Milliseconds."""
    source: str
    """Where they are from, for a person."""


def rounds(models: list[str], said: str | None) -> Rounds:
    """`said` is milliseconds or a file that bench-admission printed; None takes the stored file if it holds any.

    Raises ValueError for a file that tells no round of some model's number of stages."""
    if said is not None and not Path(said).exists():
        return Rounds(dict.fromkeys(models, float(said)), "as the command line says")
    file = STORED if said is None else Path(said)
    measured = _measured(file)
    if said is None and not measured:
        own = {model: Overheads.measured(_stages(model)).round_s * 1e3 for model in models}
        return Rounds(own, "as measured when the simulator was written")
    missing = [model for model in models if _stages(model) not in measured]
    if missing:
        raise ValueError(f"{file} tells no round over the stages of {' '.join(missing)}")
    return Rounds({model: measured[_stages(model)] for model in models}, f"as {file} says")


def _measured(file: Path) -> dict[int, float]:
    """Median milliseconds by number of stages; empty for a file that is not there, or cut short."""
    try:
        told = json.loads(file.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return {one["stages"]: round(one["round_ms"]["p50"], DIGITS) for one in told.get("rounds", ())}


def _stages(model: str) -> int:
    return len(profile_of(model).stages)
