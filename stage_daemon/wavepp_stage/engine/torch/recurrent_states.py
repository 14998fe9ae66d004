"""The recurrent states of one stage: memory of fixed size per slot, whatever the prompt's length.

Per recurrent layer a slot holds the last inputs of the causal convolution and the state of the delta
rule. All slots are allocated at load and never again; which slot is a working state and which a snapshot
is the cache manager's business. One slot more than asked for is the empty state: always zero, never
written, so that a prompt's first token reads a slot like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StateShape:
    """One layer's state."""

    window: int
    """Inputs that the convolution looks back on: its kernel size - 1."""
    channels: int
    """Of the convolution."""
    heads: int
    key_dim: int
    value_dim: int


NO_STATE = StateShape(0, 0, 0, 0, 0)
"""Of models without recurrent layers."""


class RecurrentStates:
    """States of the recurrent layers of one band, addressed by global layer number and slot."""

    def __init__(
        self, layers: Sequence[int], shape: StateShape, *, slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`dtype` is that of the convolution's inputs; the delta rule's state is float32."""
        self.layers = tuple(layers)
        self.slots = slots
        self.window = shape.window

        def pool(*shape: int, dtype: torch.dtype) -> Tensor:
            # Filled, not only reserved: memory that is missing fails the load, not a wave.
            return torch.empty(slots + 1, *shape, dtype=dtype, device=device).zero_()

        delta = (shape.heads, shape.key_dim, shape.value_dim)
        self._inputs = {layer: pool(shape.window, shape.channels, dtype=dtype) for layer in layers}
        self._delta = {layer: pool(*delta, dtype=torch.float32) for layer in layers}

    @property
    def bytes_per_state(self) -> int:
        """Bytes of one slot over all recurrent layers of the band."""
        tensors = [*self._inputs.values(), *self._delta.values()]
        return sum(tensor[0].numel() * tensor.element_size() for tensor in tensors)

    def tensors(self, layer: int) -> tuple[Tensor, Tensor]:
        """(convolution inputs [slots + 1, window, channels], delta rule's state [slots + 1, heads, key_dim,
        value_dim]) of one layer; the storage itself."""
        return self._inputs[layer], self._delta[layer]

    def load(self, layer: int, slot: int | None) -> tuple[Tensor, Tensor]:
        """The state in `slot`, or the empty state: inputs [window, channels], delta [heads, key_dim, value_dim], both
        views of the storage."""
        number = self.slots if slot is None else slot
        return self._inputs[layer][number], self._delta[layer][number]

    def store(self, layer: int, slot: int, inputs: Tensor, delta: Tensor) -> None:
        """`inputs` [window, channels] and `delta` [heads, key_dim, value_dim] become the state of `slot`."""
        self._inputs[layer][slot].copy_(inputs)
        self._delta[layer][slot].copy_(delta)

    def clear(self, slots: Sequence[int]) -> None:
        """Zero these slots in every layer."""
        for pool in (*self._inputs.values(), *self._delta.values()):
            for slot in slots:
                pool[slot].zero_()
