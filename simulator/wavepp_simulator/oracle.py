"""What a perfect admission would reach: the best of fixed budgets M, M/2, M/4, ..., admitted for free and at once.

Owns a pipeline of costs alone (no cores, no messages, an endless cache): the same closed loop, waves packed first
come first served the moment the first stage is free. The bar that policies are measured against (DESIGN.md
section 15). Pure arithmetic, seconds of virtual time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush

from wavepp_proto.profile import Chunk, Profile
from wavepp_proto.workload import Family

LEAST_BUDGET = 512


@dataclass(frozen=True, slots=True)
class Ideal:
    """What one budget reached."""

    budget: int
    input_tokens_per_s: float


@dataclass(slots=True)
class _Asked:
    number: int
    at: float
    done: int
    """Tokens cached or in a wave."""
    tokens: int


class _Pipeline:
    """The wave that leaves the first stage at some time, and when each of its requests ends."""

    def __init__(self, profile: Profile, family: Family, budget: int) -> None:
        self._profile, self._family, self._budget = profile, family, budget
        self._free = [0.0] * len(profile.stages)
        """When each stage has nothing left to run."""
        self._waiting: deque[_Asked] = deque()
        self._asking: list[tuple[float, int]] = []
        """(when a slot asks again, its turn)."""
        self._number = 0
        self.ended: list[tuple[float, int]] = []
        """(when, tokens of the prompt)."""
        for _ in range(family.concurrency):
            heappush(self._asking, (0.0, len(self._asking)))

    def step(self) -> None:
        """One wave, as early as it can be."""
        at = self._free[0] if self._waiting else max(self._free[0], self._asking[0][0])
        while self._asking and self._asking[0][0] <= at:
            self._ask(heappop(self._asking)[0])
        chunks, final = self._pack()
        end = self._run(at, chunks)
        for asked in final:
            self.ended.append((end, asked.tokens))
            heappush(self._asking, (end, asked.number))

    def _ask(self, at: float) -> None:
        prompt = self._family.prompt(self._number)
        cached = prompt.reusable_tokens // self._profile.block_tokens * self._profile.block_tokens
        self._waiting.append(_Asked(self._number, at, cached, prompt.tokens))
        self._number += 1

    def _pack(self) -> tuple[list[Chunk], list[_Asked]]:
        """First come first served, interior ends on blocks; what is left over goes to whoever is next."""
        left, rows, size = self._budget, self._profile.lanes, self._profile.block_tokens
        chunks: list[Chunk] = []
        final: list[_Asked] = []
        for asked in list(self._waiting):
            if not left or not rows:
                break
            end = min(asked.tokens, asked.done + left)
            if end < asked.tokens:
                end = end // size * size
            if end <= asked.done:
                continue
            chunks.append((asked.done, end - asked.done))
            left, rows, asked.done = left - (end - asked.done), rows - 1, end
            if end == asked.tokens:
                final.append(asked)
                self._waiting.remove(asked)
        return chunks, final

    def _run(self, at: float, chunks: list[Chunk]) -> float:
        """When the last stage has done the wave."""
        link_s = self._profile.wire_us(sum(x for _, x in chunks)) / 1e6
        for place, stage in enumerate(self._profile.stages):
            at = self._free[place] = max(at, self._free[place]) + stage.costs.wave_us(chunks) / 1e6
            at += link_s
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
    start = line.ended[warm - 1][0]
    while len(line.ended) < warm + count:
        line.step()
    counted = [(end, tokens) for end, tokens in line.ended if end > start]
    return Ideal(budget, sum(tokens for _, tokens in counted) / (counted[-1][0] - start))


def oracle(profile: Profile, family: Family, count: int) -> Ideal:
    """The best budget."""
    return max((ideal(profile, family, budget, count) for budget in budgets(profile)), key=_speed)


def _speed(one: Ideal) -> float:
    return one.input_tokens_per_s
