"""A stage engine without tensors: it takes a device's time and proves what it read and wrote.

Owns what is asked of the modelled devices; how long work takes and when it ends is `emulated_device.py`'s, the
numbers are `emulated_model.py`'s, what a stage stores and checks is `emulated_band.py`'s. A protocol bug (a block
or state read before it was written, reused too early, or belonging to another prefix) shows as a fault of the row,
with its cause, or as another first token than `expected_first_token` says. `run` comes from the executor thread,
`copy` from the copy thread, `close` from any.

The model is one stream of waves and one copy engine for each stage, and a wire to the next that holds no stream up:
the sending link delivers late. Every token's arithmetic is done and every canary checked, inside the modelled time:
0.2 ms for a wave of 16,384 tokens behind 1M cached ones. A cache is preloaded by sending its prompts once, through
the real path; nothing writes blocks behind the core's back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from wavepp_proto.errors import EngineFault, NonFinite
from wavepp_proto.profile import Chunk
from wavepp_proto.terms import CacheGroup, RowResult, Sampling
from wavepp_stage.engine import emulated_model as model
from wavepp_stage.engine.base import CopyLot, EngineFacts, EnginePlan, WaveOutcome, WaveWork, not_finite
from wavepp_stage.engine.emulated_band import PAYLOAD_WORDS, EmulatedBand
from wavepp_stage.engine.emulated_cache import POISON, WORD_BYTES, RowNotFinite, RowRefused
from wavepp_stage.engine.emulated_device import Pace, Stream, Wire
from wavepp_stage.engine.emulated_model import Words, emulated_model_facts, emulated_traits, expected_first_token

__all__ = ["POISON", "EmulatedEngine", "emulated_model_facts", "emulated_traits", "expected_first_token"]


@dataclass(frozen=True, slots=True)
class _Loaded:
    plan: EnginePlan
    band: EmulatedBand
    vocabulary: int
    pace: Pace
    wire: Wire
    nan_layer: int
    hang: Path | None
    """Its presence is the wish that the wave at hand never ends."""


class EmulatedEngine:
    """`StageEngine` on uint64 numpy arrays. Costs and vocabulary not given come from the plan's preset."""

    name: ClassVar[str] = model.NAME

    def __init__(
        self,
        seconds_per_token: float | None = None,
        seconds_per_wave: float | None = None,
        vocabulary: int | None = None,
        gate: Callable[[WaveWork], None] | None = None,
        seconds_per_copy: float | None = None,
        copy_gate: Callable[[CopyLot], None] | None = None,
    ) -> None:
        """The gates, for tests, are called with each wave before it is computed and with each lot under way,
        and may block. `seconds_per_copy` is per block."""
        given = {"b_us": seconds_per_token, "c_us": seconds_per_wave}
        self._given_costs = {name: value * 1e6 for name, value in given.items() if value is not None}
        self._given_copy_us = None if seconds_per_copy is None else seconds_per_copy * 1e6
        self._given_vocabulary = vocabulary
        self._gate, self._copy_gate = gate, copy_gate
        self._now: _Loaded | None = None
        self._closed = threading.Event()
        self._computing, self._copying = Stream(self._closed), Stream(self._closed)

    def load(self, plan: EnginePlan, progress: Callable[[int, int], None]) -> EngineFacts:
        """Allocate pools and slots, every tag poisoned. Raises EngineFault naming the field that cannot be served."""
        preset = model.parse_preset(plan.model)
        groups = model.emulated_model_facts(plan.model).groups_of(plan.first_layer, plan.last_layer)
        _check_plan(plan, preset.layers, groups)
        layers = tuple(range(plan.first_layer, plan.last_layer))
        progress(0, len(layers))
        pace = preset.pace(plan.stage, plan.stages)
        copy_us = pace.copy_us if self._given_copy_us is None else self._given_copy_us
        pace = replace(pace, costs=replace(pace.costs, **self._given_costs), copy_us=copy_us)
        band = EmulatedBand(
            groups,
            plan.pool_blocks,
            plan.block_tokens,
            plan.place,
            plan.host_pool_blocks,
            plan.state_slots,
            preset.nan_token_of(plan.first_layer, plan.last_layer),
        )
        vocabulary = preset.vocabulary if self._given_vocabulary is None else self._given_vocabulary
        hang = Path(f"{preset.hang}.{plan.stage}") if preset.hang else None
        self._now = _Loaded(plan, band, vocabulary, pace, Wire(pace), preset.nan_layer, hang)
        self._closed.clear()
        progress(len(layers), len(layers))
        return EngineFacts(
            hidden=0,
            bytes_per_block=band.bytes_per_block,
            device="emulated",
            loaded_layers=layers,
            groups=groups,
            bytes_per_state=band.bytes_per_state,
            wave_allowance_s=_longest_s(pace, plan.wave_tokens, preset.window),
        )

    def run(self, wave: WaveWork, payload: Words | None) -> WaveOutcome:
        """Compute one wave and take its modelled time.

        Raises EngineFault when nothing is loaded or the payload does not fit the wave.
        """
        now = self._loaded()
        _check_payload(now.plan, wave, payload)
        if self._gate is not None:
            self._gate(wave)
        if now.hang is not None and _taken(now.hang):
            self._closed.wait()
        started = time.monotonic()
        out = np.zeros((wave.tokens, PAYLOAD_WORDS), np.uint64)
        results: list[RowResult] = []
        faults: dict[int, str | NonFinite] = {}
        computed: list[Chunk] = []
        at = 0
        for index, row in enumerate(wave.rows):
            rows = slice(at, at + row.length)
            at += row.length
            if row.void:
                continue
            try:
                out[rows] = now.band.compute(row, None if payload is None else payload[rows])
            except RowNotFinite:
                faults[index] = not_finite(now.plan, index, "values", now.nan_layer)
                continue
            except RowRefused as fault:
                faults[index] = str(fault)
                continue
            computed.append((row.start, row.length))
            if now.plan.is_last and row.sampling is not None:
                results.append(_answer(index, int(out[at - 1, 1]), row.sampling, now.vocabulary))
        self._computing.take(started, now.pace.seconds(now.pace.costs.wave_us(computed)), wave.ready_at)
        return WaveOutcome(None if now.plan.is_last else out, tuple(results), faults)

    def copy(self, lot: CopyLot) -> None:
        """Move the lot's blocks, taking their modelled time; its targets are unreadable until the end.

        Raises EngineFault for a lot that does not fit the pools or moves an unwritten block, and when close() came
        first: then nothing was moved."""
        now = self._loaded()
        started = time.monotonic()
        now.band.begin_copy(lot)
        if self._copy_gate is not None:
            self._copy_gate(lot)
        seconds = now.pace.seconds(now.pace.copy_us * len(lot)) if now.band.bytes_per_block else 0.0
        if not self._copying.take(started, seconds):
            raise EngineFault(f"closed while lot {lot.number} was copied", field="lot", value=lot.number)
        now.band.end_copy(lot)

    def arrival(self, tokens: int) -> float:
        """When a wave that is sent now is at the next stage (monotonic seconds), for links that deliver then; 0 if the
        link itself is all there is."""
        return self._loaded().wire.arrival(time.monotonic(), tokens)

    def receive_buffer(self, tokens: int) -> Words:
        return np.empty((tokens, PAYLOAD_WORDS), np.uint64)

    def encode(self, payload: Words) -> bytes:
        return payload.astype("<u8", copy=False).tobytes()

    def decode(self, data: bytes, tokens: int) -> Words:
        """Raises ValueError when `data` is not `tokens` rows."""
        expected = tokens * PAYLOAD_WORDS * WORD_BYTES
        if len(data) != expected:
            raise ValueError(f"payload of {tokens} tokens has {len(data)} bytes instead of {expected}")
        return np.frombuffer(data, "<u8").astype(np.uint64, copy=False).reshape(tokens, PAYLOAD_WORDS)

    def close(self) -> None:
        """Free the pools and end modelled waits at once. Safe to call twice."""
        self._closed.set()
        self._now = None

    def _loaded(self) -> _Loaded:
        now = self._now
        if now is None:
            raise EngineFault("the engine is not loaded", field="plan")
        return now


def _taken(wish: Path) -> bool:
    """Whether the file was there; whoever takes it away hangs, and its successor does not."""
    try:
        wish.unlink()
    except FileNotFoundError:
        return False
    return True


def _longest_s(pace: Pace, wave_tokens: int, window: int) -> float:
    """Modelled time of the longest wave: full, and at the end of the longest prompt."""
    tokens = min(wave_tokens, window)
    return pace.seconds(pace.costs.wave_us([(window - tokens, tokens)]))


def _answer(index: int, state: int, sampling: Sampling, vocabulary: int) -> RowResult:
    token = model.choose(state, vocabulary, sampling)
    if not sampling.top_logprobs and not sampling.full_logits:
        return RowResult(index, token)
    row = model.logits(state, vocabulary)
    packed = row.astype("<f4").tobytes() if sampling.full_logits else b""
    return RowResult(index, token, model.top_logprobs(row, sampling.top_logprobs), packed)


def _check_payload(plan: EnginePlan, wave: WaveWork, payload: Words | None) -> None:
    if plan.is_first:
        if payload is not None:
            raise EngineFault("the first stage takes no payload", field="payload", value=str(payload.shape))
    elif payload is None or payload.shape != (wave.tokens, PAYLOAD_WORDS):
        came = "none" if payload is None else str(payload.shape)
        expected = str((wave.tokens, PAYLOAD_WORDS))
        raise EngineFault(f"payload {came} instead of {expected}", field="payload", value=came, limit=expected)


def _check_plan(plan: EnginePlan, layers: int, groups: tuple[CacheGroup, ...]) -> None:
    if not 0 <= plan.first_layer < plan.last_layer <= layers:
        band = f"[{plan.first_layer}, {plan.last_layer})"
        raise EngineFault(f"band {band} of a model with {layers} layers", field="last_layer", value=band, limit=layers)
    least = (
        ("block_tokens", plan.block_tokens, 1),
        ("pool_blocks", plan.pool_blocks, 1),
        ("host_pool_blocks", plan.host_pool_blocks, 0),
        ("state_slots", plan.state_slots, int(CacheGroup.RECURRENT in groups)),
    )
    for field, value, limit in least:
        if value < limit:
            raise EngineFault(f"{field} is {value}, at least {limit}", field=field, value=value, limit=limit)
