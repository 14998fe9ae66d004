"""Plant one bug in a process of its own and play seeds until an invariant breaks.

`hunted` starts that process and waits; `python -m tests.mutation.hunt NAME SEEDS` is the process: it prints one
line of JSON. The name `honest` plants nothing: the control.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass

from tests.mutation.mutants import plant
from wavepp_simulator.explore import explore

HONEST = "honest"
REQUESTS = 25
TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Hunt:
    mutant: str
    seeds: int
    """Played, the catching one included."""
    violation: str | None
    """None: it lives."""
    seconds: float


def hunted(mutant: str, most_seeds: int) -> Hunt:
    """Hunt one mutant in a child process; CalledProcessError if it could not be planted."""
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "tests.mutation.hunt", mutant, str(most_seeds)],
        capture_output=True,
        text=True,
        check=True,
        timeout=TIMEOUT_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    seeds, violation = json.loads(done.stdout)
    return Hunt(mutant, seeds, violation, round(time.perf_counter() - began, 1))


def hunt(mutant: str, most_seeds: int) -> tuple[int, str | None]:
    """(seeds played, the violation that ended it), in this process."""
    if mutant != HONEST:
        plant(mutant)
    for seed in range(most_seeds):
        violation = explore(seed, REQUESTS).violation
        if violation is not None:
            return seed + 1, str(violation)
    return most_seeds, None


if __name__ == "__main__":
    print(json.dumps(hunt(sys.argv[1], int(sys.argv[2]))))
