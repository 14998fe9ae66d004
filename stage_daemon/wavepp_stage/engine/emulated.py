"""A stage engine without tensors: it takes a device's time and proves what it read and wrote.

Owns the modelled time of a wave and the order of checks; the numbers are `emulated_model.py`'s, the
pool is `emulated_cache.py`'s. A protocol bug (a block read before it was written, reused too early, or
belonging to another prefix) shows as a fault of the row, with its cause, or as another first token than
`expected_first_token` says. Driven by the executor thread; only `close` may come from another.

A payload row is (mix, state) of one token: the next stage checks both against its own cache.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import ClassVar

import numpy as np

from wavepp_proto.errors import EngineFault
from wavepp_proto.terms import RowResult, Sampling
from wavepp_stage.engine import emulated_model as model
from wavepp_stage.engine.base import EngineFacts, EnginePlan, RowWork, WaveOutcome, WaveWork
from wavepp_stage.engine.emulated_cache import POISON, WORD_BYTES, CanaryCache, RowRefused
from wavepp_stage.engine.emulated_model import Words, emulated_model_facts, expected_first_token

__all__ = ["POISON", "EmulatedEngine", "emulated_model_facts", "expected_first_token"]

PAYLOAD_WORDS = 2
CATCH_UP_S = 0.001
"""A wave that starts within this of the previous one's modelled end counts as back to back, so that
late timers do not add up."""

Gate = Callable[[WaveWork], None]


class EmulatedEngine:
    """`StageEngine` on uint64 numpy arrays. Costs and vocabulary not given come from the plan's preset."""

    name: ClassVar[str] = model.NAME

    def __init__(
        self,
        seconds_per_token: float | None = None,
        seconds_per_wave: float | None = None,
        vocabulary: int | None = None,
        gate: Gate | None = None,
    ) -> None:
        """`gate`, for tests, is called with each wave before it is computed, and may block."""
        self._given_costs = (seconds_per_token, seconds_per_wave)
        self._given_vocabulary = vocabulary
        self._gate = gate
        self._plan: EnginePlan | None = None
        self._cache: CanaryCache | None = None
        self._vocabulary = 0
        self._costs = (0.0, 0.0)
        self._modelled_end = 0.0
        self._closed = threading.Event()

    def load(self, plan: EnginePlan, progress: Callable[[int, int], None]) -> EngineFacts:
        """Allocate the pool, every tag poisoned. Raises EngineFault naming the field that cannot be served."""
        preset = model.parse_preset(plan.model)
        _check_plan(plan, preset.layers)
        layers = tuple(range(plan.first_layer, plan.last_layer))
        progress(0, len(layers))
        per_token, per_wave = self._given_costs
        self._costs = (
            preset.token_us / 1e6 if per_token is None else per_token,
            preset.wave_us / 1e6 if per_wave is None else per_wave,
        )
        self._vocabulary = preset.vocabulary if self._given_vocabulary is None else self._given_vocabulary
        self._plan, self._cache = plan, CanaryCache(plan.pool_blocks, plan.block_tokens, plan.stage)
        self._closed.clear()
        progress(len(layers), len(layers))
        return EngineFacts(
            needs_tokens=False,
            hidden=0,
            bytes_per_block=(plan.block_tokens + 1) * WORD_BYTES,
            device="emulated",
            loaded_layers=layers,
        )

    def run(self, wave: WaveWork, payload: Words | None) -> WaveOutcome:
        """Compute one wave and take its modelled time.

        Raises EngineFault when nothing is loaded or the payload does not fit the wave.
        """
        plan, cache = self._loaded()
        self._check_payload(plan, wave, payload)
        if self._gate is not None:
            self._gate(wave)
        started = time.monotonic()
        out = np.zeros((wave.tokens, PAYLOAD_WORDS), np.uint64)
        results: list[RowResult] = []
        faults: dict[int, str] = {}
        computed = at = 0
        for index, row in enumerate(wave.rows):
            rows = slice(at, at + row.length)
            at += row.length
            if row.void:
                continue
            try:
                out[rows] = _compute(cache, row, None if payload is None else payload[rows])
            except RowRefused as fault:
                faults[index] = str(fault)
                continue
            computed += row.length
            if plan.is_last and row.sampling is not None:
                results.append(self._answer(index, int(out[at - 1, 1]), row.sampling))
        self._take_time(started, computed)
        return WaveOutcome(None if plan.is_last else out, tuple(results), faults)

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
        """Free the pool and end a modelled wait at once. Safe to call twice."""
        self._closed.set()
        self._plan = self._cache = None

    def _loaded(self) -> tuple[EnginePlan, CanaryCache]:
        plan, cache = self._plan, self._cache
        if plan is None or cache is None:
            raise EngineFault("the engine is not loaded", field="plan")
        return plan, cache

    def _check_payload(self, plan: EnginePlan, wave: WaveWork, payload: Words | None) -> None:
        if plan.is_first:
            if payload is not None:
                raise EngineFault("the first stage takes no payload", field="payload", value=str(payload.shape))
        elif payload is None or payload.shape != (wave.tokens, PAYLOAD_WORDS):
            came = "none" if payload is None else str(payload.shape)
            expected = str((wave.tokens, PAYLOAD_WORDS))
            raise EngineFault(f"payload {came} instead of {expected}", field="payload", value=came, limit=expected)

    def _answer(self, index: int, state: int, sampling: Sampling) -> RowResult:
        token = model.choose(state, self._vocabulary, sampling)
        if not sampling.top_logprobs and not sampling.full_logits:
            return RowResult(index, token)
        row = model.logits(state, self._vocabulary)
        packed = row.astype("<f4").tobytes() if sampling.full_logits else b""
        return RowResult(index, token, model.top_logprobs(row, sampling.top_logprobs), packed)

    def _take_time(self, started: float, tokens: int) -> None:
        """Sleep until the modelled end of the wave that began at `started`; costs of 0 do not sleep."""
        per_token, per_wave = self._costs
        cost = per_wave + per_token * tokens
        if cost <= 0.0:
            return
        begun = self._modelled_end if started - self._modelled_end <= CATCH_UP_S else started
        self._modelled_end = begun + cost
        # A wait that is interrupted only by close(): it holds no interpreter lock and burns no CPU.
        self._closed.wait(max(0.0, self._modelled_end - time.monotonic()))


def _check_plan(plan: EnginePlan, layers: int) -> None:
    if not 0 <= plan.first_layer < plan.last_layer <= layers:
        band = f"[{plan.first_layer}, {plan.last_layer})"
        raise EngineFault(f"band {band} of a model with {layers} layers", field="last_layer", value=band, limit=layers)
    for field, value in (("block_tokens", plan.block_tokens), ("pool_blocks", plan.pool_blocks)):
        if value < 1:
            raise EngineFault(f"{field} is {value}, at least 1", field=field, value=value, limit=1)


def _compute(cache: CanaryCache, row: RowWork, payload: Words | None) -> Words:
    """Check what the row reads, write its cells and tags; returns its payload rows, [length, 2]."""
    cache.check_table(row)
    cache.check_canaries(row)
    if payload is None:
        if row.token_ids is None or len(row.token_ids) != row.length:
            raise RowRefused(f"no token ids for [{row.start}, {row.start + row.length})")
        mixed = model.mix(row.token_ids, row.start)
    else:
        mixed = payload[:, 0]
    states = model.continue_state(cache.state_before(row), mixed)
    if payload is not None:
        _check_states(row, states, payload[:, 1])
    cache.write(row, states)
    return np.stack((mixed, states), axis=1)


def _check_states(row: RowWork, states: Words, upstream: Words) -> None:
    """This stage's own cache and the previous stage's must be of the same prefix."""
    wrong = np.flatnonzero(states != upstream)
    if wrong.size:
        position = row.start + int(wrong[0])
        raise RowRefused(
            f"state at token {position} differs from the previous stage's: this cache is of another prefix"
        )
