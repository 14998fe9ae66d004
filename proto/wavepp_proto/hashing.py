"""Chained block hashes that name a whole prefix (DESIGN.md).

Owns the hash header and the running SHA-256; only the controller hashes prompts. Digest i covers the
header and tokens[0 : (i + 1) * B], so equal hashes mean equal prefixes of the same model, layout,
tenant and adapter. Pure; long prompts are hashed in slices so that an event loop can breathe.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from wavepp_proto.terms import BlockHash, ShortHash

DOMAIN = b"wavepp.block.v1"
HASH_BYTES = 32
SHORT_BYTES = 8
TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class HashScope:
    """Everything besides tokens that must be equal for a block to be reusable."""

    model: str
    """Model fingerprint."""
    layout: str
    """Cache layout: block size, dtype and the like."""
    salt: str = ""
    adapter: str = ""

    def header(self) -> bytes:
        """Length-prefixed fields, so no two scopes share a header."""
        parts = [DOMAIN, *(text.encode() for text in (self.model, self.layout, self.salt, self.adapter))]
        return b"".join(struct.pack("<I", len(part)) + part for part in parts)


def hash_slices(scope: HashScope, token_ids: bytes, block_tokens: int, slice_blocks: int) -> Iterator[bytes]:
    """Packed 32-byte hashes of the full blocks of `token_ids` (packed int32), a slice at a time.

    Each item holds at most `slice_blocks` hashes; a trailing partial block has no hash.
    """
    running = hashlib.sha256(scope.header())
    view = memoryview(token_ids)
    step = block_tokens * TOKEN_BYTES
    end = len(view) // step * step
    for start in range(0, end, step * slice_blocks):
        digests = []
        for at in range(start, min(end, start + step * slice_blocks), step):
            running.update(view[at : at + step])
            digests.append(running.copy().digest())
        yield b"".join(digests)


def hash_blocks(scope: HashScope, token_ids: bytes, block_tokens: int) -> bytes:
    """All packed block hashes at once."""
    return b"".join(hash_slices(scope, token_ids, block_tokens, 1 << 30))


def block_hash(packed: bytes, index: int) -> BlockHash:
    """Hash number `index` of a packed run."""
    return BlockHash(packed[index * HASH_BYTES : (index + 1) * HASH_BYTES])


def short(digest: bytes) -> ShortHash:
    """Map key of a block hash."""
    return ShortHash(int.from_bytes(digest[:SHORT_BYTES], "little"))


def reuse_cap(prompt_tokens: int, block_tokens: int) -> int:
    """Last block boundary strictly below the prompt length: at least one token is computed."""
    return max(0, prompt_tokens - 1) // block_tokens * block_tokens


def full_blocks(tokens: int, block_tokens: int) -> int:
    return tokens // block_tokens


def blocks_for(tokens: int, block_tokens: int) -> int:
    """Blocks that `tokens` tokens occupy, the partial last one included."""
    return -(-tokens // block_tokens)
