"""Emulated engines chained by hand: rows, waves and tables that tests write down themselves.

Payloads cross from stage to stage as bytes, as on the grpc link. Used by the emulated engine's tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from wavepp_proto.hashing import HashScope, hash_blocks
from wavepp_proto.terms import Attempt, Formation, HoldKey, RequestId, Sampling, WaveOrdinal
from wavepp_stage.core.work import CopyDirection, CopyLot, StateWork
from wavepp_stage.engine.base import EnginePlan, RowWork, WaveOutcome, WaveWork
from wavepp_stage.engine.emulated import EmulatedEngine

B = 4
POOL = 16
HOST_POOL = 8
SLOTS = 6
LAYERS = 6
VOCABULARY = 97
PRESET = f"emulated:layers={LAYERS},vocabulary={VOCABULARY},window=1000"
KEY = HoldKey(RequestId("r"), Attempt(1))


def key_of(name: str) -> HoldKey:
    return HoldKey(RequestId(name), Attempt(1))


def plan_of(stage: int, stages: int, preset: str = PRESET) -> EnginePlan:
    band = LAYERS // stages
    first = stage * band
    return EnginePlan(
        preset, stage, stages, first, first + band, B, POOL, wave_tokens=64, lanes=8,
        host_pool_blocks=HOST_POOL, state_slots=SLOTS,
    )  # fmt: skip


def loaded(stages: int, preset: str = PRESET) -> list[EmulatedEngine]:
    engines = [EmulatedEngine() for _ in range(stages)]
    for stage, engine in enumerate(engines):
        engine.load(plan_of(stage, stages, preset), lambda done, total: None)
    return engines


def tokens_of(count: int, seed: int = 1) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCABULARY, count)]


def hashes_of(tokens: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    packed = hash_blocks(HashScope("m", "l"), np.asarray(tokens, "<i4").tobytes(), B)
    return np.frombuffer(packed, "<u8")[::4].copy()


def row_of(
    tokens: Sequence[int],
    start: int,
    end: int,
    blocks: Sequence[int],
    sampling: Sampling | None = None,
    void: bool = False,
    state: StateWork | None = None,
    key: HoldKey = KEY,
) -> RowWork:
    """The row of a first and only stage; `run_wave` takes tokens and sampling away where they do not belong."""
    return RowWork(
        key, start, end - start, np.asarray(blocks, np.int32), hashes_of(tokens[:end]),
        np.asarray(tokens[start:end], np.int32), sampling, void, state=state,
    )  # fmt: skip


def on_stage(row: RowWork, stage: int, stages: int) -> RowWork:
    tokens = row.token_ids if stage == 0 else None
    sampling = row.sampling if stage == stages - 1 else None
    return replace(row, token_ids=tokens, sampling=sampling)


def wave_of(*rows: RowWork, ordinal: int = 1) -> WaveWork:
    return WaveWork(Formation(1), WaveOrdinal(ordinal), rows, b"c" * 16)


def run_wave(engines: Sequence[EmulatedEngine], rows: Sequence[RowWork], ordinal: int = 1) -> list[WaveOutcome]:
    """One wave through all stages."""
    outcomes: list[WaveOutcome] = []
    payload = None
    for stage, engine in enumerate(engines):
        wave = wave_of(*(on_stage(row, stage, len(engines)) for row in rows), ordinal=ordinal)
        outcome = engine.run(wave, payload)
        outcomes.append(outcome)
        if outcome.payload is not None:
            payload = engine.decode(engine.encode(outcome.payload), wave.tokens)
    return outcomes


def lot_of(direction: CopyDirection, device: Sequence[int], host: Sequence[int], number: int = 1) -> CopyLot:
    return CopyLot(number, direction, np.asarray(device, np.int32), np.asarray(host, np.int32))
