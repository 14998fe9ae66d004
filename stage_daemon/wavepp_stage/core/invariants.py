"""Every invariant of the stage's cache, recomputed from first principles.

Owns no state. Called by `BlockCache.check`, which tests call after every step and a daemon in paranoid
mode after every event: each redundant count, index and queue is compared with what it summarises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from wavepp_proto.errors import InternalError
from wavepp_proto.hashing import blocks_for
from wavepp_stage.core.block_tree import ROOT, RUN, BlockTree
from wavepp_stage.core.holds import Hold, Phase

if TYPE_CHECKING:
    from wavepp_stage.core.block_cache import BlockCache


def _require(condition: bool, what: str, got: object = None, want: object = None) -> None:
    if not condition:
        raise InternalError(f"broken invariant: {what}", field=what, value=str(got), limit=str(want))


def check_cache(cache: BlockCache) -> None:
    holds = list(cache._holds.values())
    dying = [chain for lot in cache._dying.values() for chain in lot]
    _check_every_block_once(cache, holds)
    refs = np.zeros(len(cache._tree._refs), dtype=np.int32)
    for chain in [*(hold.chain for hold in holds), *dying]:
        refs[chain] += 1
    check_tree(cache._tree, refs)
    _require(cache._escrowed == sum(hold.escrow for hold in holds), "escrow is the sum over holds")
    for hold in holds:
        _check_hold(cache, hold)
    room = cache._room(ignore_floor=True)
    floored = not dying and not any(hold.ignore_floor for hold in holds) and cache._escrowed > 0
    floor = cache.floor_blocks if floored else 0
    _require(room >= floor, "free + evictable - escrows >= floor", room, floor)
    cache._feed.check(cache._tree.resident_hashes())


def _check_every_block_once(cache: BlockCache, holds: list[Hold]) -> None:
    tree, pool = cache._tree, cache._pool
    nodes = np.nonzero(tree._alive)[0]
    private = [hold.private_blocks for hold in holds]
    everywhere = np.sort(np.concatenate([pool.unheld(), tree._block[nodes], *private]))
    _require(np.array_equal(everywhere, np.arange(pool.size)), "every block is in exactly one place")
    held = len(nodes) - tree.cached + sum(len(blocks) for blocks in private)
    total = pool.free + tree.cached + held + pool.quarantined
    _require(total == pool.size, "free + cached + held + quarantined = pool", total, pool.size)


def _check_hold(cache: BlockCache, hold: Hold) -> None:
    size = cache._block_tokens
    last = int(hold.chain[-1]) if len(hold.chain) else ROOT
    _require(np.array_equal(cache._tree.chain(last), hold.chain), "a hold's chain starts at the root")
    _require(cache._tree.node_at(hold.hashes, len(hold.chain)) == last, "a hold's chain has its prompt's hashes")
    _require(hold.phase is not Phase.RETIRED, "a retired hold is not in the ledger")
    taken = int(np.count_nonzero(hold.private)) if hold.phase is Phase.MATERIALISING else 0
    demand = hold.demand(size) - taken
    promised = demand if hold.phase in (Phase.ESCROWED, Phase.COMMITTED, Phase.MATERIALISING) else 0
    _require(hold.escrow == promised, "escrow is what is promised and not taken", hold.escrow, promised)
    if hold.phase is Phase.OWNED:
        _require(len(hold.table) == blocks_for(hold.prompt_tokens, size), "a table covers its prompt")
        nodes = hold.chain[~hold.private[: len(hold.chain)]]
        shown = hold.table[~hold.private]
        _require(np.array_equal(cache._tree.blocks(nodes), shown), "a table shows its nodes' blocks")
    else:
        _require(len(hold.chain) == hold.leased_blocks, "an unmaterialised hold holds its lease only")


def check_tree(tree: BlockTree, refs: npt.NDArray[np.int32]) -> None:
    """`refs` is what the holds say, by node id."""
    nodes = np.nonzero(tree._alive)[0]
    parents = tree._parent[nodes]
    _require(not tree._alive[ROOT], "the root is virtual")
    _require(bool(np.all(tree._alive[parents] | (parents == ROOT))), "a node exists only if its parent does")
    _require(np.array_equal(tree._refs[nodes], refs[nodes]), "references are the sum over holds")
    _require(not refs[~tree._alive].any(), "only resident nodes are held")
    _require(bool(np.all((tree._refs[nodes] <= tree._refs[parents]) | (parents == ROOT))), "ancestors are held")
    _require(tree.cached == int(np.count_nonzero(refs[nodes] == 0)), "cached is what nobody holds", tree.cached)
    _require(tree.resident == len(nodes) == len(tree._index), "the index holds every node", tree.resident)
    children = np.bincount(parents, minlength=len(refs))
    _require(np.array_equal(tree._children[nodes], children[nodes]), "children are counted")
    depths = np.where(parents == ROOT, 0, tree._depth[parents]) + 1
    _require(np.array_equal(tree._depth[nodes], depths), "depth is the parent's plus one")
    runs = set(nodes[depths % RUN == 0].tolist())
    _require(set(tree._runs) == runs, "every RUN-th node keeps its run")
    for node in nodes.tolist():
        _require(tree._index.get(tree._short.item(node)) == node, "the index names each node")
        leaf = not tree._refs.item(node) and not tree._children.item(node)
        _require(not leaf or node in tree._leaves, "every evictable leaf is queued")
