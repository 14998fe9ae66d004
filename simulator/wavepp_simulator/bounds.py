"""What the slowest stage allows at most: full waves, no idle time, prompts cut as rarely as they can be.

Pure arithmetic on a profile (`Profile.bound`, `Demand`); called for reports and by the oracle. The share of the
bound is counted in work done, chunk by chunk: a count of the prompts that ended within a time depends on where
that time begins and ends, as prompts end in bursts, and on which of them it happened to hold.
"""

from __future__ import annotations

from collections.abc import Iterable

from wavepp_proto.profile import Demand, Profile, StageCosts
from wavepp_proto.workload import Family, Prompt

MIX = 4
"""A family repeats its kinds of prompts after so many."""
Work = tuple[int, int]
"""(prompt tokens, of them cached)."""


def reusable(profile: Profile, prompt: Prompt) -> int:
    """Tokens that an endless cache gives, in whole blocks."""
    return prompt.reusable_tokens // profile.block_tokens * profile.block_tokens


def useful_us(costs: StageCosts, wave_tokens: int, work: Work, start: int, length: int) -> float:
    """One chunk's part of what its whole prompt asks of a stage at least; parts add up to all of it."""
    prompt_tokens, cached = work
    prefix = Demand.of(prompt_tokens, cached, wave_tokens).prefix / (prompt_tokens - cached)
    chunk = Demand(length / wave_tokens, length, start * length + length * length / 2, prefix * length)
    return costs.demand_us(chunk)


def slowest(profile: Profile) -> int:
    """The stage that takes longest for a full cold wave; the last one among equals."""
    wave = Demand.of(profile.wave_tokens, 0, profile.wave_tokens)
    return max(range(len(profile.stages)), key=lambda place: (profile.stages[place].costs.demand_us(wave), place))


def least_s(profile: Profile, works: Iterable[Work]) -> float:
    """Seconds that the slowest stage needs at least for all of them."""
    demand = Demand(0.0, 0.0, 0.0, 0.0)
    for tokens, cached in works:
        demand = demand.plus(Demand.of(tokens, cached, profile.wave_tokens))
    return max(stage.costs.demand_us(demand) for stage in profile.stages) / 1e6


def family_bound(profile: Profile, family: Family) -> float:
    """Input tokens per second of an endless closed loop, cached ones included."""
    prompts = [family.prompt(number) for number in range(MIX)]
    return profile.bound((prompt.tokens, reusable(profile, prompt), 1.0) for prompt in prompts)
