"""TorchEngine: executes one stage of a Hugging Face causal model on CPU or CUDA.

Owns the band's weights, the stage's memory and the order of work inside one wave. Owns no policy:
which block holds what, which rows run, and when, come with each wave. One executor thread per
daemon loads and runs (engine/base.py); its exactness is tested against the unsplit model. On CUDA a wave
has left the GPU when `run` returns or raises: what follows (links, copies, reuse of blocks) needs no event of it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from wavepp_proto.errors import EngineFault, NonFinite
from wavepp_proto.terms import Sampling
from wavepp_stage.engine.base import (
    CopyLot,
    EngineFacts,
    EnginePlan,
    Payload,
    RowWork,
    WaveOutcome,
    WaveWork,
    not_finite,
)
from wavepp_stage.engine.torch.attention import WaveContext
from wavepp_stage.engine.torch.batch import WaveBatch, check_wave, make_batch
from wavepp_stage.engine.torch.device import claim, device_of, first_line
from wavepp_stage.engine.torch.facts import load_config
from wavepp_stage.engine.torch.finiteness import Finiteness, Origin, origins, scrub
from wavepp_stage.engine.torch.memory import StageMemory, allocate, check_fit, check_slots
from wavepp_stage.engine.torch.model import Band, build_band, dtype_of, folder_of
from wavepp_stage.engine.torch.paged_cache import PagedCache
from wavepp_stage.engine.torch.recurrent_states import RecurrentStates
from wavepp_stage.engine.torch.rehearsal import rehearsal_wave
from wavepp_stage.engine.torch.sampler import sample_rows
from wavepp_stage.engine.torch.side_stream import SideStream
from wavepp_stage.engine.torch.weights import load_weights


def default_threads() -> int:
    """Intra-op threads when none are asked for: all cores but one, which is the event loop's share."""
    return max(1, min(torch.get_num_threads(), len(os.sched_getaffinity(0)) - 1))


class _Loaded:
    """A plan and what was made for it."""

    __slots__ = ("band", "memory", "names", "plan", "vocabulary")

    def __init__(self, plan: EnginePlan, band: Band, memory: StageMemory, names: tuple[str, ...]) -> None:
        self.plan = plan
        self.band = band
        self.memory = memory
        self.names = names
        self.vocabulary: int = band.model.config.vocab_size


class TorchEngine:
    """StageEngine on torch. Loading the same plan again keeps weights and cached blocks as they are."""

    name: ClassVar[str] = "torch"

    def __init__(self, *, device: str = "cpu", dtype: str = "float32", threads: int | None = None) -> None:
        """`device` cpu or cuda[:n]; `dtype` float32, bfloat16, or auto (the model's own); `threads` intra-op."""
        self._device = device_of(device)
        self._dtype_setting = dtype
        self._threads = threads
        self._loaded: _Loaded | None = None
        self._side = SideStream(self._device)
        """Of `encode` and `decode`."""
        self._lost = ""
        """Why the device answers this process no more."""

    # --- loading ---------------------------------------------------------------------------------

    def load(self, plan: EnginePlan, progress: Callable[[int, int], None]) -> EngineFacts:
        # Here and not in __init__: OpenMP keeps this number per thread, and this is the executor's.
        torch.set_num_threads(self._threads or default_threads())
        if self._lost:
            raise EngineFault(f"the device is lost to this process, start it again: {self._lost}", field="device",
                              value=str(self._device))  # fmt: skip
        claim(self._device)
        if plan.ranks > 1:
            raise EngineFault("engine torch has no tensor-parallel ranks", field="ranks", value=plan.ranks, limit=1)
        kept = self._loaded
        if kept is not None and _same_memory(kept.plan, plan):
            kept.plan = plan
            progress(len(kept.names), len(kept.names))
            return self._facts(kept)
        del kept
        self.close()
        config = load_config(plan.model)
        band = build_band(config, plan, dtype_of(self._dtype_setting, config))
        check_slots(plan, band)
        check_fit(plan, band, self._device)
        names = load_weights(band, folder_of(plan), self._device, progress)
        band.finish(self._device)
        self._loaded = _Loaded(plan, band, allocate(plan, band, self._device), names)
        if self._device.type == "cuda":
            self.rehearse()
        return self._facts(self._loaded)

    def rehearse(self) -> None:
        """Run the most demanding wave of the plan, on a cache that holds nothing yet: memory that is missing for
        activations fails the load, not a wave, and no wave waits for a kernel to be loaded."""
        loaded = self._need()
        wave = rehearsal_wave(loaded.plan, loaded.band)
        payload = None if loaded.plan.is_first else self._zeros(wave.tokens)
        try:
            self.run(wave, payload)
        except RuntimeError as error:
            self.close()
            raise EngineFault(f"no memory for a wave: {first_line(error)}", field="wave_tokens",
                              value=loaded.plan.wave_tokens) from error  # fmt: skip

    def _facts(self, loaded: _Loaded) -> EngineFacts:
        return EngineFacts(
            hidden=loaded.band.model.config.hidden_size,
            bytes_per_block=loaded.memory.cache.bytes_per_block,
            device=str(self._device),
            loaded_layers=tuple(range(loaded.plan.first_layer, loaded.plan.last_layer)),
            groups=loaded.memory.groups,
            bytes_per_state=loaded.memory.states.bytes_per_state,
        )

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Names of the stored tensors that the last load read, sorted."""
        return self._need().names

    @property
    def band(self) -> Band:
        """The loaded modules, for inspection."""
        return self._need().band

    @property
    def cache(self) -> PagedCache:
        """The paged cache, for inspection and hand-off."""
        return self._need().memory.cache

    @property
    def states(self) -> RecurrentStates:
        """The recurrent states, for inspection."""
        return self._need().memory.states

    def _need(self) -> _Loaded:
        if self._loaded is None:
            raise EngineFault("the engine is not loaded", field="engine", value="torch")
        return self._loaded

    # --- waves -----------------------------------------------------------------------------------

    @torch.inference_mode()
    def run(self, wave: WaveWork, payload: Payload | None) -> WaveOutcome:
        loaded = self._need()
        check_wave(wave, loaded.plan, recurrent=bool(loaded.band.recurrent_layers))
        try:
            return self._compute(loaded, wave, payload)
        finally:
            # After an error too: what was launched still writes blocks that others are about to get.
            self._leave_device()

    def _compute(self, loaded: _Loaded, wave: WaveWork, payload: Payload | None) -> WaveOutcome:
        memory, recurrent = loaded.memory, bool(loaded.band.recurrent_layers)
        batch = make_batch(wave, loaded.plan.block_tokens, self._device, recurrent=recurrent)
        if batch is None:
            return WaveOutcome(None if loaded.plan.is_last else self._zeros(wave.tokens))
        finiteness = Finiteness()
        context = WaveContext(batch, memory.cache, memory.mask, memory.states, finiteness)
        hidden = loaded.band.run_layers(self._enter(loaded, wave, batch, payload), context)
        finals = _final_rows(wave, batch) if loaded.plan.is_last else []
        logits = self._logits(loaded, hidden, [last for last, _, _ in finals])
        finiteness.note(hidden, logits)
        faults: dict[int, str | NonFinite] = {}
        if finiteness.doubtful():
            bad_logits = {finals[line][1] for line in (~logits.isfinite().all(-1)).nonzero().flatten().tolist()}
            faults |= self._not_finite(loaded, batch, self._enter(loaded, wave, batch, payload), hidden, bad_logits)
            scrub(batch, memory.cache, memory.states, faults, hidden)
        if not loaded.plan.is_last:
            return WaveOutcome(self._spread(hidden, batch, wave.tokens), faults=faults)
        sound = [line for line, (_, index, _) in enumerate(finals) if index not in faults]
        if not sound:
            return WaveOutcome(None, faults=faults)
        chosen = logits if len(sound) == len(finals) else logits[sound]
        return WaveOutcome(None, sample_rows(chosen, [finals[line][1:] for line in sound]), faults)

    def _enter(self, loaded: _Loaded, wave: WaveWork, batch: WaveBatch, payload: Payload | None) -> Tensor:
        """What enters the band's layers, [live tokens, hidden]."""
        if loaded.plan.is_first:
            return loaded.band.embed(self._token_ids(wave, loaded.vocabulary))
        hidden = self._check_payload(payload, wave.tokens)
        return hidden if batch.live is None else hidden.index_select(0, batch.live)

    def _logits(self, loaded: _Loaded, hidden: Tensor, lasts: list[int]) -> Tensor:
        """Of these batch rows, [n, vocabulary]; of none on a stage without a head."""
        if not lasts:
            return hidden.new_empty(0, loaded.vocabulary)
        return loaded.band.logits(hidden.index_select(0, torch.tensor(lasts, device=self._device)))

    def _not_finite(
        self, loaded: _Loaded, batch: WaveBatch, entered: Tensor, hidden: Tensor, bad_logits: set[int]
    ) -> dict[int, NonFinite]:
        """Row index to error of the rows that computed NaN or infinity, if there are any."""
        plan, memory = loaded.plan, loaded.memory
        layers = range(plan.first_layer, plan.last_layer)
        found = dict.fromkeys(sorted(bad_logits), Origin(None, "logits"))
        found |= origins(batch, memory.cache, memory.states, layers, entered, hidden)
        return {index: not_finite(plan, index, origin.what, origin.layer) for index, origin in sorted(found.items())}

    def _leave_device(self) -> None:
        """Wait for the wave: the report's compute time, the link and the copies count on it."""
        if self._device.type != "cuda":
            return
        try:
            torch.cuda.current_stream(self._device).synchronize()
        except RuntimeError as error:  # only a fault of a kernel: CUDA refuses this process from then on
            self._lost = first_line(error)
            raise

    def _token_ids(self, wave: WaveWork, vocabulary: int) -> Tensor:
        parts = [_row_tokens(index, row) for index, row in enumerate(wave.rows) if not row.void]
        ids = np.concatenate(parts).astype(np.int64)
        if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
            raise EngineFault(
                "token id outside the vocabulary", field="token_ids", value=int(ids.max()), limit=vocabulary
            )
        return torch.from_numpy(ids).to(self._device)

    def _check_payload(self, payload: Payload | None, tokens: int) -> Tensor:
        expected = (tokens, self._need().band.model.config.hidden_size)
        if not isinstance(payload, Tensor) or tuple(payload.shape) != expected:
            shape = tuple(payload.shape) if isinstance(payload, Tensor) else type(payload).__name__
            raise EngineFault("payload does not fit the wave", field="payload", value=str(shape), limit=str(expected))
        return payload

    def _zeros(self, tokens: int) -> Tensor:
        return self.receive_buffer(tokens).zero_()

    def _spread(self, hidden: Tensor, batch: WaveBatch, tokens: int) -> Tensor:
        """Live rows back at their payload rows; void rows are zero."""
        if batch.live is None:
            return hidden
        return self._zeros(tokens).index_copy_(0, batch.live, hidden)

    # --- tiers -----------------------------------------------------------------------------------

    @torch.inference_mode()
    def copy(self, lot: CopyLot) -> None:
        host = self._need().memory.host
        if host is None:
            raise EngineFault("the plan has no host tier", field="host_pool_blocks", value=0)
        host.copy(lot)

    # --- payloads --------------------------------------------------------------------------------

    def receive_buffer(self, tokens: int) -> Tensor:
        model = self._need().band.model
        return torch.empty(tokens, model.config.hidden_size, dtype=model.dtype, device=self._device)

    def encode(self, payload: Payload) -> bytes:
        tensor: Tensor = payload
        with self._side.lock:
            host = self._side.to_host(tensor.detach()).contiguous()
            return host.view(torch.uint8).numpy().tobytes()

    def decode(self, data: bytes, tokens: int) -> Tensor:
        with self._side.on():
            buffer = self.receive_buffer(tokens)
        if len(data) != buffer.nbytes:
            raise ValueError(f"payload of {tokens} rows has {buffer.nbytes} bytes, got {len(data)}")
        raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return self._side.move(raw.view(buffer.dtype).view(buffer.shape), buffer)

    def close(self) -> None:
        self._loaded = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def _same_memory(old: EnginePlan, new: EnginePlan) -> bool:
    """Only the budgets differ: weights and cached blocks stay valid."""
    return replace(old, wave_tokens=new.wave_tokens, lanes=new.lanes) == new


def _final_rows(wave: WaveWork, batch: WaveBatch) -> list[tuple[int, int, Sampling]]:
    """(last batch row, row index, sampling) of every row that ends its prompt here."""
    ends = [(span.end - 1, span.index, wave.rows[span.index].sampling) for span in batch.spans]
    return [(last, index, sampling) for last, index, sampling in ends if sampling is not None]


def _row_tokens(index: int, row: RowWork) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    if row.token_ids is None or len(row.token_ids) != row.length:
        found = "none" if row.token_ids is None else str(len(row.token_ids))
        raise EngineFault("the first stage needs the chunk's token ids", field=f"rows[{index}].token_ids",
                          value=found, limit=row.length)  # fmt: skip
    return row.token_ids
