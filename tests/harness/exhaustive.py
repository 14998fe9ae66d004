"""Every way to cut a queue of prompts into waves, in order: the least makespan that any of them has.

Owns the enumeration for small instances, and drawing them. A wave takes consecutive blocks of the queue, at most M
tokens, and may hold the end of one prompt and the beginning of the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from tests.harness.pipeline_model import Loop, Prompt, makespan_us
from wavepp_controller.core.planning import Policy
from wavepp_proto.profile import Chunk, StageCosts

BLOCK = 1024
MOST_BLOCKS = 12


@dataclass(frozen=True)
class Instance:
    stages: tuple[StageCosts, ...]
    prompts: tuple[Prompt, ...]
    wave_tokens: int


def draw(seed: int) -> Instance:
    """At most 12 blocks in one to four prompts, behind any prefix, over two or three stages."""
    chance = Random(seed)
    left, prompts = MOST_BLOCKS, []
    for _ in range(chance.randint(1, 4)):
        blocks = chance.randint(1, 8)
        if blocks <= left:
            cached = BLOCK * chance.choice([0, 0, 16, 64])
            prompts.append((cached, cached + BLOCK * blocks))
            left -= blocks
    costs = StageCosts(
        chance.uniform(2_000, 40_000), chance.uniform(5, 20), chance.choice([0, 1e-4]), chance.choice([0, 0.1])
    )
    spread = [chance.choice([1.0, 1.0, 0.8]) for _ in range(chance.randint(2, 3))]
    stages = tuple(
        StageCosts(factor * costs.c_us, factor * costs.b_us, factor * costs.a_us, factor * costs.g_us)
        for factor in spread
    )
    return Instance(stages, tuple(prompts), BLOCK * chance.choice([4, 8]))


def least_makespan_us(instance: Instance) -> float:
    queue = [(number, at) for number, (start, end) in enumerate(instance.prompts) for at in range(start, end, BLOCK)]
    return min(
        makespan_us(instance.stages, [_chunks(wave) for wave in waves])
        for waves in _cuts(queue, instance.wave_tokens // BLOCK)
    )


def planned_us(instance: Instance, policy: Policy) -> float:
    """What the policy makes of it; everything waits from the start, nothing takes time but the stages."""
    loop = Loop(instance.stages, policy, instance.wave_tokens, BLOCK, return_s=0.0, round_s=0.0, hop_s=0.0)
    loop.run([iter([prompt]) for prompt in instance.prompts], len(instance.prompts))
    return loop.now * 1e6


def _cuts(queue: Sequence[tuple[int, int]], most: int) -> Iterator[list[Sequence[tuple[int, int]]]]:
    if not queue:
        yield []
    for size in range(1, min(most, len(queue)) + 1):
        for rest in _cuts(queue[size:], most):
            yield [queue[:size], *rest]


def _chunks(wave: Sequence[tuple[int, int]]) -> list[Chunk]:
    starts: dict[int, int] = {}
    counts: dict[int, int] = {}
    for number, at in wave:
        starts.setdefault(number, at)
        counts[number] = counts.get(number, 0) + BLOCK
    return [(starts[number], counts[number]) for number in starts]
