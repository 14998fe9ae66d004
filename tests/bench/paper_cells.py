"""The cells of the paper's tables, and one of them played in virtual time.

Owns which cells and combinations there are, how many requests are measured, and the JSON of one result. A result
is of one state of the code and the profile (`Task.key`): another state is another result. Called by `paper`, in
processes of its own.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from wavepp.profiles import load
from wavepp_proto import workload
from wavepp_proto.profile import Profile
from wavepp_proto.workload import Cell, Family
from wavepp_simulator.bounds import family_bound
from wavepp_simulator.oracle import oracle
from wavepp_simulator.planning import Overheads, config_of, with_block_tokens
from wavepp_simulator.planning_load import Played, planned
from wavepp_simulator.planning_result import summarise

PROFILES = {"glm": "glm_5_2_pp4", "minimax": "minimax_m2_7_pp4", "k3": "kimi_k3_pp8"}
COMBINATIONS = (
    ("drain", "fixed"),
    ("lockstep", "fixed"),
    ("overlapped", "fixed"),
    ("overlapped", "mpu"),
    ("overlapped", "adaptive"),
)
"""(mode, policy), as the ablation adds them."""
ORACLE = ("oracle", "fixed budgets")
COLD_BLOCK_TOKENS = 512
"""Blocks of cells in which nothing is reused: they cost the simulator time and change nothing."""
LEAST_REQUESTS = 24
COLD_REQUESTS = 32
"""Of cold cells, however many ask: the pipeline is as full with one round as with two, and each has many waves."""
MIXED_REQUESTS = 48
TIMELINE_WAVES = 16
"""Waves of each stage that a result keeps, the last ones."""
PLANNERS_OF = {
    "fixed": ("plan_fixed",),
    "mpu": ("plan_mpu", "plan_fixed"),
    "adaptive": ("plan_adaptive", "plan_mpu", "plan_fixed"),
}
"""What a policy plans with; adaptive falls back."""
PLANNERS = PLANNERS_OF["adaptive"]
CONTROLLER = Path("controller/wavepp_controller/core")
_PLAYED = ("agenda", "bounds", "chains", "planning", "planning_load", "planning_result", "timed_engine")
SHARED = (
    "proto/wavepp_proto",
    "stage_daemon/wavepp_stage/core",
    *(f"simulator/wavepp_simulator/{module}.py" for module in _PLAYED),
)
OF_ORACLES = ("proto/wavepp_proto", "simulator/wavepp_simulator/bounds.py", "simulator/wavepp_simulator/oracle.py")


@dataclass(frozen=True, slots=True)
class Task:
    model: str
    cell: Cell
    mode: str
    policy: str
    round_ms: float | None
    """None: as measured, by the number of stages."""

    @property
    def name(self) -> str:
        tokens = f"-{self.cell.tokens}" if self.cell.tokens else ""
        how = "oracle" if self.mode == ORACLE[0] else f"{self.mode}-{self.policy}"
        return f"{self.model}-{self.cell.family}{tokens}-c{self.cell.concurrency}-{how}"

    @property
    def key(self) -> str:
        """Of everything that the result depends on."""
        counted = f"{self.measured} {COLD_BLOCK_TOKENS} {TIMELINE_WAVES}"
        parts = (code(self.mode, self.policy), profile_of(self.model).to_json(), json.dumps(asdict(self)), counted)
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    @property
    def family(self) -> Family:
        return workload.family(self.cell.family, self.model, self.cell.concurrency, tokens=self.cell.tokens)

    @property
    def measured(self) -> int:
        """Requests after the warm-up round."""
        if self.cell.family.endswith("cold"):
            return COLD_REQUESTS
        return max(2 * self.cell.concurrency, MIXED_REQUESTS if self.cell.family == "mixed" else LEAST_REQUESTS)

    @property
    def overheads(self) -> Overheads:
        measured = Overheads.measured(len(profile_of(self.model).stages))
        return measured if self.round_ms is None else Overheads(self.round_ms / 1e3)


def tasks(rounds: Mapping[str, float | None]) -> list[Task]:
    """All combinations and the oracle of every cell of these models; what is compared first comes first.

    `rounds`: milliseconds of a prepare round by model."""
    first = (COMBINATIONS[-1], COMBINATIONS[1])
    order = (*first, *(one for one in (*COMBINATIONS, ORACLE) if one not in first))
    return [
        Task(model, cell, mode, policy, round_ms)
        for mode, policy in order
        for model, round_ms in rounds.items()
        for cell in workload.cells(model)
    ]


def play(task: Task) -> dict[str, Any]:
    """The result of one task, ready for JSON."""
    profile, family = profile_of(task.model), task.family
    bound = family_bound(profile, family)
    began = time.perf_counter()
    if task.mode == ORACLE[0]:
        best = oracle(profile, family, task.measured)
        found: dict[str, Any] = {"work_of_bound": best.fraction_of_bound, "budget": best.budget}
    else:
        device, played = in_virtual_time(task, task.measured)
        found = {**summarise(device, played), "timeline": timeline(played)}
    return {
        "name": task.name,
        "model": task.model,
        "cell": task.cell._asdict(),
        "mode": task.mode,
        "policy": task.policy,
        "round_ms": task.overheads.round_s * 1e3,
        "bound": bound,
        "tokens_per_s": found["work_of_bound"] * bound,
        "took_s": round(time.perf_counter() - began, 2),
        "result": found,
    }


def in_virtual_time(task: Task, measured: int) -> tuple[Profile, Played]:
    """The devices, and the task's cell played on them until so many requests are measured."""
    profile, family = profile_of(task.model), task.family
    cold = not any(family.prompt(number).reusable_tokens for number in range(4))
    device = with_block_tokens(profile, COLD_BLOCK_TOKENS) if cold else profile
    config = config_of(device, task.policy, task.mode)
    return device, planned(device, config, task.overheads, family, measured=measured)


def timeline(played: Played) -> dict[str, list[list[float]]]:
    """[start, end, tokens, rows] of the last waves of each stage; seconds before the end of what is measured."""
    return {
        name: [
            [round(wave.start_s - played.end, 4), round(wave.end_s - played.end, 4), wave.tokens, len(wave.rows)]
            for wave in ran[-TIMELINE_WAVES:]
        ]
        for name, ran in played.ran.items()
    }


@lru_cache
def profile_of(model: str) -> Profile:
    return load(PROFILES[model])


@lru_cache
def code(mode: str, policy: str) -> str:
    """A digest of the code that decides what comes out: a policy's own files are none of the others' business."""
    digest = hashlib.sha256()
    for path in files(OF_ORACLES) if mode == ORACLE[0] else [*files(SHARED), *controller_files(policy)]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def files(places: tuple[str, ...]) -> list[Path]:
    """The Python files of these folders and modules, in order."""
    every = (
        path for place in places for path in ([Path(place)] if place.endswith(".py") else Path(place).glob("*.py"))
    )
    return sorted(every)


def controller_files(policy: str) -> list[Path]:
    """Modules that the controller's machine imports, those of other policies' planners left out."""
    found: set[str] = set()
    ahead = ["machine"]
    while ahead:
        module = ahead.pop()
        if module in found or (module in PLANNERS and module not in PLANNERS_OF[policy]):
            continue
        found.add(module)
        text = (CONTROLLER / f"{module}.py").read_text()
        ahead += re.findall(r"^\s*from wavepp_controller\.core\.(\w+) import", text, re.MULTILINE)
        for names in re.findall(r"^\s*from wavepp_controller\.core import (.+)$", text, re.MULTILINE):
            ahead += [name.strip() for name in names.split(",")]
    return sorted(CONTROLLER / f"{module}.py" for module in found)
