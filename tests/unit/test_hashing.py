"""Block hashes: fixed vectors so that the wire never changes silently, slices, caps and boundaries."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest

from wavepp_proto.hashing import (
    HASH_BYTES,
    HashScope,
    block_hash,
    blocks_for,
    full_blocks,
    hash_blocks,
    hash_slices,
    reuse_cap,
    short,
)

B = 4
SCOPE = HashScope("model", "layout")


def packed(*tokens: int) -> bytes:
    return struct.pack(f"<{len(tokens)}i", *tokens)


def test_hashes_equal_the_golden_vectors_when_computed() -> None:
    """Computed once, apart from this code: a change here makes every stage forget its cache."""
    hashes = hash_blocks(SCOPE, packed(1, 2, 3, 4, 5, 6, 7, 8), B)
    assert [block_hash(hashes, index).hex() for index in range(2)] == [
        "bdcb33395d8942af4dc320b68f24b10136968fff285ad91d517b92b52c93497c",
        "d30ac6de85a2b7e5cdd43b385bab15fb37152ab9beef7f32fb1a739b3d1e3a3e",
    ]
    scope = HashScope("modèle", "b4-bf16", "tenant", "lora")
    full = hash_blocks(scope, packed(0, -1, 2**31 - 1, 7), B)
    assert full.hex() == "63ed400773c26e2beb01b811faa9a151a3119c0bcba52491717e4a7bc5d46bcd"
    assert short(full) == 3129652590367796579


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 0), (B - 1, 0), (B, 1), (B + 1, 1), (2 * B, 2)])
def test_only_full_blocks_have_hashes_when_the_prompt_ends_inside_one(tokens: int, blocks: int) -> None:
    hashes = hash_blocks(SCOPE, packed(*range(tokens)), B)
    assert len(hashes) == HASH_BYTES * blocks == HASH_BYTES * full_blocks(tokens, B)


@pytest.mark.parametrize("slice_blocks", [1, 2, 3, 7, 100])
def test_slices_join_to_the_whole_when_hashed_piecewise(slice_blocks: int) -> None:
    tokens = packed(*range(7 * B + 1))
    slices = list(hash_slices(SCOPE, tokens, B, slice_blocks))
    assert b"".join(slices) == hash_blocks(SCOPE, tokens, B)
    assert all(len(piece) <= HASH_BYTES * slice_blocks for piece in slices)


def test_hash_covers_the_whole_prefix_when_one_early_token_differs() -> None:
    mine, other = packed(*range(3 * B)), packed(99, *range(1, 3 * B))
    ours, theirs = hash_blocks(SCOPE, mine, B), hash_blocks(SCOPE, other, B)
    assert all(block_hash(ours, index) != block_hash(theirs, index) for index in range(3))
    shared = hash_blocks(SCOPE, packed(*range(2 * B), 5, 5, 5, 5), B)
    assert shared[: 2 * HASH_BYTES] == ours[: 2 * HASH_BYTES]
    assert shared[2 * HASH_BYTES :] != ours[2 * HASH_BYTES :]


@pytest.mark.parametrize("field", ["model", "layout", "salt", "adapter"])
def test_scopes_share_no_hash_when_one_field_differs(field: str) -> None:
    other = replace(SCOPE, **{field: "other"})
    assert hash_blocks(other, packed(1, 2, 3, 4), B) != hash_blocks(SCOPE, packed(1, 2, 3, 4), B)


def test_scopes_share_no_header_when_text_moves_between_fields() -> None:
    assert HashScope("ab", "c").header() != HashScope("a", "bc").header()
    assert HashScope("a", "b", salt="c").header() != HashScope("a", "b", adapter="c").header()


@pytest.mark.parametrize(
    ("prompt", "cap"),
    [(0, 0), (1, 0), (B - 1, 0), (B, 0), (B + 1, B), (2 * B - 1, B), (2 * B, B), (2 * B + 1, 2 * B)],
)
def test_cap_leaves_a_token_to_compute_when_the_prompt_is_cached(prompt: int, cap: int) -> None:
    assert reuse_cap(prompt, B) == cap


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (B, 1), (B + 1, 2), (2 * B, 2)])
def test_partial_block_counts_when_room_is_asked_for(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, B) == blocks
