"""What the stages and the controller did between two statuses.

Owns the differences: each stage's time by what it was spent on, waves and their fill. Pure. Called by `run.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from wavepp import ClusterStatus
from wavepp._status import PipelineStatus, StageStatus

STATES = ("compute", "activation_wait", "admission_wait", "preparing", "idle")
"""What a stage's time is split into, in the order of `StageTimes`."""


@dataclass(frozen=True, slots=True)
class StageSplit:
    stage: int
    rank: int
    waves: int
    seconds: float
    """Accounted for by its waves."""
    shares: Mapping[str, float]
    """Of `seconds`, by state; they sum to 1."""


@dataclass(frozen=True, slots=True)
class Waves:
    """Of the whole controller: all its pipelines."""

    count: int
    tokens_per_wave: float
    tokens_per_s: float
    """Computed tokens as waves carried them: requests end in bursts, waves do not."""


def stage_splits(before: PipelineStatus, after: PipelineStatus) -> tuple[StageSplit, ...] | None:
    """None if the pipeline was formed anew between the two: the sums began again."""
    if before.formation != after.formation:
        return None
    earlier = {daemon.key: daemon for daemon in before.daemons}
    pairs = [(earlier[daemon.key], daemon) for daemon in after.daemons if daemon.key in earlier]
    return tuple(_split(old, new) for old, new in sorted(pairs, key=lambda pair: (pair[1].key.stage, pair[1].key.rank)))


def _split(old: StageStatus, new: StageStatus) -> StageSplit:
    then, now = asdict(old.times), asdict(new.times)
    spent = {state: now[f"{state}_us"] - then[f"{state}_us"] for state in STATES}
    total = sum(spent.values())
    shares = {state: micros / total if total else 0.0 for state, micros in spent.items()}
    return StageSplit(new.key.stage, new.key.rank, new.waves_done - old.waves_done, total / 1e6, shares)


def waves(before: ClusterStatus, after: ClusterStatus, seconds: float) -> Waves:
    """`seconds` lie between the two."""
    count, tokens = (after.counters.get(name, 0) - before.counters.get(name, 0) for name in ("waves", "wave_tokens"))
    return Waves(count, tokens / count if count else 0.0, tokens / seconds if seconds > 0 else 0.0)


def pipeline_of(status: ClusterStatus, name: str) -> PipelineStatus | None:
    return next((one for one in status.pipelines if one.pipeline == name), None)
