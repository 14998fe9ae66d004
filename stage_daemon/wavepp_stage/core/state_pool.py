"""The slots of the recurrent group: working states of sequences, and snapshots at tree nodes.

Every slot is in exactly one place, and the counts sum to the number of slots:

    | free | cached | held | quarantined |

    cached       a node's snapshot that nobody starts from: reusable, evictable by itself
    held         a snapshot somebody starts from, a working state, or a snapshot not published yet
    quarantined  freed by a formation's end; its executor may still write it

Two orders of eviction, each least recently used first. The superseded go before all others:

    ■ 8K ──── ■ 16K ──── ■ 24K ──── ■ 30K       a long prompt: its end alone is reused by the next turn
    superseded superseded superseded deepest

    ■ 4K ─┬── ■ 30K      a prefix that several go on from is superseded by none of them, nor is one that was
          └── ■ 22K      started from, or asked for, although a deeper one was there: others need it

A superseded snapshot has exactly one next deeper one, and nobody began at it since. So every chain keeps its
deepest as long as the deepest of all chains fit, however many each chain took on its way.

Owns slots, which node has which snapshot, what lies above and below it, and the eviction order. Does not own
nodes (block_tree.py) or promises to holds (block_cache.py). A snapshot may go without its node; a node takes
its snapshot along.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from wavepp_proto.errors import InternalError
from wavepp_stage.core.id_stack import IdStack
from wavepp_stage.core.leaf_queue import LeafQueue
from wavepp_stage.core.tier import Nodes

_NO_SLOT = -1


_TOP = 0
"""Above the first snapshot of every chain: the root of the tree, which has none itself."""


class StatePool:
    """Slots 0 .. slots - 1 for nodes 0 <= node < nodes; `chain` gives all nodes from the root down to one."""

    def __init__(self, slots: int, nodes: int, chain: Callable[[int], Nodes]) -> None:
        self.size = slots
        self.cached = 0
        """Snapshots nobody starts from."""
        self.evicted = 0
        """Snapshots evicted to make room, so far."""
        self._unused = IdStack(0, slots)
        self._slot = np.full(nodes, _NO_SLOT, dtype=np.int32)
        self._refs = np.zeros(nodes, dtype=np.int32)
        self._stamp = np.zeros(nodes, dtype=np.int64)
        self._chain = chain
        self._above: dict[int, int] = {}
        """The next snapshot above each one that nodes show; _TOP if there is none."""
        self._below: dict[int, dict[int, None]] = {_TOP: {}}
        """The next ones below each, and below the top."""
        self._needed: set[int] = set()
        """Snapshots somebody began at, or took, although a deeper one was there."""
        self._queue = LeafQueue(nodes)
        """Everything that can be evicted."""
        self._superseded = LeafQueue(nodes)
        """What of it goes first; an entry may be out of date."""
        self._orphans: set[int] = set()
        """Nodes that are lost, whose snapshot somebody still starts from."""
        self._quarantine: dict[int, list[int]] = {}
        self._clock = 0

    @property
    def free(self) -> int:
        return len(self._unused)

    @property
    def quarantined(self) -> int:
        return sum(map(len, self._quarantine.values()))

    # --- snapshots at nodes -----------------------------------------------------------------------

    def depths(self, chain: Nodes) -> npt.NDArray[np.int64]:
        """Depths (blocks) of a chain's nodes that have a snapshot, ascending."""
        return np.nonzero(self._slot[chain] != _NO_SLOT)[0] + 1

    def slot(self, node: int) -> int:
        return self._slot.item(node)

    def references(self, node: int) -> int:
        """How many start from the snapshot of `node`."""
        return self._refs.item(node)

    def hold(self, node: int) -> None:
        """Protect the snapshot of `node` from eviction."""
        if not self._refs.item(node):
            self.cached -= 1
        self._refs[node] += 1

    def let_go(self, node: int) -> None:
        """Undo one `hold`; marks the use."""
        self._refs[node] -= 1
        if self._refs.item(node):
            return
        if node in self._orphans:
            self._orphans.remove(node)
            self._clear(node)
            return
        self.cached += 1
        self._use(node)

    def attach(self, node: int, slot: int, *, fresh: bool = False) -> bool:
        """`slot` is the snapshot of `node` from now on; False, and the slot is free, if it has one.

        Nothing that is below a `fresh` node can have a snapshot yet."""
        if self._slot.item(node) != _NO_SLOT:
            self.give([slot])
            return False
        self._slot[node] = slot
        self.cached += 1
        self._link(node, fresh)
        self._use(node)
        return True

    def forget(self, nodes: Nodes) -> Nodes:
        """`nodes` are gone, and their snapshots with them; those that had one. A held one stays until let go."""
        marked: Nodes = nodes[self._slot[nodes] != _NO_SLOT]
        for node in marked.tolist():
            self._unlink(node)
            if self._refs.item(node):
                self._orphans.add(node)
            else:
                self.cached -= 1
                self._clear(node)
        return marked

    def nodes(self) -> Nodes:
        """Every node that shows a snapshot."""
        marked = np.nonzero(self._slot != _NO_SLOT)[0]
        shown: Nodes = marked[~np.isin(marked, list(self._orphans))]
        return shown

    # --- what lies above and below ----------------------------------------------------------------

    def is_superseded(self, node: int) -> bool:
        """Whoever went on from the snapshot of `node` left a deeper one."""
        return len(self._below[node]) == 1 and node not in self._needed

    def _link(self, node: int, fresh: bool) -> None:
        chain = self._chain(node)
        depths = np.nonzero(self._slot[chain[:-1]] != _NO_SLOT)[0]
        above = chain.item(depths[-1]) if len(depths) else _TOP
        lower = () if fresh else [other for other in self._below[above] if self._is_below(other, node, len(chain))]
        self._above[node], self._below[node] = above, dict.fromkeys(lower)
        for other in lower:
            self._above[other] = node
            del self._below[above][other]
        self._below[above][node] = None
        self._queue_superseded(above)

    def _is_below(self, node: int, above: int, depth: int) -> bool:
        chain = self._chain(node)
        return len(chain) > depth and chain.item(depth - 1) == above

    def _unlink(self, node: int) -> None:
        above, lower = self._above.pop(node), self._below.pop(node)
        for other in lower:
            self._above[other] = above
        del self._below[above][node]
        self._below[above].update(lower)
        self._needed.discard(node)
        self._queue_superseded(above)

    def _queue_superseded(self, node: int) -> None:
        if node != _TOP and not self._refs.item(node) and self.is_superseded(node):
            self._superseded.push(self._stamp.item(node), node)

    # --- slots ------------------------------------------------------------------------------------

    def take(self) -> tuple[int, int | None]:
        """A free slot, or that of the snapshot that goes first; the slot and the node that lost it."""
        if self._unused:
            return int(self._unused.take(1)[0]), None
        if not self.cached:
            raise InternalError("no slot is free and none can be evicted although one was promised", field="states")
        node = self._victim()
        slot = self.slot(node)
        self._unlink(node)
        self._slot[node] = _NO_SLOT
        self.cached -= 1
        self.evicted += 1
        return slot, node

    def _victim(self) -> int:
        while self._superseded:
            node = self._oldest(self._superseded)
            if node is not None and self.is_superseded(node):
                return node
        while (node := self._oldest(self._queue)) is None:
            pass
        return node

    def _oldest(self, queue: LeafQueue) -> int | None:
        """The next of a queue; None, and it has gone or is queued again, if it cannot be evicted now."""
        stamp, node = queue.pop()
        if self._slot.item(node) == _NO_SLOT or self._refs.item(node):
            return None
        if self._stamp.item(node) != stamp:
            queue.push(self._stamp.item(node), node)
            return None
        return node

    def give(self, slots: list[int]) -> None:
        """Free `slots` that belong to no node."""
        self._unused.give(np.array(slots, dtype=np.int64))

    def quarantine(self, formation: int, slots: list[int]) -> None:
        """Keep `slots` from everybody until `formation`'s executor has stopped."""
        self._quarantine.setdefault(formation, []).extend(slots)

    def executor_stopped(self, formation: int) -> None:
        self.give(self._quarantine.pop(formation, []))

    def unheld(self) -> list[int]:
        """Every free or quarantined slot (for `check`)."""
        return [*self._unused.all().tolist(), *(slot for slots in self._quarantine.values() for slot in slots)]

    def _use(self, node: int) -> None:
        self._clock += 1
        self._stamp[node] = self._clock
        if self._below[node]:
            self._needed.add(node)
        self._queue.push(self._clock, node)

    def _clear(self, node: int) -> None:
        self.give([self.slot(node)])
        self._slot[node] = _NO_SLOT
