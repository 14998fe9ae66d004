"""Block hashes of prompts that are known by their streams alone: no token is made, none is hashed.

Owns the names and the memory of those that are asked for again. Equal prefixes give equal hashes, as with
`wavepp_proto.hashing`, for prompts that are cut into parts in the same way. Called by `planning`.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

from wavepp_proto.hashing import HASH_BYTES
from wavepp_proto.workload import Part, Prompt


class Chains:
    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._hashes = lru_cache(maxsize=4096)(self._draw)
        self._after = lru_cache(maxsize=65_536)(_after)

    def hashes(self, prompt: Prompt) -> bytes:
        """Packed 32-byte hashes of the full blocks."""
        size, start, state = self._block_tokens, 0, b""
        packed: list[bytes] = []
        for part in prompt.parts:
            ends = (start + part.tokens) // size - start // size
            if ends:
                packed.append(self._hashes(state, part.stream, size - start % size, ends))
            state = self._after(state, part)
            start += part.tokens
        return b"".join(packed)

    def _draw(self, state: bytes, stream: str, first_end: int, ends: int) -> bytes:
        """Of the blocks that end in one stream, the first of them `first_end` tokens into it."""
        # An extendable digest's prefix does not depend on its length: a longer part has the shorter one's hashes.
        return hashlib.shake_256(state + b"%d/" % first_end + stream.encode()).digest(HASH_BYTES * ends)


def _after(state: bytes, part: Part) -> bytes:
    return hashlib.sha256(state + b"%d/" % part.tokens + part.stream.encode()).digest()
