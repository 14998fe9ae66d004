"""BlockTree: lookup, chains, references and eviction order, with exact node and block ids."""

from __future__ import annotations

import numpy as np
import pytest

from tests.harness.stage_core import B, hashes
from wavepp_proto.hashing import HASH_BYTES
from wavepp_stage.core.block_hashes import BlockHashes
from wavepp_stage.core.block_pool import Blocks
from wavepp_stage.core.block_tree import PIECE, ROOT, RUN, BlockTree
from wavepp_stage.core.invariants import check_tree
from wavepp_stage.core.tier import Nodes


def ids(*blocks: int) -> Blocks:
    return np.array(blocks, dtype=np.int32)


def tokens(*symbols: int) -> list[int]:
    return [symbol for symbol in symbols for _ in range(B)]


def refs_of(tree: BlockTree, *held: Nodes) -> None:
    """Check the tree against the chains that are held."""
    check_tree(tree, list(held))


def grow(tree: BlockTree, hashed: BlockHashes, first_block: int = 0) -> Nodes:
    """A whole prompt as one held chain whose blocks count up from `first_block`."""
    return tree.extend(ROOT, hashed, 0, np.arange(first_block, first_block + len(hashed), dtype=np.int32))


def random_hashes(blocks: int, seed: int = 1) -> BlockHashes:
    return BlockHashes.unpack(np.random.default_rng(seed).bytes(blocks * HASH_BYTES))


@pytest.mark.parametrize("depth", [0, 1, 2, 63, 64, 65, 127, 128, 200, 640])
def test_chain_lists_every_ancestor_when_asked_at_any_depth(depth: int) -> None:
    hashed = random_hashes(640)
    tree = BlockTree(700)
    nodes = grow(tree, hashed)
    node = tree.node_at(hashed, depth)
    assert node == (ROOT if depth == 0 else nodes[depth - 1])
    assert node is not None
    assert tree.chain(node).tolist() == nodes[:depth].tolist()


@pytest.mark.parametrize("first", [1, 63, 64, 65, 100])
def test_runs_are_complete_when_a_chain_grows_in_two_steps(first: int) -> None:
    hashed = random_hashes(200)
    tree = BlockTree(200)
    upper = tree.extend(ROOT, hashed, 0, np.arange(first, dtype=np.int32))
    lower = tree.extend(int(upper[-1]), hashed, first, np.arange(first, 200, dtype=np.int32))
    assert tree.chain(int(lower[-1])).tolist() == [*upper.tolist(), *lower.tolist()]
    refs_of(tree, upper, lower)


@pytest.mark.parametrize("resident", [0, 1, 2, 5, 8, 9])
@pytest.mark.parametrize("limit", [0, 1, 5, 9, 20])
def test_deepest_is_found_when_residency_ends_anywhere(resident: int, limit: int) -> None:
    hashed = random_hashes(9)
    tree = BlockTree(16)
    tree.extend(ROOT, hashed, 0, np.arange(resident, dtype=np.int32))
    assert tree.deepest(hashed, limit) == min(resident, limit)


def test_prefix_is_not_found_when_only_its_short_hash_is_known() -> None:
    packed = np.random.default_rng(1).bytes(3 * HASH_BYTES)
    tree = BlockTree(8)
    grow(tree, BlockHashes.unpack(packed))
    forged = packed[: 2 * HASH_BYTES + 8] + bytes(HASH_BYTES - 8)
    assert tree.deepest(BlockHashes.unpack(packed), 3) == 3
    assert tree.deepest(BlockHashes.unpack(forged), 3) == 2


def test_growth_ends_before_a_taken_short_hash_when_another_prefix_owns_it() -> None:
    packed = np.random.default_rng(1).bytes(4 * HASH_BYTES)
    tree = BlockTree(8)
    first = grow(tree, BlockHashes.unpack(packed[:HASH_BYTES]))
    other = bytes(HASH_BYTES) + packed[:8] + bytes(24) + packed[2 * HASH_BYTES :]
    nodes = tree.extend(ROOT, BlockHashes.unpack(other), 0, ids(5, 6, 7, 4))
    assert tree.blocks(nodes).tolist() == [5]
    refs_of(tree, first, nodes)


def test_growth_ends_when_one_prompt_meets_its_own_short_hash_twice() -> None:
    packed = np.random.default_rng(1).bytes(HASH_BYTES)
    tree = BlockTree(8)
    nodes = grow(tree, BlockHashes.unpack(packed + packed[:8] + bytes(24)))
    assert len(nodes) == 1
    refs_of(tree, nodes)


def test_cached_counts_only_what_nobody_holds_when_chains_share_a_prefix() -> None:
    tree = BlockTree(8)
    long = grow(tree, hashes(tokens(1, 2, 3)))
    tree.hold(long[:2])
    assert (tree.resident, tree.device.cached) == (3, 0)
    tree.drop(long)
    assert tree.device.cached == 1
    assert tree.held_by_others(long, 0) == 2
    assert tree.held_by_others(long[:2], 1) == 0
    tree.drop(long[:2])
    assert tree.device.cached == 3
    refs_of(tree)


def test_eviction_takes_the_least_recently_used_leaf_first() -> None:
    tree = BlockTree(8)
    old = grow(tree, hashes(tokens(1, 2, 3)), first_block=0)
    new = tree.extend(int(old[0]), hashes(tokens(1, 7, 8)), 1, ids(10, 11))
    tree.hold(old[:1])  # the second prompt leases what it shares
    tree.drop(old)
    tree.drop(np.concatenate([old[:1], new]))
    evicted = tree.evict(3)
    assert evicted.blocks.tolist() == [2, 1, 11]  # the older branch leaf first, then the newer one's leaf
    assert tree.shorts(evicted.dropped).tolist() == [
        *hashes(tokens(1, 2, 3)).shorts[[2, 1]],
        hashes(tokens(1, 7, 8)).shorts[2],
    ]
    assert (tree.resident, tree.device.cached) == (2, 2)
    refs_of(tree)


def test_leaf_is_evicted_by_its_last_use_when_it_was_queued_before_it() -> None:
    tree = BlockTree(8)
    a, b = grow(tree, hashes(tokens(1)), 0), grow(tree, hashes(tokens(2)), 1)
    tree.drop(a)
    tree.drop(b)
    tree.hold(a)  # used again: b is the older one now
    tree.drop(a)
    assert tree.evict(2).blocks.tolist() == [1, 0]
    refs_of(tree)


def test_ancestor_outlives_an_older_leaf_when_it_was_used_without_its_branch() -> None:
    tree = BlockTree(8)
    a, b = grow(tree, hashes(tokens(1, 2)), 0), grow(tree, hashes(tokens(7)), 5)
    tree.drop(a)
    tree.drop(b)
    tree.hold(a[:1])
    tree.drop(a[:1])
    assert tree.evict(3).blocks.tolist() == [1, 5, 0]
    refs_of(tree)


def test_eviction_spares_a_held_prefix_when_its_branches_go() -> None:
    tree = BlockTree(8)
    chain = grow(tree, hashes(tokens(1, 2, 3)))
    tree.hold(chain[:1])
    tree.drop(chain)
    assert tree.evict(2).blocks.tolist() == [2, 1]
    assert tree.device.cached == 0
    refs_of(tree, chain[:1])


def test_node_ids_are_reused_when_their_nodes_were_evicted() -> None:
    tree = BlockTree(2)
    tree.drop(grow(tree, hashes(tokens(1, 2)), 0))
    tree.evict(2)
    again = grow(tree, hashes(tokens(5, 6)), 4)
    tree.drop(again)
    assert sorted(again.tolist()) == [1, 2]
    assert tree.evict(2).blocks.tolist() == [5, 4]
    refs_of(tree)


def test_queue_stays_small_when_one_leaf_is_used_again_and_again() -> None:
    tree = BlockTree(4)
    nodes = grow(tree, hashes(tokens(1, 2)))
    for _ in range(1000):
        tree.drop(nodes)
        tree.hold(nodes)
    assert len(tree.device.leaves._heap) == 1
    tree.drop(nodes)
    refs_of(tree)


@pytest.mark.parametrize("pieces", [[1] * 150, [150], [7, 1, 8, 48, 63, 1, 2, 20], [63, 65, 22], [64, 64, 22]])
def test_chain_is_every_node_in_order_however_it_grew(pieces: list[int]) -> None:
    tree, hashed = BlockTree(150), random_hashes(150)
    grown: list[int] = []
    for count in pieces:
        first = len(grown)
        parent = grown[-1] if grown else 0
        blocks = np.arange(first, first + count, dtype=np.int32)
        grown += tree.extend(parent, hashed, first, blocks).tolist()
    for depth in range(151):
        assert tree.chain_of(hashed, depth).tolist() == grown[:depth]
    refs_of(tree, np.array(grown))


def test_runs_of_evicted_nodes_are_dropped_when_a_long_chain_goes() -> None:
    tree = BlockTree(3 * RUN)
    hashed = random_hashes(3 * RUN)
    tree.drop(grow(tree, hashed))
    tree.evict(2 * RUN + 1)
    assert len(tree._runs) == RUN // PIECE - 1
    assert tree.deepest(hashed, 3 * RUN) == RUN - 1
    refs_of(tree)
