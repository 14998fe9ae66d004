"""What one stage of a pipeline costs, as numbers: the device profile (DESIGN.md sections 7, 9 and 13).

Owns the cost model that planner, emulated engine and virtual time share, and its JSON form. Pure: who fits a
profile, loads one or takes its time lies elsewhere. All times are microseconds of one stage.

    t(wave) = c + sum over chunks ( b*x + a*(L*x + x*x/2) + g*L )     x new tokens after a prefix of L
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from wavepp_proto.errors import InvalidRequest

Chunk = tuple[int, int]
"""(L, x): x new tokens after a prefix of L."""
SCHEMA = 1


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
    snapshot_tokens: int = 8_192
    link_us: float = 0.0
    """Latency of one activation from stage to stage."""
    link_us_per_token: float = 0.0
    """Time on the wire for each token of a wave."""
    provenance: dict[str, Any] = field(default_factory=dict)
    """Where the numbers come from: sources, physics bound, residuals of the fit."""

    def to_json(self) -> str:
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Raises InvalidRequest naming the first field that is missing, unknown or out of range."""
        try:
            document = json.loads(text)
        except ValueError as error:
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
        if not self.stages:
            raise InvalidRequest("a profile has at least one stage", field="stages", value=0, limit=1)
        for number, stage in enumerate(self.stages):
            for name, value in asdict(stage.costs).items():
                if not isinstance(value, int | float) or not 0 <= value < float("inf"):
                    raise InvalidRequest(
                        f"stage {number}: {name} is no finite number >= 0", field=name, value=str(value), limit=0
                    )
            if stage.pool_blocks < 1:
                raise InvalidRequest("pool_blocks is too small", field="pool_blocks", value=stage.pool_blocks, limit=1)
