"""Pool sizes that make one stage forget while the others remember, by counting and not by luck.

Owns the sizes of the demo's pools. One stage gets fewer blocks than the later passes want back from
the first, so at least one of their prompts must find more on another stage than on it; the largest
pool never evicts. Pure: token ids in, numbers of blocks out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from wavepp.demo.prompts import DemoPrompt
from wavepp_proto.errors import InvalidRequest
from wavepp_proto.hashing import blocks_for

SMALL_STAGE = 1
"""The stage with the small pool."""
SMALL_SHARE = 0.8
"""Its pool, as a share of the blocks wanted back: most documents stay, at least one does not."""


@dataclass(frozen=True, slots=True)
class Pools:
    blocks: tuple[int, ...]
    """Pool of each stage."""
    wanted_back: int
    """Distinct blocks of the first pass that the second pass could reuse."""


def plan_pools(passes: Sequence[Sequence[DemoPrompt]], block_tokens: int, stages: int, concurrency: int) -> Pools:
    """Sizes for `stages` pools. Raises InvalidRequest if there is no such size: one stage, or too short prompts."""
    if stages < 2:
        raise InvalidRequest("the demo needs two stages that can differ", field="stages", value=stages, limit=2)
    first, second = (_chains(prompts, block_tokens) for prompts in passes[:2])
    wanted_back = len(first & second)
    every = [prompt for prompts in passes for prompt in prompts]
    longest = max(blocks_for(len(prompt.token_ids), block_tokens) for prompt in every)
    small = max(longest, int(SMALL_SHARE * wanted_back))
    # A stage that holds `small` blocks when the second pass begins lacks at least one that is wanted back,
    # and every block of that document's chain below it: that document's prompt finds less here than elsewhere.
    if small >= wanted_back:
        raise InvalidRequest(
            "the prompts share too little with this tokenizer", field="model", value=wanted_back, limit=small + 1
        )
    # Everything ever computed, and what prompts under way may hold twice before it is published.
    large = len(_chains(every, block_tokens)) + (concurrency + 1) * longest
    step = large // (4 * stages)
    sizes = [large - stage * step for stage in range(stages)]
    sizes[SMALL_STAGE] = small
    return Pools(tuple(sizes), wanted_back)


def _chains(prompts: Iterable[DemoPrompt], block_tokens: int) -> set[int]:
    """The distinct full blocks of `prompts`; a block is named by its whole prefix."""
    return {
        hash(prompt.token_ids[:end])
        for prompt in prompts
        # A prompt's last token is always computed: a block that ends with it is never reused.
        for end in range(block_tokens, len(prompt.token_ids), block_tokens)
    }
