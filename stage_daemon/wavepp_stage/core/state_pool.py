"""The slots of the recurrent group: working states of sequences, and snapshots at tree nodes.

Every slot is in exactly one place, and the counts sum to the number of slots:

    | free | cached | held | quarantined |

    cached       a node's snapshot that nobody starts from: reusable, evictable by itself
    held         a snapshot somebody starts from, a working state, or a snapshot not published yet
    quarantined  freed by a formation's end; its executor may still write it

Owns slots, which node has which snapshot, and their eviction order (least recently used first). Does
not own nodes (block_tree.py) or promises to holds (block_cache.py). A snapshot may go without its
node; a node takes its snapshot along.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from wavepp_proto.errors import InternalError
from wavepp_stage.core.id_stack import IdStack
from wavepp_stage.core.leaf_queue import LeafQueue
from wavepp_stage.core.tier import Nodes

_NO_SLOT = -1


class StatePool:
    """Slots 0 .. slots - 1 for nodes 0 <= node < nodes."""

    def __init__(self, slots: int, nodes: int) -> None:
        self.size = slots
        self.cached = 0
        """Snapshots nobody starts from."""
        self.evicted = 0
        """Snapshots evicted to make room, so far."""
        self._unused = IdStack(0, slots)
        self._slot = np.full(nodes, _NO_SLOT, dtype=np.int32)
        self._refs = np.zeros(nodes, dtype=np.int32)
        self._stamp = np.zeros(nodes, dtype=np.int64)
        self._queue = LeafQueue(nodes)
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

    def attach(self, node: int, slot: int) -> bool:
        """`slot` is the snapshot of `node` from now on; False, and the slot is free, if it has one."""
        if self._slot.item(node) != _NO_SLOT:
            self.give([slot])
            return False
        self._slot[node] = slot
        self.cached += 1
        self._use(node)
        return True

    def forget(self, nodes: Nodes) -> Nodes:
        """`nodes` are gone, and their snapshots with them; those that had one. A held one stays until let go."""
        marked: Nodes = nodes[self._slot[nodes] != _NO_SLOT]
        for node in marked.tolist():
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

    # --- slots ------------------------------------------------------------------------------------

    def take(self) -> tuple[int, int | None]:
        """A free slot, or that of the least recently used snapshot; the slot and the node that lost it."""
        if self._unused:
            return int(self._unused.take(1)[0]), None
        if not self.cached:
            raise InternalError("no slot is free and none can be evicted although one was promised", field="states")
        while True:
            stamp, node = self._queue.pop()
            if self._slot.item(node) == _NO_SLOT or self._refs.item(node):
                continue
            if self._stamp.item(node) != stamp:
                self._queue.push(self._stamp.item(node), node)
                continue
            self.cached -= 1
            self.evicted += 1
            slot = self.slot(node)
            self._slot[node] = _NO_SLOT
            return slot, node

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
        self._queue.push(self._clock, node)

    def _clear(self, node: int) -> None:
        self.give([self.slot(node)])
        self._slot[node] = _NO_SLOT
