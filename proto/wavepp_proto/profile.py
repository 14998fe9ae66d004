"""What one stage of a pipeline costs, as numbers: the device profile (DESIGN.md).

Owns the cost model that planner, emulated engine and virtual time share, the bound it sets to throughput, and its
JSON form. Pure: who fits a profile, loads one or takes its time lies elsewhere. All times are microseconds of one
stage.

    t(wave) = c + sum over chunks ( b*x + a*(L*x + x*x/2) + g*L )     x new tokens after a prefix of L
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple

from wavepp_proto import limits
from wavepp_proto.errors import InvalidRequest

Chunk = tuple[int, int]
"""(L, x): x new tokens after a prefix of L."""
SCHEMA = 1
MAX_LAYERS = 4096
_MAX_WAVE_TOKENS = 1 << 24
MAX_COST_US = 1e15
"""Of one coefficient: decades; products of larger ones would not be numbers any more."""


class Demand(NamedTuple):
    """The least that some prompts ask of a stage: what each coefficient is multiplied with."""

    waves: float
    """Full ones: tokens / M."""
    tokens: float
    """New ones."""
    pairs: float
    """Of a new token and one it attends to; the same however a prompt is cut."""
    prefix: float
    """Sum of L over chunks."""

    @classmethod
    def of(cls, input_tokens: int, cached_tokens: int, wave_tokens: int) -> Demand:
        """Of one prompt, cut as rarely and as early as waves of `wave_tokens` allow, sharing full waves with others.

        No planner asks less of a stage, so a throughput derived from it is a bound."""
        new = input_tokens - cached_tokens
        cuts = (input_tokens - cut * wave_tokens for cut in range(1, -(-new // wave_tokens)))
        pairs = (input_tokens * input_tokens - cached_tokens * cached_tokens) / 2
        return cls(new / wave_tokens, new, pairs, cached_tokens + sum(cuts))

    def times(self, factor: float) -> Demand:
        return Demand(*(factor * part for part in self))

    def plus(self, other: Demand) -> Demand:
        return Demand(*(one + two for one, two in zip(self, other, strict=True)))


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Coefficients of one stage; none negative."""

    c_us: float = 0.0
    """Per wave, whatever it carries: at least one reading of the touched weights from device memory."""
    b_us: float = 0.0
    """Per new token."""
    a_us: float = 0.0
    """Per pair of a new token and a token it attends to."""
    g_us: float = 0.0
    """Per token of the prefix, per chunk."""

    def chunk_us(self, prefix: int, tokens: int) -> float:
        return self.b_us * tokens + self.a_us * (prefix * tokens + tokens * tokens / 2) + self.g_us * prefix

    def wave_us(self, chunks: Iterable[Chunk]) -> float:
        return self.c_us + sum(self.chunk_us(prefix, tokens) for prefix, tokens in chunks)

    def demand_us(self, demand: Demand) -> float:
        """Without any idle time."""
        return (
            self.c_us * demand.waves + self.b_us * demand.tokens + self.a_us * demand.pairs + self.g_us * demand.prefix
        )


@dataclass(frozen=True, slots=True)
class StageProfile:
    costs: StageCosts
    pool_blocks: int
    host_pool_blocks: int = 0
    state_slots: int = 0
    """0 where the stage has no recurrent layer."""
    copy_us: float = 0.0
    """Per block copied between device and host."""


@dataclass(frozen=True, slots=True)
class Profile:
    """A pipeline's devices. `stages` from first to last; layers are spread evenly over them."""

    name: str
    stages: tuple[StageProfile, ...]
    block_tokens: int = 64
    wave_tokens: int = 16_384
    """M."""
    min_wave_tokens: int = 8_192
    """b_min."""
    fills: int = 2
    """F."""
    lanes: int = 128
    window: int = 1_048_576
    layers: int = 32
    attention_every: int = 1
    """Every n-th layer attends, the others are recurrent; 1: all attend, 0: none does."""
    snapshot_tokens: int = 8_192
    link_us: float = 0.0
    """Latency of one activation from stage to stage."""
    link_us_per_token: float = 0.0
    """Time on the wire for each token of a wave."""
    provenance: dict[str, Any] = field(default_factory=dict)
    """Where the numbers come from: sources, physics bound, residuals of the fit."""

    def bound(self, prompts: Iterable[tuple[int, int, float]]) -> float:
        """Most tokens per second, cached ones included, that the slowest stage allows to an endless mix of
        `prompts`: (input tokens, cached tokens, share)."""
        tokens, demand = 0.0, Demand(0.0, 0.0, 0.0, 0.0)
        for input_tokens, cached_tokens, share in prompts:
            tokens += share * input_tokens
            demand = demand.plus(Demand.of(input_tokens, cached_tokens, self.wave_tokens).times(share))
        slowest_us = max(stage.costs.demand_us(demand) for stage in self.stages)
        return tokens / slowest_us * 1e6 if slowest_us else float("inf")

    def wire_us(self, tokens: int) -> float:
        """Of one wave from stage to stage, on an idle link."""
        return self.link_us + self.link_us_per_token * tokens

    def to_json(self) -> str:
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1, sort_keys=True, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Raises InvalidRequest naming the first field that is missing, unknown or out of range."""
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"the profile is no JSON: {error}", field="profile") from error
        if not isinstance(document, dict) or document.get("schema") != SCHEMA:
            raise InvalidRequest("not a device profile", field="schema", limit=SCHEMA)
        try:
            stages = tuple(
                StageProfile(**{**stage, "costs": StageCosts(**stage["costs"])}) for stage in document["stages"]
            )
            rest = {name: value for name, value in document.items() if name not in ("schema", "stages")}
            profile = cls(stages=stages, **rest)
        except (TypeError, KeyError) as error:
            raise InvalidRequest(f"the profile has a wrong field: {error}", field="profile") from error
        profile.check()
        return profile

    def check(self) -> None:
        """Raises InvalidRequest naming the first field out of range."""
        _typed("name", self.name, str)
        _typed("provenance", self.provenance, dict)
        if not 1 <= len(self.stages) <= limits.MAX_STAGES:
            raise InvalidRequest(
                "a profile has at least one stage", field="stages", value=len(self.stages), limit=limits.MAX_STAGES
            )
        for number, stage in enumerate(self.stages):
            where = f"stage {number}: "
            for part in fields(StageCosts):
                _real(where, part.name, getattr(stage.costs, part.name))
            _real(where, "copy_us", stage.copy_us)
            _whole(where, "pool_blocks", stage.pool_blocks, 1, limits.MAX_POOL_BLOCKS)
            _whole(where, "host_pool_blocks", stage.host_pool_blocks, 0, limits.MAX_POOL_BLOCKS)
            _whole(where, "state_slots", stage.state_slots, 0, limits.MAX_STATE_SLOTS)
        _whole("", "block_tokens", self.block_tokens, 1, limits.MAX_BLOCK_TOKENS)
        _whole("", "min_wave_tokens", self.min_wave_tokens, self.block_tokens, _MAX_WAVE_TOKENS)
        _whole("", "wave_tokens", self.wave_tokens, self.min_wave_tokens, _MAX_WAVE_TOKENS)
        _whole("", "fills", self.fills, 1, limits.MAX_STAGES)
        _whole("", "lanes", self.lanes, 1, limits.MAX_LANES)
        _whole("", "window", self.window, 1, limits.MAX_PROMPT_TOKENS)
        _whole("", "layers", self.layers, len(self.stages), MAX_LAYERS)
        _whole("", "attention_every", self.attention_every, 0, MAX_LAYERS)
        _whole("", "snapshot_tokens", self.snapshot_tokens, 0, limits.MAX_PROMPT_TOKENS)
        _real("", "link_us", self.link_us)
        _real("", "link_us_per_token", self.link_us_per_token)


def _typed(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise InvalidRequest(f"{name} is no {kind.__name__}", field=name, value=str(value)[:40])


def _real(where: str, name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_COST_US:
        raise InvalidRequest(
            f"{where}{name} is no number from 0 to {MAX_COST_US:g}",
            field=name,
            value=str(value)[:40],
            limit=MAX_COST_US,
        )


def _whole(where: str, name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequest(
            f"{where}{name} is no whole number from {low} to {high}", field=name, value=str(value), limit=high
        )
