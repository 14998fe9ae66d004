"""Which cells of the paper's tables are also measured on the real clock, and what tells one measurement from another.

Owns the list, its order and names, and the digest of the code that such a result depends on (`RealTask.key`):
another state of the code is another result. How a cell is measured is in `paper_real`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

from tests.bench.paper_cells import COMBINATIONS, controller_files, files, profile_of
from wavepp_proto import workload
from wavepp_proto.workload import Cell, Family
from wavepp_simulator.bounds import MIX, family_bound

REAL_COMBINATIONS = (COMBINATIONS[-1], COMBINATIONS[1])
"""What the default is, and what it is compared with."""
REAL_CELLS = {
    "glm": (
        *(Cell("suffix4k", None, c) for c in (8, 32, 128)),
        *(Cell(name, None, c) for name in ("short_reuse", "mixed", "short_cold") for c in (8, 32)),
    ),
    "k3": (
        Cell("short_cold", 131_072, 8),
        *(Cell("short_reuse", None, c) for c in (8, 32)),
        *(Cell("mixed", None, c) for c in (8, 32)),
    ),
}
"""K3 short_cold at 32 is left to virtual time: its two combinations would take a fifth of the hour."""
SECONDS = 30.0
"""Least measured time of a cell, beside two rounds."""
SEED = 0
PROCESSES_S = 9.0
"""To start a cluster, and to end it."""
MEASURED_CODE = (
    "proto/wavepp_proto",
    "proto/wavepp_proto/runtime",
    "controller/wavepp_controller/runtime",
    "stage_daemon/wavepp_stage/core",
    "stage_daemon/wavepp_stage/runtime",
    *(f"stage_daemon/wavepp_stage/engine/{name}.py" for name in ("base", "emulated", "emulated_device")),
    *(f"client/wavepp/bench/{name}.py" for name in ("asking", "load", "running", "window")),
)
"""Beside the controller's core, without other policies' planners."""


@dataclass(frozen=True, slots=True)
class RealTask:
    model: str
    cell: Cell
    mode: str
    policy: str
    seconds: float = SECONDS
    speedup: float = 1.0
    """Of the emulated devices; anything but 1 is a trial."""

    @property
    def name(self) -> str:
        tokens = f"-{self.cell.tokens}" if self.cell.tokens else ""
        return f"{self.model}-{self.cell.family}{tokens}-c{self.cell.concurrency}-{self.mode}-{self.policy}"

    @property
    def key(self) -> str:
        """Of everything that the result depends on, but the machine."""
        digest = hashlib.sha256()
        for path in [*files(MEASURED_CODE), *controller_files(self.policy)]:
            digest.update(path.read_bytes())
        digest.update(profile_of(self.model).to_json().encode())
        digest.update(json.dumps([asdict(self), SEED]).encode())
        return digest.hexdigest()[:16]

    @property
    def family(self) -> Family:
        return workload.family(self.cell.family, self.model, self.cell.concurrency, SEED, self.cell.tokens)


def real_tasks(models: list[str], seconds: float = SECONDS, speedup: float = 1.0) -> list[RealTask]:
    """Both combinations of a cell one after the other: they are compared, and a machine changes with time."""
    return [
        RealTask(model, cell, mode, policy, seconds, speedup)
        for model in models
        for cell in REAL_CELLS.get(model, ())
        for mode, policy in REAL_COMBINATIONS
    ]


def expected_s(task: RealTask) -> float:
    """About how long measuring takes, if the devices are never idle."""
    profile, family = profile_of(task.model), task.family
    rate = family_bound(profile, family) * task.speedup
    tokens = sum(family.prompt(number).tokens for number in range(MIX)) / MIX
    measured_s = max(2 * family.concurrency * tokens / rate, task.seconds)
    prefixes = [(prompt.tokens, 0, 1.0) for prompt in family.preloaded]
    preload_s = 2 * prefixes[0][0] / profile.bound(prefixes) / task.speedup if prefixes else 0.0
    return PROCESSES_S + preload_s + family.concurrency * tokens / rate + measured_s
