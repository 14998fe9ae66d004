"""Hash prompts without stalling the event loop (DESIGN.md)."""

from __future__ import annotations

import asyncio

from wavepp_proto.hashing import TOKEN_BYTES, HashScope, hash_slices

SLICE_TOKENS = 32_768
"""About 0.4 ms of hashing between two turns of the loop."""


def is_short(token_ids: bytes) -> bool:
    """Whether the prompt is one slice: a task of its own would cost more than its hashes."""
    return len(token_ids) // TOKEN_BYTES <= SLICE_TOKENS


def hash_short(scope: HashScope, token_ids: bytes, block_tokens: int) -> bytes:
    """Packed 32-byte hashes of the full blocks, at once."""
    return b"".join(hash_slices(scope, token_ids, block_tokens, max(1, SLICE_TOKENS // block_tokens)))


async def hash_prompt(scope: HashScope, token_ids: bytes, block_tokens: int) -> bytes:
    """The same, with a turn of the loop between slices."""
    pieces = []
    for piece in hash_slices(scope, token_ids, block_tokens, max(1, SLICE_TOKENS // block_tokens)):
        pieces.append(piece)
        await asyncio.sleep(0)
    return b"".join(pieces)
