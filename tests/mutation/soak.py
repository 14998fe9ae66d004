"""The long run behind `scripts/soak`: many seeds over the honest cores, then every planted bug.

`--quick` plays fewer seeds and hunts the bugs that are caught soon, a few minutes in all on two cores.

Prints totals and the table of mutants, writes both to bench-results/soak.json (soak-quick.json), and ends 1 when a
seed broke an invariant or a mutant lived.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.mutation.hunt import Hunt, hunted
from tests.mutation.mutants import MUTANTS, Mutant
from wavepp_simulator import campaign
from wavepp_simulator.report import failing_seed, totals_in_words

RESULT = Path("bench-results/soak.json")
QUICK_RESULT = Path("bench-results/soak-quick.json")
REQUESTS = 25
SEEDS = 5000
QUICK_SEEDS = 200
MUTANT_SEEDS = 500


def explore(first: int, seeds: int, jobs: int) -> tuple[dict[str, Any], bool]:
    began = time.perf_counter()
    totals, failure = campaign.run(first, seeds, REQUESTS, jobs)
    took = time.perf_counter() - began
    found = {**totals.as_data(), "seconds": round(took, 1), "events_per_s": round(totals.events / took)}
    if failure is None:
        print(totals_in_words(totals, took))
        return found, True
    print(failing_seed(failure.seed, REQUESTS, shrinks=True, last_lines=60))
    print(f"seed {failure.seed}: {failure.violation}")
    return {**found, "failed_seed": failure.seed, "violation": failure.violation}, False


def hunt_all(mutants: Sequence[Mutant], jobs: int) -> list[Hunt]:
    with ThreadPoolExecutor(jobs) as pool:
        hunts = list(pool.map(lambda mutant: hunted(mutant.name, MUTANT_SEEDS), mutants))
    width = max(len(hunt.mutant) for hunt in hunts)
    for hunt in hunts:
        print(f"{hunt.mutant:<{width}}  {hunt.seeds:4} seeds  {hunt.seconds:6.1f} s  {hunt.violation or 'LIVES'}")
    return hunts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="a few minutes: fewer seeds, the bugs that are caught soon"
    )
    parser.add_argument("--seeds", type=int, help=f"{SEEDS}, or {QUICK_SEEDS} with --quick")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    asked = parser.parse_args()
    seeds = asked.seeds or (QUICK_SEEDS if asked.quick else SEEDS)
    found, clean = explore(asked.first_seed, seeds, asked.jobs)
    hunts = hunt_all([mutant for mutant in MUTANTS if mutant.quick or not asked.quick], asked.jobs)
    result = {
        "exploration": found,
        "mutants": [asdict(hunt) for hunt in hunts],
        "python": platform.python_version(),
    }
    written = QUICK_RESULT if asked.quick else RESULT
    written.parent.mkdir(exist_ok=True)
    written.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(not clean or any(hunt.violation is None for hunt in hunts))


if __name__ == "__main__":
    main()
