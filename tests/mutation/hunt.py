"""Plant one bug in this process and play seeds until an invariant breaks: `python -m tests.mutation.hunt NAME SEEDS`.

Prints one line of JSON: the seeds played and the violation, null if none came. `honest` plants nothing.
"""

from __future__ import annotations

import json
import sys

from tests.mutation.mutants import plant
from wavepp_simulator.explore import explore

REQUESTS = 25


def hunt(name: str, most_seeds: int) -> tuple[int, str | None]:
    """(seeds played, the violation that ended it)."""
    if name != "honest":
        plant(name)
    for seed in range(most_seeds):
        violation = explore(seed, REQUESTS).violation
        if violation is not None:
            return seed + 1, str(violation)
    return most_seeds, None


def main() -> None:
    seeds, violation = hunt(sys.argv[1], int(sys.argv[2]))
    print(json.dumps({"mutant": sys.argv[1], "seeds": seeds, "violation": violation}))


if __name__ == "__main__":
    main()
