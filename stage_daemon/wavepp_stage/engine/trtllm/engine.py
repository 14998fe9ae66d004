"""TrtllmEngine: executes one stage's band with TensorRT-LLM's model engine, driven wave by wave from outside.

Owns the order of one wave: agree among ranks, set each chunk, run the batch through the payload port, advance, sample.
Does not own the cache (`cache.py`, on the same desk) or the load. A wave that fails fences everything until the stages
load again, all together. One executor thread calls every method. Never executed against real TensorRT-LLM.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from wavepp_proto.errors import EngineFault, FormationEnded, NonFinite
from wavepp_proto.terms import RowResult
from wavepp_stage.engine.base import (
    CopyLot,
    EngineFacts,
    EnginePlan,
    EngineTraits,
    Payload,
    RowWork,
    WaveOutcome,
    WaveWork,
    not_finite,
)
from wavepp_stage.engine.torch.finiteness import Finiteness
from wavepp_stage.engine.torch.sampler import sample_rows
from wavepp_stage.engine.trtllm import compat
from wavepp_stage.engine.trtllm.contract import preflight
from wavepp_stage.engine.trtllm.desk import Desk
from wavepp_stage.engine.trtllm.facts import AUTO, PARTS
from wavepp_stage.engine.trtllm.load import Loaded, check_dtype, device_of, load_stage, loaded_facts
from wavepp_stage.engine.trtllm.pp_comm import payload_rows

ELSEWHERE = "another rank of this stage cannot run it"


@dataclass(frozen=True, slots=True)
class _Live:
    """A row that is computed."""

    index: int
    row: RowWork
    first: int
    """Its first payload row."""
    request: compat.Request

    @property
    def rows(self) -> slice:
        """Its payload rows."""
        return slice(self.first, self.first + self.row.length)


class TrtllmEngine:
    """StageEngine on TensorRT-LLM's PyTorch backend."""

    name: ClassVar[str] = "trtllm"
    traits: ClassVar[EngineTraits] = EngineTraits(
        cache_thread="engine", needs_tokens=True, eager_escrow=True, collective=True
    )

    def __init__(self, *, device: str = "cuda:0", dtype: str = AUTO) -> None:
        """`device` cuda:0 (cpu on a stand-in), `dtype` auto (the model's own), float16 or bfloat16 (or float32 on a
        CPU). Raises EngineFault that lists all that is missing, or names which of these cannot be used."""
        compat.prepare_process()
        self.version = preflight()
        self._device = device_of(device)
        self._dtype = check_dtype(dtype, self._device)
        self._loaded: Loaded | None = None
        self._fault = ""

    @property
    def desk(self) -> Desk | None:
        """What the cache works on; None without a load."""
        return self._loaded.desk if self._loaded is not None else None

    @property
    def fenced(self) -> str:
        """Why nothing runs until the next load; empty while all is well."""
        return self._loaded.desk.fault if self._loaded is not None else self._fault

    # --- loading ----------------------------------------------------------------------------------

    def load(self, plan: EnginePlan, progress: Callable[[int, int], None]) -> EngineFacts:
        """Always from the beginning: whoever calls this knows that the group is another one. Cached blocks are gone."""
        self.close()
        try:
            self._loaded = load_stage(plan, self._device, self._dtype, progress)
        except EngineFault as error:
            self._fault = error.message
            raise
        self._fault = ""
        return loaded_facts(self._loaded, self._device)

    def close(self) -> None:
        loaded, self._loaded = self._loaded, None
        if loaded is None:
            return
        try:
            loaded.close()
        finally:
            # An executor is full of cycles, and its weights must be gone before others are loaded.
            del loaded
            gc.collect()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    # --- waves ------------------------------------------------------------------------------------

    @torch.inference_mode()
    def run(self, wave: WaveWork, payload: Payload | None) -> WaveOutcome:
        loaded = self._need()
        try:
            return self._run(loaded, wave, payload)
        except FormationEnded:  # before anything was asked of TensorRT-LLM, on any rank
            raise
        except Exception as error:
            # Whatever it was, what its layers and its peers have done by now is not known.
            loaded.desk.fence(f"wave {wave.ordinal} failed: {type(error).__name__}: {error}")
            raise
        finally:
            loaded.port.drop()

    def _need(self) -> Loaded:
        if self._loaded is None or self._loaded.desk.fault:
            raise EngineFault(
                f"the engine is not loaded: {self.fenced or 'no join has loaded it'}", field="engine", value="trtllm"
            )
        return self._loaded

    def _run(self, loaded: Loaded, wave: WaveWork, payload: Payload | None) -> WaveOutcome:
        plan = loaded.plan
        _check_wave(wave, plan)
        own = sum(row.void << index for index, row in enumerate(wave.rows))
        void = loaded.meeting.void_anywhere(wave, own)
        faults: dict[int, str | NonFinite] = {
            index: ELSEWHERE for index in range(len(wave.rows)) if (void & ~own) >> index & 1
        }
        source = None if plan.is_first else self._check_payload(loaded, payload, wave.tokens)
        live = _live_rows(loaded.desk, wave, void)
        with compat.on_stream(loaded.executor):
            target = None if plan.is_last else self.receive_buffer(wave.tokens).zero_()
            results, bad = self._forward(loaded, live, source, target) if live else ((), {})
            if self._device.type == "cuda":
                # The report's compute time, a link on another stream and the next admission all need the work done.
                torch.cuda.current_stream(self._device).synchronize()
        for entry in live:
            entry.request.move_to_next_context_chunk()
        return WaveOutcome(target, results, {**faults, **bad})

    def _forward(
        self, loaded: Loaded, live: list[_Live], source: Tensor | None, target: Tensor | None
    ) -> tuple[tuple[RowResult, ...], dict[int, NonFinite]]:
        """Results, and the rows that are not finite. No rank asks the others about those: behind an all-reduce every
        rank has the same values."""
        batch = compat.make_batch([entry.request for entry in live])
        order = _batch_order(batch, live)
        loaded.port.begin(
            payload_rows([(entry.first, entry.row.length) for entry in order], self._device), source, target
        )
        logits = compat.forward(loaded.executor, batch)
        loaded.port.end()
        # A vocabulary that was padded for tensor parallelism ends where the model's does.
        lines = logits[:, : loaded.vocabulary] if loaded.plan.is_last else None
        bad = _not_finite(loaded.plan, order, source, target, lines)
        for entry in order:
            if target is not None and entry.index in bad:
                target[entry.rows] = 0
        return (() if lines is None else _sample(lines, order, bad)), bad

    def _check_payload(self, loaded: Loaded, payload: Payload | None, tokens: int) -> Tensor:
        expected = (tokens, PARTS * loaded.hidden)
        if not isinstance(payload, Tensor) or tuple(payload.shape) != expected:
            shape = tuple(payload.shape) if isinstance(payload, Tensor) else type(payload).__name__
            raise EngineFault("payload does not fit the wave", field="payload", value=str(shape), limit=str(expected))
        return payload

    # --- tiers and payloads -----------------------------------------------------------------------

    def copy(self, lot: CopyLot) -> None:
        raise EngineFault("TensorRT-LLM moves its own blocks", field="lot", value=lot.number)

    def receive_buffer(self, tokens: int) -> Tensor:
        loaded = self._need()
        return torch.empty(tokens, PARTS * loaded.hidden, dtype=loaded.dtype, device=self._device)

    def encode(self, payload: Payload) -> bytes:
        tensor: Tensor = payload
        return tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()

    def decode(self, data: bytes, tokens: int) -> Tensor:
        buffer = self.receive_buffer(tokens)
        if len(data) != buffer.nbytes:
            raise ValueError(f"payload of {tokens} rows has {buffer.nbytes} bytes, got {len(data)}")
        return buffer.copy_(torch.frombuffer(bytearray(data), dtype=buffer.dtype).view(buffer.shape))


def _check_wave(wave: WaveWork, plan: EnginePlan) -> None:
    """Raises EngineFault when the wave breaks the plan (a bug upstream: the formation ends)."""
    if not 0 < wave.tokens <= plan.wave_tokens:
        raise EngineFault("wave tokens outside the plan", field="tokens", value=wave.tokens, limit=plan.wave_tokens)
    if len(wave.rows) > plan.lanes:
        raise EngineFault("more rows than lanes", field="rows", value=len(wave.rows), limit=plan.lanes)


def _live_rows(desk: Desk, wave: WaveWork, void: int) -> list[_Live]:
    """Rows to compute, each request set to its chunk; a void row is left out of the batch and touches no page."""
    live, first = [], 0
    for index, row in enumerate(wave.rows):
        if not void >> index & 1:
            live.append(_Live(index, row, first, _set_chunk(desk, index, row)))
        first += row.length
    return live


def _set_chunk(desk: Desk, index: int, row: RowWork) -> compat.Request:
    request = desk.requests.get(row.key)
    if request is None:
        raise EngineFault("the row's sequence is not here", field=f"rows[{index}].key", value=row.key.request_id)
    at, end = request.context_current_position, row.start + row.length
    if row.start != at or row.length < 1 or end > request.prompt_len:
        raise EngineFault("the chunk does not continue its sequence", field=f"rows[{index}]",
                          value=f"[{row.start}, +{row.length})", limit=f"[{at}, {request.prompt_len})")  # fmt: skip
    if end < request.prompt_len and end % desk.block_tokens:
        raise EngineFault("a chunk within a prompt ends on a block", field=f"rows[{index}]", value=end,
                          limit=desk.block_tokens)  # fmt: skip
    request.context_chunk_size = row.length
    return request


def _batch_order(batch: compat.Batch, live: list[_Live]) -> list[_Live]:
    """Rows as the batch runs them: it puts final chunks last."""
    by_request = {entry.request.py_request_id: entry for entry in live}
    return [by_request[request.py_request_id] for request in batch.context_requests]


def _not_finite(
    plan: EnginePlan, order: list[_Live], source: Tensor | None, target: Tensor | None, logits: Tensor | None
) -> dict[int, NonFinite]:
    """Rows with NaN or infinity in what came, what leaves, or their logits. The pages are TensorRT-LLM's own: no look
    at what lies there, which is not committed where any of these is bad."""
    finiteness = Finiteness()
    finiteness.note(*(tensor for tensor in (source, target, logits) if tensor is not None))
    if not finiteness.doubtful():
        return {}
    found: dict[int, NonFinite] = {}
    for line, entry in enumerate(order):
        parts = (
            ("received activations", source, entry.rows),
            ("activations", target, entry.rows),
            ("logits", logits, slice(line, line + 1)),
        )
        for what, tensor, rows in parts:
            if tensor is not None and entry.index not in found and not bool(tensor[rows].isfinite().all()):
                found[entry.index] = not_finite(plan, entry.index, what)
    return found


def _sample(logits: Tensor, order: list[_Live], bad: Container[int]) -> tuple[RowResult, ...]:
    """First tokens of the rows that end their prompts and are not `bad`, from one line of logits for each row of the
    batch."""
    if logits.shape[0] != len(order):
        raise EngineFault("not one line of logits a row", field="logits", value=logits.shape[0], limit=len(order))
    final = [
        (line, entry.index, entry.row.sampling)
        for line, entry in enumerate(order)
        if entry.row.sampling is not None and entry.index not in bad
    ]
    if not final:
        return ()
    lines = torch.tensor([line for line, _, _ in final], device=logits.device)
    chosen = logits.index_select(0, lines).float()
    return sample_rows(chosen, [(index, sampling) for _, index, sampling in final])
