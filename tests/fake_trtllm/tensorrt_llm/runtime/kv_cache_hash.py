"""Which hashes name blocks in events, and the 64-bit chain of the older manager.

Owns the names of the algorithms. The numbers of `v1_block_key` are this package's own: whoever reads
events may rely on the chain (equal prefixes, equal hashes), never on the value.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

KV_CACHE_HASH_ALGO_AUTO = "auto"
KV_CACHE_HASH_ALGO_V1 = "v1_block_key"
KV_CACHE_HASH_ALGO_V2 = "v2_sha256"
KV_CACHE_HASH_ALGO_V2_SHA256_64 = "v2_sha256_64"
KV_CACHE_HASH_ALGOS = (KV_CACHE_HASH_ALGO_V1, KV_CACHE_HASH_ALGO_V2, KV_CACHE_HASH_ALGO_V2_SHA256_64)
_MASK = (1 << 64) - 1


def resolve(algorithm: str) -> str:
    """`auto` is the older manager's, unless FAKE_TRTLLM_EVENT_HASH says otherwise."""
    if algorithm != KV_CACHE_HASH_ALGO_AUTO:
        return algorithm
    return os.environ.get("FAKE_TRTLLM_EVENT_HASH", KV_CACHE_HASH_ALGO_V1)


def get_effective_kv_cache_event_hash_algo(algorithm: str, *, use_kv_cache_manager_v2: bool) -> str:
    return resolve(algorithm)


def v1_block_hash(chain: Sequence[Sequence[int]]) -> int:
    """FNV-1a over the tokens of each block in turn, seeded with the block before it."""
    value = 0xCBF29CE484222325
    for tokens in chain:
        for token in (len(tokens), *tokens):
            value = ((value ^ (int(token) & _MASK)) * 0x100000001B3) & _MASK
    return value
