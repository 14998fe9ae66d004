"""Every invariant of the stage's cache, recomputed from first principles.

Owns no state. Called by `BlockCache.check`, which tests call after every step and a daemon in paranoid
mode after every event: each redundant count, index and queue is compared with what it summarises, and
every block and slot must be in exactly one place.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from wavepp_proto.errors import InternalError
from wavepp_proto.hashing import blocks_for
from wavepp_stage.core.block_tree import PIECE, ROOT, RUN, BlockTree
from wavepp_stage.core.holds import Hold, Phase
from wavepp_stage.core.residency import Residency
from wavepp_stage.core.state_pool import StatePool
from wavepp_stage.core.tier import NOWHERE, Nodes, Tier
from wavepp_stage.core.work import CopyDirection

if TYPE_CHECKING:
    from wavepp_stage.core.block_cache import BlockCache

_PROMISED = (Phase.ESCROWED, Phase.COMMITTED, Phase.MATERIALISING)


def require(condition: bool, what: str, got: object = None, want: object = None) -> None:
    if not condition:
        raise InternalError(f"broken invariant: {what}", field=what, value=str(got), limit=str(want))


def check_cache(cache: BlockCache) -> None:
    store, ledger = cache._store, cache._ledger
    holds = list(ledger.holds.values())
    dying = [hold for group in cache._dying.values() for hold in group]
    check_tree(store.tree, [hold.chain for hold in (*holds, *dying)])
    check_states(
        store.states, store.tree, [hold.snapshot for hold in (*holds, *dying) if hold.snapshot is not None], holds
    )
    _check_device_blocks(store, holds)
    _check_copies(store)
    for hold in holds:
        _check_hold(cache, hold)
    require(ledger.escrowed == sum(hold.escrow for hold in holds), "escrow is the sum over holds", ledger.escrowed)
    states = sum(hold.escrow_states for hold in holds)
    require(ledger.escrowed_states == states, "state escrow is the sum over holds", ledger.escrowed_states, states)
    waiting = sum(hold.phase is not Phase.OWNED for hold in holds)
    require(ledger.unmaterialised == waiting, "holds without a table are counted", ledger.unmaterialised, waiting)
    room = store.pool.free + store.tree.device.cached - ledger.escrowed
    floored = not dying and not any(hold.ignore_floor for hold in holds) and ledger.escrowed > 0
    floor = cache.floor_blocks if floored else 0
    require(room >= floor, "free + evictable - escrows >= floor", room, floor)
    room = store.states.free + store.states.cached - states
    require(room >= 0, "free + evictable - escrows >= 0 for states", room)
    store._feed.check(store.residents())


def _check_device_blocks(store: Residency, holds: list[Hold]) -> None:
    tier, pool = store.tree.device, store.pool
    private = [hold.private_blocks for hold in holds]
    incoming = [lot.copy.device for lot in store.copies.unended() if lot.copy.direction is CopyDirection.ONBOARD]
    blocks = tier.block[tier.block != NOWHERE]
    _check_once("device block", pool.size, [pool.unheld(), blocks, *private, *incoming])
    held = tier.resident - tier.cached + sum(map(len, (*private, *incoming)))
    total = pool.free + tier.cached + held + pool.quarantined
    require(total == pool.size, "free + cached + held + quarantined = pool", total, pool.size)


def _check_once(what: str, size: int, places: Iterable[npt.ArrayLike]) -> None:
    everywhere = np.sort(np.concatenate([np.asarray(place, dtype=np.int64) for place in places]))
    require(np.array_equal(everywhere, np.arange(size)), f"every {what} is in exactly one place", everywhere.tolist())


def _check_hold(cache: BlockCache, hold: Hold) -> None:
    tree, size = cache._store.tree, cache._block_tokens
    require(hold.phase is not Phase.RETIRED, "a retired hold is not in the ledger")
    sound = hold.chain[: tree.usable(hold.chain)]
    last = int(sound[-1]) if len(sound) else ROOT
    require(np.array_equal(tree.chain(last), sound), "a hold's chain starts at the root")
    require(tree.node_at(hold.hashes, len(sound)) == last, "a hold's chain has its prompt's hashes")
    recurrent = cache._shape.recurrent
    if hold.phase is Phase.OWNED:
        _check_owned(cache, hold)
        return
    require(len(hold.chain) == hold.leased_blocks, "an unmaterialised hold holds its lease only")
    start = int(hold.chain[-1]) if recurrent and len(hold.chain) else None
    require(hold.snapshot == start, "a recurrent lease ends at the snapshot it holds", hold.snapshot, start)
    require(hold.working is None and not hold.planned, "only an owned hold has states")
    if hold.phase in _PROMISED:
        incoming = int(np.count_nonzero(cache._store._incoming[hold.chain]))
        demand = blocks_for(hold.prompt_tokens, size) - tree.on_device(hold.chain) - len(hold.taken) - incoming
        lost = cache._ledger.is_lost(hold)  # it never runs: what it would need is promised no more
        require(lost or hold.escrow >= demand, "escrow covers what is not taken", hold.escrow, demand)
        states = 1 + hold.snapshots if recurrent else 0
        require(hold.escrow_states == states, "states are promised", hold.escrow_states, states)
    else:
        require(not hold.escrow and not hold.escrow_states, "a lease promises nothing")


def _check_owned(cache: BlockCache, hold: Hold) -> None:
    tree = cache._store.tree
    require(len(hold.table) == blocks_for(hold.prompt_tokens, cache._block_tokens), "a table covers its prompt")
    require(tree.on_device(hold.chain) == len(hold.chain), "a running sequence's prefix is on the device")
    nodes = hold.chain[~hold.private[: len(hold.chain)]]
    require(np.array_equal(tree.blocks(nodes), hold.table[~hold.private]), "a table shows its nodes' blocks")
    require(not hold.escrow, "an owned hold has taken its blocks")
    require((hold.working is not None) is cache._shape.recurrent, "an owned hold has a working state")


def _check_copies(store: Residency) -> None:
    incoming = np.zeros(len(store._incoming), dtype=np.int64)
    last = store.copies.ended
    for lot in store.copies.unended():
        require(lot.copy.number == last + 1, "lots end in order", lot.copy.number, last + 1)
        last = lot.copy.number
        if lot.copy.direction is CopyDirection.ONBOARD:
            bound = lot.nodes[store._incoming[lot.nodes] == lot.copy.number]
            incoming[bound] = lot.copy.number
    require(np.array_equal(incoming, store._incoming), "an incoming node has a lot that brings it")
    nodes = np.nonzero(incoming)[0]
    require(bool(np.all(store.tree._refs[nodes] > 0)), "an incoming node is held")
    require(not store.tree.device.has(nodes).any(), "an incoming node is not on the device")


def check_states(states: StatePool, tree: BlockTree, starts: list[int], holds: list[Hold]) -> None:
    """`starts` are the nodes whose snapshots are held, once for each holder."""
    refs = np.bincount(np.array(starts, dtype=np.int64), minlength=len(states._refs))
    require(np.array_equal(refs, states._refs), "snapshot references are the sum over holds")
    nodes = np.nonzero(states._slot >= 0)[0]
    require(set(states._orphans) <= set(nodes[refs[nodes] > 0].tolist()), "an orphaned snapshot is held")
    cached = int(np.count_nonzero(refs[nodes] == 0))
    require(states.cached == cached, "cached snapshots are what nobody holds", states.cached, cached)
    own = [slot for hold in holds for slot in hold.slots]
    _check_once("state slot", states.size, [states.unheld(), states._slot[nodes], own])
    for node in nodes.tolist():
        require(bool(refs[node]) or node in states._queue, "every evictable snapshot is queued", node)
    shown = set(nodes.tolist()) - states._orphans
    above = {node: next((at for at in tree.chain(node)[-2::-1].tolist() if at in shown), ROOT) for node in shown}
    require(states._above == above, "the next snapshot above is known", states._above, above)
    for node in (*shown, ROOT):
        below = {other for other in shown if above[other] == node}
        require(set(states._below[node]) == below, "the next snapshots below are known", node)
    require(states._below.keys() - {ROOT} == shown >= states._needed, "what is shown is linked, and nothing else")
    for node in shown:
        first = refs[node] == 0 and states.is_superseded(node)
        require(not first or node in states._superseded, "every superseded snapshot is queued to go first", node)


def check_tree(tree: BlockTree, chains: list[Nodes]) -> None:
    """`chains` are what the holds hold."""
    refs = np.zeros(len(tree._refs), dtype=np.int32)
    for chain in chains:
        refs[chain] += 1
    nodes = np.nonzero(tree._alive)[0]
    parents = tree._parent[nodes]
    require(not tree._alive[ROOT], "the root is virtual")
    require(bool(np.all(tree._alive[parents] | (parents == ROOT))), "a node exists only if its parent does")
    require(np.array_equal(tree._refs[nodes], refs[nodes]), "references are the sum over holds")
    lost = np.array(sorted(tree._broken), dtype=np.int64)
    require(bool(np.all(refs[lost] > 0)) and not tree._alive[lost].any(), "a lost node is held and found by nobody")
    others = np.setdiff1d(np.nonzero(~tree._alive)[0], lost)
    require(not refs[others].any(), "only nodes that exist are held")
    require(bool(np.all((tree._refs[nodes] <= tree._refs[parents]) | (parents == ROOT))), "ancestors are held")
    require(tree.resident == len(nodes) == len(tree._index), "the index holds every node", tree.resident)
    device, host = tree.device.has(nodes), tree.host.has(nodes)
    require(bool(np.all(device ^ host)), "a node is on one tier")
    require(bool(np.all(host | tree.device.has(parents) | (parents == ROOT))), "a chain leaves the device once")
    _check_tier(tree.device, nodes[device], parents[device], refs)
    _check_tier(tree.host, nodes[host], parents[host], refs)
    _check_once(
        "host block",
        tree.host_blocks,
        [tree._unused_hosts.all(), tree.host.block[nodes[host]], list(tree._broken.values())],
    )
    depths = np.where(parents == ROOT, 0, tree._depth[parents]) + 1
    require(np.array_equal(tree._depth[nodes], depths), "depth is the parent's plus one")
    require(set(tree._runs) == set(nodes[depths % PIECE == 0].tolist()), "every PIECE-th node keeps its run")
    for node, run in tree._runs.items():
        length = PIECE if tree._depth[node] % RUN else RUN
        linked = np.array_equal(tree._parent[run[1:]], run[:-1])
        require(len(run) == length and run[-1] == node and linked, "a run is the nodes that end in its own", node)
    for node in nodes.tolist():
        require(tree._index.get(tree._short.item(node)) == node, "the index names each node")


def _check_tier(tier: Tier, nodes: Nodes, parents: Nodes, refs: npt.NDArray[np.int32]) -> None:
    require(tier.resident == len(nodes) == np.count_nonzero(tier.block != NOWHERE), "residents are counted")
    cached = int(np.count_nonzero(refs[nodes] == 0))
    require(tier.cached == cached, "cached is what nobody holds", tier.cached, cached)
    children = np.bincount(parents, minlength=len(refs))
    require(np.array_equal(tier.children, children), "children are counted")
    for node in nodes[(refs[nodes] == 0) & (children[nodes] == 0)].tolist():
        require(node in tier.leaves, "every evictable leaf is queued", node)
