"""First token of finished prompts, and what a client asked to see beside it.

Owns the choice (greedy, or sampled with the request's seed) and the packing of logits. Sampling runs
on the CPU from float32 logits, so that one seed gives one token whatever the device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from wavepp_proto.terms import RowResult, Sampling, TokenLogprob

_SEED_MASK = (1 << 64) - 1
"""A seed of the wire has 64 bits."""
_SEED_BITS = 32
"""That torch's generator on a CPU looks at."""


def sample_rows(logits: Tensor, rows: Sequence[tuple[int, Sampling]]) -> tuple[RowResult, ...]:
    """`logits` float32 [n, vocabulary], all finite, one line for each (row index, sampling) in `rows`."""
    greedy = logits.argmax(-1).tolist()
    return tuple(
        RowResult(
            row=row,
            token_id=greedy[line] if sampling.temperature == 0.0 else _draw(logits[line], sampling),
            top_logprobs=_top(logits[line], sampling.top_logprobs),
            logits=_pack(logits[line]) if sampling.full_logits else b"",
        )
        for line, (row, sampling) in enumerate(rows)
    )


def _draw(logits: Tensor, sampling: Sampling) -> int:
    generator = torch.Generator().manual_seed(_short_seed(sampling.seed))
    # Shifted by the maximum before the division: a tiny temperature must not overflow.
    shifted = logits.cpu().double() - logits.max().item()
    weights = torch.softmax(shifted / sampling.temperature, -1)
    return int(torch.multinomial(weights, 1, generator=generator))


def _short_seed(seed: int) -> int:
    """The seed itself where it fits; of a longer one every bit counts."""
    seed &= _SEED_MASK
    if seed >> _SEED_BITS == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(seed.to_bytes(8, "little"), digest_size=_SEED_BITS // 8).digest(), "little")


def _top(logits: Tensor, count: int) -> tuple[TokenLogprob, ...]:
    if count == 0:
        return ()
    # In double: the distance of two finite logits may be infinite in float32, which is what the wire carries.
    best = torch.log_softmax(logits.double(), -1).topk(min(count, logits.shape[-1]))
    told = best.values.clamp_min(torch.finfo(torch.float32).min)
    return tuple(TokenLogprob(token, value) for token, value in zip(best.indices.tolist(), told.tolist(), strict=True))


def _pack(logits: Tensor) -> bytes:
    return logits.cpu().numpy().astype("<f4", copy=False).tobytes()
