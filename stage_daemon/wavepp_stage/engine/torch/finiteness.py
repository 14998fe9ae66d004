"""Whether a wave computed NaN or infinity, and if so which rows did, and where it began.

Owns the check that every wave pays for, and the search that only a bad wave pays for. What is noted is all that a
row leaves behind: keys and values, recurrent states, activations for the next stage, logits. Within a stage nothing
else needs a look: the residual stream never loses a NaN or an infinity again, so what leaves it tells of all before.
Rows share no arithmetic but matrix products, whose every line is a row's own: a bad row spoils no other, and a wave
with one is not run again. Called by `engine.py`, `attention.py` and `gated_delta.py` on the executor thread.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wavepp_stage.engine.torch.batch import WaveBatch
from wavepp_stage.engine.torch.paged_cache import PagedCache
from wavepp_stage.engine.torch.recurrent_states import RecurrentStates


class Finiteness:
    """What one wave computed so far, as one sum a tensor: NaN and infinity survive every sum."""

    __slots__ = ("_sums",)

    def __init__(self) -> None:
        self._sums: list[Tensor] = []

    def note(self, *tensors: Tensor) -> None:
        """One pass over each; on CUDA nothing waits."""
        self._sums += [tensor.sum(dtype=torch.float32) for tensor in tensors]

    def doubtful(self) -> bool:
        """False: all that was noted is finite. True: look closer, for a sum of large numbers may overflow as well."""
        return bool(self._sums) and not bool(torch.stack(self._sums).sum().isfinite())


ENTERED = "embeddings or received activations"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a row's first NaN or infinity was seen."""

    layer: int | None
    """Global number; None ahead of the layers and behind them."""
    what: str


def origins(
    batch: WaveBatch, cache: PagedCache, states: RecurrentStates, layers: Sequence[int], ahead: Tensor, behind: Tensor
) -> dict[int, Origin]:
    """Row index to origin of every row that is not finite, by an exact look at all that the wave left.

    `ahead` entered the first of `layers`, `behind` left the last: [tokens, hidden] each."""
    found: dict[int, Origin] = {}
    places: list[tuple[Origin, Tensor]] = [(Origin(None, ENTERED), _bad(ahead))]
    for layer in layers:
        if layer in cache.layers:
            places.append((Origin(layer, "keys or values"), _bad(*cache.rows(layer, batch.slots))))
        else:
            places.append((Origin(layer, "recurrent states"), _bad_states(batch, states, layer)))
    places.append((Origin(layers[-1], "activations"), _bad(behind)))
    for origin, bad in places:
        for span in batch.spans:
            if span.index not in found and bool(bad[span.begin : span.end].any()):
                found[span.index] = origin
    return found


def scrub(batch: WaveBatch, cache: PagedCache, states: RecurrentStates, rows: Collection[int], hidden: Tensor) -> None:
    """Zero what these rows of the wave wrote, and their part of `hidden`: a kernel that reads memory under a mask makes
    NaN of what is masked, and nothing else ever clears a block or a slot."""
    for number, span in enumerate(batch.spans):
        if span.index not in rows:
            continue
        hidden[span.begin : span.end] = 0
        cache.clear(batch.slots[span.begin : span.end])
        if batch.scans:
            states.clear(batch.scans[number].written)


def _bad(*tensors: Tensor) -> Tensor:
    """Bool [tokens]: which rows of any of these, [tokens, ...], hold NaN or infinity."""
    return torch.stack([~tensor.flatten(1).isfinite().all(1) for tensor in tensors]).any(0)


def _bad_states(batch: WaveBatch, states: RecurrentStates, layer: int) -> Tensor:
    """The same of the states that the rows left in one recurrent layer."""
    bad = torch.zeros(len(batch.slots), dtype=torch.bool, device=batch.slots.device)
    for span, scan in zip(batch.spans, batch.scans, strict=True):
        left = [part for slot in scan.written for part in states.load(layer, slot)]
        bad[span.begin : span.end] = not all(bool(part.isfinite().all()) for part in left)
    return bad
