"""A device profile of a pipeline that runs: which prompts to send, and costs from what its stages took for them.

Owns the probes, the fit and the profile; `commands/calibrate.py` sends and reads. Pure; no clock, no file.

Probes run alone. A wave that carried chunks (L, x) took a stage c + sum(b*x + a*(L*x + x*x/2) + g*L), so each probe
is one linear equation in (c, b, a, g): its waves, new tokens, pairs and prefixes are known, and so is the sum of
times. They are solved for the least sum of squared RELATIVE errors with no coefficient negative, which is exact for
four unknowns: every choice of those that are 0 is tried. Of probes with equal chunks the median counts.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wavepp._status import PipelineStatus, StageStatus
from wavepp_proto.errors import InvalidRequest
from wavepp_proto.profile import Chunk, Profile, StageCosts, StageProfile

SUFFIXES = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0)
"""Of M: new tokens of a probe, in one wave each if the planner leaves them whole."""
PREFIXES = (1.0, 4.0, 8.0, 16.0, 64.0)
"""Of M: cached tokens ahead of them, as far as the pipeline has room."""
POOL_SHARE = 0.5
"""Of the smallest pool that one probe may fill."""
LEAST_KINDS = 6
"""Of probes with different chunks: four unknowns and some to contradict them."""


class Probe(NamedTuple):
    """Send `prefix` tokens, then the same and `suffix` more: the second is computed behind a cached prefix."""

    prefix: int
    suffix: int


@dataclass(frozen=True, slots=True)
class Sample:
    """What one prompt was cut into, one chunk a wave, and what each stage took for all of them."""

    chunks: tuple[Chunk, ...]
    compute_us: tuple[float, ...]
    """By stage, first to last."""


@dataclass(frozen=True, slots=True)
class StageFit:
    costs: StageCosts
    worst: float
    """Largest relative error among the kinds of probes."""
    mean: float


def probes(pipeline: PipelineStatus, longest: int) -> tuple[Probe, ...]:
    """Cold ones first, then those behind longer and longer prefixes; every length a multiple of the block size.

    Raises InvalidRequest when the pipeline has room for too few."""
    block, m = pipeline.block_tokens, pipeline.wave_tokens
    pool = min(daemon.pool_blocks for daemon in pipeline.daemons) * block
    most = min(longest, pipeline.window - 1, int(pool * POOL_SHARE))
    suffixes = sorted({max(block, int(share * m) // block * block) for share in SUFFIXES})
    prefixes = [0, *(int(share * m) // block * block for share in PREFIXES)]
    found = tuple(Probe(prefix, suffix) for prefix in prefixes for suffix in suffixes if prefix + suffix <= most)
    if len(found) < LEAST_KINDS:
        raise InvalidRequest(
            f"prompts of at most {most} tokens are too short to calibrate waves of {m} tokens",
            field="longest", value=most, limit=m,
        )  # fmt: skip
    return found


def chunks_of(start: int, ends: Sequence[int], prompt_tokens: int, waves: int) -> tuple[Chunk, ...] | None:
    """The chunks of a prompt of which `start` tokens were reused, from the positions that were reported before its
    end. None if reports were missed or repeated: then nobody knows how it was cut."""
    cuts = [start, *ends, prompt_tokens]
    if len(cuts) != waves + 1 or any(end <= begin for begin, end in itertools.pairwise(cuts)):
        return None
    return tuple((begin, end - begin) for begin, end in itertools.pairwise(cuts))


def fit(samples: Sequence[Sample], stages: int) -> tuple[StageFit, ...]:
    """One for each stage. Raises InvalidRequest when the samples are of too few kinds."""
    kinds: dict[tuple[Chunk, ...], list[Sample]] = {}
    for sample in samples:
        kinds.setdefault(sample.chunks, []).append(sample)
    if len(kinds) < LEAST_KINDS:
        raise InvalidRequest(
            f"{len(kinds)} kinds of probes are too few", field="probes", value=len(kinds), limit=LEAST_KINDS
        )
    rows = np.array([_row(chunks) for chunks in kinds])
    taken = [
        np.array([statistics.median(sample.compute_us[stage] for sample in group) for group in kinds.values()])
        for stage in range(stages)
    ]
    return tuple(_fit_stage(rows, times) for times in taken)


def profile_of(pipeline: PipelineStatus, fits: Sequence[StageFit], name: str, provenance: dict[str, Any]) -> Profile:
    """Sizes as the pipeline has them. Links, copies and which layers attend are not measured: 0, and every second
    where a stage has both kinds."""
    poorest: dict[int, StageStatus] = {}
    for daemon in pipeline.daemons:  # a stage has room for what its poorest rank has
        known = poorest.get(daemon.key.stage)
        if known is None or daemon.pool_blocks < known.pool_blocks:
            poorest[daemon.key.stage] = daemon
    daemons = [poorest[stage] for stage in sorted(poorest)]
    groups = {group for daemon in daemons for group in daemon.groups}
    every = 1 if "recurrent" not in groups else 2 if "attention" in groups else 0
    stages = tuple(
        StageProfile(one.costs, daemon.pool_blocks, daemon.host_pool_blocks, daemon.state_slots)
        for one, daemon in zip(fits, daemons, strict=True)
    )
    m, block = pipeline.wave_tokens, pipeline.block_tokens
    return Profile(
        name, stages, block, m, max(block, m // 2 // block * block), window=pipeline.window,
        layers=max(daemon.last_layer for daemon in daemons), attention_every=every, provenance=provenance,
    )  # fmt: skip


def _row(chunks: Sequence[Chunk]) -> tuple[float, float, float, float]:
    """What c, b, a and g are multiplied with."""
    new = sum(tokens for _, tokens in chunks)
    pairs = sum(prefix * tokens + tokens * tokens / 2 for prefix, tokens in chunks)
    return float(len(chunks)), float(new), float(pairs), float(sum(prefix for prefix, _ in chunks))


def _fit_stage(rows: npt.NDArray[np.float64], times: npt.NDArray[np.float64]) -> StageFit:
    relative = rows / np.maximum(times, 1.0)[:, None]
    scale = np.maximum(np.abs(relative).max(axis=0), np.finfo(float).tiny)
    best, least = np.zeros(4), np.inf
    for some in itertools.chain.from_iterable(itertools.combinations(range(4), count) for count in (1, 2, 3, 4)):
        part = relative[:, some] / scale[list(some)]
        solved = np.linalg.lstsq(part, np.ones(len(rows)), rcond=None)[0]
        error = float(((part @ solved - 1.0) ** 2).sum())
        if (solved >= 0.0).all() and error < least:
            best, least = np.zeros(4), error
            best[list(some)] = solved / scale[list(some)]
    errors = np.abs(relative @ best - 1.0)
    return StageFit(StageCosts(*(float(value) for value in best)), float(errors.max()), float(errors.mean()))
