"""What a perfect admission would reach: the best of fixed budgets M, M/2, M/4, ..., admitted for free and at once.

Owns a pipeline of costs alone (no cores, no messages, an endless cache): the same closed loop, waves packed first
come first served the moment the first stage is free. The bar that policies are measured against (DESIGN.md,
Bars). Pure arithmetic, seconds of virtual time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush

from wavepp_proto.profile import Chunk, Profile
from wavepp_proto.workload import Family
from wavepp_simulator.bounds import reusable, slowest, useful_us

LEAST_BUDGET = 512
WORSE = 2


@dataclass(frozen=True, slots=True)
class Ideal:
    """What one budget reached."""

    budget: int
    fraction_of_bound: float


@dataclass(slots=True, eq=False)
class _Asked:
    cached: int
    tokens: int
    done: int
    """Tokens cached or in a wave."""


class _Pipeline:
    """The wave that leaves the first stage at some time, and when each of its requests ends."""

    def __init__(self, profile: Profile, family: Family, budget: int) -> None:
        self._profile, self._family, self._budget = profile, family, budget
        self._free = [0.0] * len(profile.stages)
        """When each stage has nothing left to run."""
        self._waiting: deque[_Asked] = deque()
        self._asking = [0.0] * family.concurrency
        """When slots ask again: a heap."""
        self._number = 0
        self.ended: list[float] = []
        self.worked: list[tuple[float, float, float]] = []
        """Waves of the slowest stage: (start, end, seconds of it that a bound counts)."""
        self._slowest = slowest(profile)

    def step(self) -> None:
        """One wave, as early as it can be."""
        at = self._free[0] if self._waiting else max(self._free[0], self._asking[0])
        while self._asking and self._asking[0] <= at:
            heappop(self._asking)
            self._ask()
        chunks, useful_s, ending = self._pack()
        end = self._run(at, chunks, useful_s)
        for _ in range(ending):
            self.ended.append(end)
            heappush(self._asking, end)

    def _ask(self) -> None:
        prompt = self._family.prompt(self._number)
        cached = reusable(self._profile, prompt)
        self._waiting.append(_Asked(cached, prompt.tokens, cached))
        self._number += 1

    def _pack(self) -> tuple[list[Chunk], float, int]:
        """First come first served, interior ends on blocks; what is left over goes to whoever is next."""
        left, rows, size = self._budget, self._profile.lanes, self._profile.block_tokens
        chunks: list[Chunk] = []
        ending = 0
        worth_us, costs, most = 0.0, self._profile.stages[self._slowest].costs, self._profile.wave_tokens
        for asked in list(self._waiting):
            if not left or not rows:
                break
            end = min(asked.tokens, asked.done + left)
            if end < asked.tokens:
                end = end // size * size
            if end <= asked.done:
                continue
            chunks.append((asked.done, end - asked.done))
            worth_us += useful_us(costs, most, (asked.tokens, asked.cached), asked.done, end - asked.done)
            left, rows, asked.done = left - (end - asked.done), rows - 1, end
            if end == asked.tokens:
                ending += 1
                self._waiting.remove(asked)
        return chunks, worth_us / 1e6, ending

    def _run(self, at: float, chunks: list[Chunk], useful_s: float) -> float:
        """When the last stage has done the wave."""
        link_s = self._profile.wire_us(sum(x for _, x in chunks)) / 1e6
        for place, stage in enumerate(self._profile.stages):
            start = max(at, self._free[place])
            self._free[place] = start + stage.costs.wave_us(chunks) / 1e6
            if place == self._slowest:
                self.worked.append((start, self._free[place], useful_s))
            at = self._free[place] + link_s
        return at - link_s


def budgets(profile: Profile) -> list[int]:
    """M, M/2, M/4, ... down to LEAST_BUDGET, each a multiple of the block size."""
    size, found = profile.block_tokens, [profile.wave_tokens // profile.block_tokens * profile.block_tokens]
    while (half := found[-1] // 2 // size * size) >= max(LEAST_BUDGET, size):
        found.append(half)
    return found


def ideal(profile: Profile, family: Family, budget: int, count: int) -> Ideal:
    """The closed loop after one warm-up round, over `count` requests."""
    line, warm = _Pipeline(profile, family, budget), family.concurrency
    while len(line.ended) < warm:
        line.step()
    start = line.ended[warm - 1]
    while len(line.ended) < warm + count:
        line.step()
    end = line.ended[-1]
    worth = sum(useful * max(0.0, min(b, end) - max(a, start)) / (b - a) for a, b, useful in line.worked if b > a)
    return Ideal(budget, worth / (end - start))


def oracle(profile: Profile, family: Family, count: int) -> Ideal:
    """The best budget; smaller ones are left out once WORSE of them in a row were worse than the best."""
    best, worse = Ideal(0, -1.0), 0
    for budget in budgets(profile):
        found = ideal(profile, family, budget, count)
        best, worse = (found, 0) if found.fraction_of_bound > best.fraction_of_bound else (best, worse + 1)
        if worse == WORSE:
            break
    return best
