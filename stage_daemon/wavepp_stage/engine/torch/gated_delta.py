"""Gated DeltaNet (Qwen3-Next's linear attention) over all rows of a wave, from and to state slots.

Owns the mixer's forward: projections, convolution, gates and norm run once over the whole wave; only
the delta rule's scan is per row, because each row goes on from its own state. Modules, parameters and
the scan are transformers' own. Imported by `model.py` for model folders that have such layers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextGatedDeltaNet,
    causal_conv1d_fn,
    torch_chunk_gated_delta_rule,
)

from wavepp_stage.engine.torch.attention import WaveContext
from wavepp_stage.engine.torch.batch import WaveBatch
from wavepp_stage.engine.torch.recurrent_states import RecurrentStates
from wavepp_stage.engine.torch.state_plan import Scan

_Base: Any = Qwen3NextGatedDeltaNet  # its methods carry no types


class SlottedGatedDeltaNet(_Base):  # type: ignore[misc]
    """Takes the place of a band's linear attention module: same parameters, same names."""

    def forward(self, hidden_states: Tensor, *, wave: WaveContext, **_: Any) -> Tensor:
        """[1, tokens, hidden] of all live rows to the same shape."""
        query, key, value, gate, raw_beta, raw_decay = self.fix_query_key_value_ordering(
            self.in_proj_qkvz(hidden_states), self.in_proj_ba(hidden_states)
        )
        inputs = torch.cat([query.flatten(2), key.flatten(2), value.flatten(2)], dim=-1)[0]
        joined, lengths = _with_past(inputs, wave.batch, wave.states, self.layer_idx)
        query, key, value = self._convolve(joined, lengths, wave.states.window)
        decay = -self.A_log.float().exp() * functional.softplus(raw_decay.float() + self.dt_bias)
        parts = (query, key, value, decay, raw_beta.sigmoid())
        out = torch.empty_like(value, memory_format=torch.contiguous_format)
        rows = zip(wave.batch.spans, wave.batch.scans, torch.split_with_sizes(joined, lengths), strict=True)
        for span, scan, row in rows:
            tokens = slice(span.begin, span.end)
            self._scan(wave, scan, row, [part[:, tokens] for part in parts], out[:, tokens])
        normed = self.norm(out.flatten(0, 2), gate.reshape(-1, self.head_v_dim))
        projected: Tensor = self.out_proj(normed.view(1, len(inputs), -1))
        return projected

    def _convolve(self, inputs: Tensor, lengths: list[int], window: int) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of `lengths` one after the other, [rows * window + tokens, channels], to query, key and value
        [1, tokens, heads, head_dim]."""
        convolve = _implementation(causal_conv1d_fn, inputs)
        weight = self.conv1d.weight.squeeze(1)
        mixed: Tensor = convolve(inputs.T[None], weight, self.conv1d.bias, activation=self.activation)[0].T
        # The outputs for a row's past inputs mix in the row before it, and are nobody's.
        own = torch.cat([row[window:] for row in torch.split_with_sizes(mixed, lengths)])[None]
        query, key, value = torch.split_with_sizes(own, [self.key_dim, self.key_dim, self.value_dim], -1)
        keys, values = (1, len(own[0]), -1, self.head_k_dim), (1, len(own[0]), -1, self.head_v_dim)
        return query.view(keys), key.view(keys), value.view(values)

    def _scan(self, wave: WaveContext, scan: Scan, row: Tensor, parts: list[Tensor], out: Tensor) -> None:
        """One row's delta rule over `parts` (query, key, value, decay, beta), each [1, length, heads, ...].

        `row` [window + length, channels] are the convolution's inputs; writes `out` [1, length, heads, value_dim]
        and the slots that the scan names."""
        rule = _implementation(torch_chunk_gated_delta_rule, out)
        states, layer = wave.states, self.layer_idx
        delta = states.load(layer, scan.source)[1][None]
        begin = 0
        for end, slots in scan.segments:
            query, key, value, decay, beta = (part[:, begin:end] for part in parts)
            out[:, begin:end], delta = rule(
                query, key, value, g=decay, beta=beta, initial_state=delta, output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )  # fmt: skip
            window = row[end : end + states.window]
            wave.finiteness.note(window, delta)
            for slot in slots:
                states.store(layer, slot, window, delta[0])
            begin = end


def _with_past(inputs: Tensor, batch: WaveBatch, states: RecurrentStates, layer: int) -> tuple[Tensor, list[int]]:
    """The convolution's inputs of all rows, one after the other, each led by those that its state remembers.

    `inputs` [tokens, channels] to ([tokens + rows * window, channels], lengths of the rows in it)."""
    parts: list[Tensor] = []
    for span, scan in zip(batch.spans, batch.scans, strict=True):
        parts += [states.load(layer, scan.source)[0], inputs[span.begin : span.end]]
    return torch.cat(parts), [states.window + span.end - span.begin for span in batch.spans]


def _implementation(function: Callable[..., Any], tensor: Tensor) -> Callable[..., Any]:
    """`function` as transformers' own layer would call it: flash-linear-attention's or causal-conv1d's kernel where
    installed. Those kernels serve neither the CPU nor float32, and transformers puts them in place regardless: there
    it is the torch function that they wrap."""
    if tensor.is_cuda and tensor.dtype != torch.float32:
        return function
    wrapped: Callable[..., Any] = inspect.unwrap(function)
    return wrapped
