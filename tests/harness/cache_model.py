"""A stage's cache that is too simple to be wrong: prefixes in a dict, everything else found by scanning.

Predicts what the real one must answer: endpoints and own hits of every group, room and shortfalls, who
is evicted, moved or lost, which copies are planned, and how far materialising gets. It has no block
numbers; where they could go wrong, the test that drives both looks at what blocks contain.
"""

from __future__ import annotations

from tests.harness.cache_model_parts import ModelHold, ModelLot, Node, Prefix, Snapshot
from tests.harness.stage_core import B
from wavepp_proto.hashing import reuse_cap
from wavepp_proto.terms import CacheGroup, HoldKey
from wavepp_stage.core.cache_shape import CacheShape


class CacheModel:
    """Every answer and every move of one cache."""

    def __init__(self, shape: CacheShape, slice_blocks: int, lot_copies: int, lots: int) -> None:
        self.shape, self.slice, self.lot_copies, self.max_lots = shape, slice_blocks, lot_copies, lots
        self.host_size = shape.host_pool_blocks if shape.attention else 0
        self.nodes: dict[Prefix, Node] = {}
        self.holds: dict[HoldKey, ModelHold] = {}
        self.dying: dict[int, list[ModelHold]] = {}
        self.lots: list[ModelLot] = []
        """Not ended, in order."""
        self.ended = self.last = self.clock = 0
        self.zombies: list[Node] = []
        """Lost, still held."""
        self.orphans: list[Snapshot] = []

    # --- counts -----------------------------------------------------------------------------------

    def _all(self) -> list[ModelHold]:
        return [*self.holds.values(), *(hold for group in self.dying.values() for hold in group)]

    @property
    def free(self) -> int:
        used = sum(node.device for node in self.nodes.values()) + sum(hold.private for hold in self._all())
        return self.shape.pool_blocks - used - sum(len(lot.nodes) for lot in self.lots if lot.onboard)

    @property
    def evictable(self) -> int:
        return sum(node.device and not node.refs for node in self.nodes.values())

    @property
    def escrowed(self) -> int:
        return sum(hold.escrow for hold in self.holds.values())

    @property
    def host_free(self) -> int:
        return self.host_size - sum(not node.device for node in self.nodes.values()) - len(self.zombies)

    def snapshots(self) -> list[tuple[Node, Snapshot]]:
        return [(node, node.snapshot) for node in self.nodes.values() if node.snapshot is not None]

    @property
    def free_states(self) -> int:
        slots = self.shape.state_slots if self.shape.recurrent else 0
        return slots - len(self.snapshots()) - len(self.orphans) - sum(hold.slots for hold in self._all())

    @property
    def evictable_states(self) -> int:
        return sum(not snapshot.refs for _, snapshot in self.snapshots())

    @property
    def escrowed_states(self) -> int:
        return sum(hold.escrow_states for hold in self.holds.values())

    def room(self, hold: ModelHold) -> int:
        others = any(other is not hold and other.phase != "owned" for other in self.holds.values())
        floor = 0 if hold.ignore_floor and not others else self.shape.floor_blocks
        return self.free + self.evictable - self.escrowed - floor

    def missing(self, hold: ModelHold, blocks: int, states: int) -> tuple[int, int]:
        slots = self.free_states + self.evictable_states - self.escrowed_states
        return max(0, blocks - self.room(hold)), max(0, states - slots)

    # --- admission --------------------------------------------------------------------------------

    def chain(self, tokens: list[int], blocks: int) -> list[Node]:
        """Resident nodes of the first `blocks` blocks of a prompt."""
        prefixes = [tuple(tokens[: depth * B]) for depth in range(1, blocks + 1)]
        return [self.nodes[prefix] for prefix in prefixes if prefix in self.nodes]

    def usable(self, chain: list[Node]) -> int:
        """Blocks of a resident chain that all groups can use."""
        if not self.shape.recurrent:
            return len(chain)
        return max((depth for depth, node in enumerate(chain, 1) if node.snapshot is not None), default=0)

    def hits(self, tokens: list[int]) -> dict[CacheGroup, int]:
        chain = self.chain(tokens, reuse_cap(len(tokens), B) // B)
        hits = {CacheGroup.ATTENTION: len(chain) * B, CacheGroup.RECURRENT: self.usable(chain) * B}
        return {group: hits[group] for group in self.shape.groups}

    def demand_states(self, snapshots: int) -> int:
        return 1 + snapshots if self.shape.recurrent else 0

    def lease(self, hold: ModelHold, candidate: int) -> tuple[int, int]:
        """What is missing; nothing, and the lease is held."""
        chain = self.chain(hold.tokens, min(candidate, reuse_cap(len(hold.tokens), B)) // B)
        chain = chain[: self.usable(chain)]
        start = chain[-1].snapshot if chain and self.shape.recurrent else None
        blocks = hold.blocks - sum(node.device and node.refs > 0 for node in chain)
        states = self.demand_states(hold.snapshots) + (start is not None and not start.refs)
        missing = self.missing(hold, blocks, states)
        if not any(missing):
            hold.chain, hold.leased = chain, len(chain)
            self.hold_nodes(chain)
            self._start_from(hold, start)
        return missing

    def revise(self, hold: ModelHold, endpoint: int, snapshots: int) -> tuple[int, int]:
        kept = [node for node in hold.chain[: endpoint // B] if not node.lost]
        kept = kept[: self.usable(kept)]
        trimmed = hold.chain[len(kept) :]
        start = kept[-1].snapshot if kept and self.shape.recurrent else None
        demand = hold.blocks - sum(node.device for node in kept)
        regained = sum(node.device and node.refs == 1 for node in trimmed)
        states = self.demand_states(snapshots) - hold.escrow_states
        if start is not hold.start:
            states += start is not None and not start.refs
            states -= hold.start is not None and hold.start.refs == 1
        missing = self.missing(hold, demand - hold.escrow - regained, states)
        if any(missing):
            return missing
        old, hold.start = hold.start, None
        self._start_from(hold, start)
        self._let_go(old)
        self.drop(trimmed)
        hold.chain, hold.leased, hold.snapshots = kept, len(kept), snapshots
        hold.escrow, hold.escrow_states = demand, self.demand_states(snapshots)
        hold.phase = "committed" if len(kept) * B == endpoint else "escrowed"
        return missing

    def hold_nodes(self, chain: list[Node]) -> None:
        for node in chain:
            node.refs += 1

    def drop(self, chain: list[Node]) -> None:
        self.clock += 1
        for node in chain:
            node.refs -= 1
            node.stamp = self.clock
            if node.lost and not node.refs:
                self.zombies.remove(node)

    def _start_from(self, hold: ModelHold, start: Snapshot | None) -> None:
        hold.start = start
        if start is not None:
            start.refs += 1

    def _let_go(self, start: Snapshot | None) -> None:
        if start is None:
            return
        start.refs -= 1
        if start.refs:
            return
        if start in self.orphans:
            self.orphans.remove(start)
            return
        self._use(next(node for node, shot in self.snapshots() if shot is start), start)

    def _use(self, node: Node, snapshot: Snapshot) -> None:
        self.clock += 1
        snapshot.stamp = self.clock
        snapshot.needed = snapshot.needed or bool(self.next_below(node))

    def next_below(self, node: Node) -> list[Node]:
        """Nodes with the next deeper snapshot on each chain."""
        deeper = [other for other, _ in self.snapshots() if other.prefix[: len(node.prefix)] == node.prefix]
        deeper.remove(node)
        return [
            one
            for one in deeper
            if not any(
                len(other.prefix) < len(one.prefix) and one.prefix[: len(other.prefix)] == other.prefix
                for other in deeper
            )
        ]

    # --- moving -----------------------------------------------------------------------------------

    def materialise(self, hold: ModelHold) -> str:
        hold.phase = "materialising"
        if hold.lost:
            return "void"
        homeless = [node for node in hold.chain if not node.device and node.incoming is None]
        hold.escrow = len(homeless) + hold.blocks - hold.leased - hold.private
        free = min(hold.escrow, self.free)
        evicted = min(hold.escrow - free, self.slice)
        moved = self._evict(evicted)
        hold.after = max(hold.after, self._plan(False, moved))
        hold.escrow -= free + evicted
        back = homeless[: free + evicted]
        hold.private += free + evicted - len(back)
        self._plan(True, back)
        hold.after = max([hold.after, *(node.incoming.number for node in hold.chain if node.incoming is not None)])
        if hold.escrow:
            return "more"
        if hold.after > self.ended:
            return "copying"
        if self.shape.recurrent:
            hold.working = True
            hold.escrow_states -= 1
            self.make_slot()
        hold.phase = "owned"
        return "done"

    def _evict(self, count: int) -> list[Node]:
        """Off-load or drop; the nodes that moved."""
        moved: list[Node] = []
        for _ in range(count):
            victim = self._oldest_leaf(device=True)
            victim.device = False
            moved.append(victim)
            if self.host_free < 0:
                gone = self._oldest_leaf(device=False)
                del self.nodes[gone.prefix]
                if gone in moved:
                    moved.remove(gone)
        return moved

    def _oldest_leaf(self, device: bool) -> Node:
        tier = [node for node in self.nodes.values() if node.device is device]
        parents = {node.prefix[:-B] for node in tier}
        leaves = [node for node in tier if not node.refs and node.prefix not in parents]
        return min(leaves, key=lambda node: node.stamp)

    def _plan(self, onboard: bool, nodes: list[Node]) -> int:
        for at in range(0, len(nodes), self.lot_copies):
            self.last += 1
            lot = ModelLot(self.last, onboard, nodes[at : at + self.lot_copies])
            self.lots.append(lot)
            for node in lot.nodes:
                if onboard:
                    node.incoming = lot
                else:
                    node.writer = lot
        return self.last if nodes else 0

    def make_slot(self) -> None:
        """One slot more is in use: if none was free a snapshot goes, the superseded before the others, of each the
        least recently used."""
        if self.free_states < 0:
            unheld = [(node, shot) for node, shot in self.snapshots() if not shot.refs]
            superseded = [(node, shot) for node, shot in unheld if len(self.next_below(node)) == 1 and not shot.needed]
            node, _ = min(superseded or unheld, key=lambda pair: pair[1].stamp)
            node.snapshot = None

    def publish(self, hold: ModelHold, tokens: int) -> None:
        end = tokens // B
        if hold.publishing:
            known = self.chain(hold.tokens, end)[len(hold.chain) :]
            if sum(node.device and not node.refs for node in known) > max(0, self.room(hold)):
                hold.publishing = False
            else:
                for node in known:
                    if not node.device:
                        node.device, node.incoming, node.writer = True, None, None
                        hold.private -= 1
                for depth in range(len(hold.chain) + len(known) + 1, end + 1):
                    node = Node(tuple(hold.tokens[: depth * B]))
                    self.nodes[node.prefix] = node
                    known.append(node)
                    hold.private -= 1
                self.hold_nodes(known)
                hold.chain += known
        if hold.void:
            return
        start, hold.start = hold.start, None
        self._let_go(start)
        for position in [at for at in hold.planned if at <= tokens]:
            hold.planned.remove(position)
            known_node = self.nodes.get(tuple(hold.tokens[:position]))
            if known_node is not None and known_node.snapshot is None:
                known_node.snapshot = Snapshot()
                self._use(known_node, known_node.snapshot)

    # --- copies -----------------------------------------------------------------------------------

    def take_lots(self) -> list[ModelLot]:
        under_way = sum(lot.started and lot.ok is None for lot in self.lots)
        waiting = [lot for lot in self.lots if not lot.started and lot.ok is None]
        taken = waiting[: self.max_lots - under_way]
        for lot in taken:
            lot.started = True
        return taken

    def report(self, number: int, ok: bool) -> None:
        for lot in self.lots:
            if lot.number == number and lot.ok is None:
                lot.ok = ok
        self._settle()

    def _settle(self) -> None:
        while self.lots and self.lots[0].ok is not None:
            lot = self.lots.pop(0)
            self.ended = lot.number
            for node in [node for node in lot.nodes if node.incoming is lot]:
                node.incoming = None
                if lot.ok:
                    node.device = node.device or not node.lost
                else:
                    self._lose(node)
            for node in [node for node in lot.nodes if node.writer is lot]:
                node.writer = None
                if not lot.ok and not node.device:
                    self._lose(node)
        for name, hold in list(self.holds.items()):
            if hold.release_waits and hold.lost and hold.after <= self.ended:
                self.retire(name)

    def _lose(self, root: Node) -> None:
        if self.nodes.get(root.prefix) is not root:
            return
        for node in [node for node in self.nodes.values() if node.prefix[: len(root.prefix)] == root.prefix]:
            del self.nodes[node.prefix]
            node.lost = True
            if node.refs:
                self.zombies.append(node)
            if node.snapshot is not None and node.snapshot.refs:
                self.orphans.append(node.snapshot)

    # --- giving back ------------------------------------------------------------------------------

    def retire(self, name: HoldKey) -> None:
        hold = self.holds.pop(name)
        self._let_go(hold.start)
        self.drop(hold.chain)

    def end_formation(self, formation: int) -> None:
        for name, hold in list(self.holds.items()):
            hold.escrow = hold.escrow_states = 0
            if hold.phase in ("materialising", "owned"):
                self.dying.setdefault(formation, []).append(self.holds.pop(name))
            else:
                self.retire(name)
        for lot in [lot for lot in self.lots if not lot.started]:
            lot.ok = False
            for node in lot.nodes:
                if lot.onboard and node.incoming is lot:
                    node.incoming = None
                if node.writer is lot and not node.device:
                    self._lose(node)
        for lot in self.lots:
            lot.formation = formation if lot.formation is None else lot.formation
        self._settle()

    def executor_stopped(self, formation: int) -> None:
        last = max((lot.number for lot in self.lots if lot.formation == formation), default=0)
        for lot in self.lots:
            if lot.number <= last and lot.ok is None:
                lot.ok = False
        self._settle()
        for hold in self.dying.pop(formation, []):
            self._let_go(hold.start)
            self.drop(hold.chain)
