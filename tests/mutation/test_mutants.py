"""Planted protocol bugs are caught by exploring seeds, soon; the rest of the table is hunted by `scripts/soak`."""

import pytest

from tests.mutation.hunt import HONEST, hunted
from tests.mutation.mutants import MUTANTS

SEEDS = 500
QUICK = [mutant.name for mutant in MUTANTS if mutant.quick]


@pytest.mark.parametrize("mutant", QUICK)
def test_planted_bug_is_caught_when_seeds_are_explored(mutant: str) -> None:
    caught = hunted(mutant, SEEDS)
    assert caught.violation is not None, f"{mutant} lived through {caught.seeds} seeds"


def test_no_violation_is_seen_when_nothing_is_planted() -> None:
    assert hunted(HONEST, 60).violation is None


def test_enough_bugs_are_planted_in_every_run() -> None:
    assert len(QUICK) >= 10
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
