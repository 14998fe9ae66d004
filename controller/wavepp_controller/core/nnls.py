"""Least squares without negative coefficients, for a handful of them.

Owns one solver of normal equations: minimise x'Hx - 2g'x with every x >= 0. Pure; called by `latency_model`, whose
H is 4 by 4 and positive definite. An active-set method: exact after a few eliminations at this size.
"""

from __future__ import annotations

from collections.abc import Sequence

Matrix = Sequence[Sequence[float]]


def solve_nonnegative(matrix: Matrix, right: Sequence[float]) -> list[float]:
    """The minimiser for a symmetric positive definite `matrix`; zeros where a coefficient would be negative."""
    free = list(range(len(right)))
    found = [0.0] * len(right)
    for _ in range(4 * len(right)):  # each turn drops or takes in one coefficient; cycles are cut off
        found = _solve_free(matrix, right, free)
        worst = min(free, key=lambda i: found[i], default=None)
        if worst is not None and found[worst] < 0:
            free.remove(worst)
            continue
        wanted = _most_wanted(matrix, right, found, free)
        if wanted is None:
            return found
        free = sorted([*free, wanted])
    return [max(0.0, value) for value in found]


def _most_wanted(matrix: Matrix, right: Sequence[float], found: Sequence[float], free: Sequence[int]) -> int | None:
    """A coefficient at zero that would lower the cost by growing; None at the optimum."""
    best, most = None, 1e-9
    for i in range(len(right)):
        if i in free:
            continue
        pull = right[i] - sum(matrix[i][j] * found[j] for j in free)
        relative = pull / (abs(right[i]) or matrix[i][i])
        if relative > most:
            best, most = i, relative
    return best


def _solve_free(matrix: Matrix, right: Sequence[float], free: Sequence[int]) -> list[float]:
    """The unconstrained minimiser over the coefficients `free`, by elimination (positive definite: no pivots)."""
    rows = [[*(matrix[i][j] for j in free), right[i]] for i in free]
    size = len(free)
    for column in range(size):
        pivot = rows[column]
        for below in range(column + 1, size):
            factor = rows[below][column] / pivot[column]
            if factor:
                rows[below] = [one - factor * other for one, other in zip(rows[below], pivot, strict=True)]
    found = [0.0] * len(right)
    for place in reversed(range(size)):
        known = sum(rows[place][later] * found[free[later]] for later in range(place + 1, size))
        found[free[place]] = (rows[place][size] - known) / rows[place][place]
    return found
