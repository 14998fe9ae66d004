"""Copies between the tiers: numbered lots, a bounded number of them under way, ended in order.

    planned ──take──▶ under way ──report──▶ (earlier lots ended?) ──▶ ended
       └──────────── cancel ────────────────────────────────────────▶ ended, failed

One copy thread runs lots one at a time in number order, so a lot may read what an earlier one writes,
and overwrite what an earlier one reads. Reports may come in any order; a lot ends only after all earlier
ones, so "ended up to n" is all that a hold has to wait for. Owns numbers and order. What an ended lot
changes is residency.py's, the only caller.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from wavepp_stage.core.block_pool import Blocks
from wavepp_stage.core.tier import Nodes
from wavepp_stage.core.work import CopyDirection, CopyLot

MAX_LOTS = 4
"""Lots under way at once: enough to keep a copy thread busy, few enough to be cancelled late."""
MAX_COPIES = 256
"""Blocks in one lot."""


@dataclass(slots=True, eq=False)
class Lot:
    copy: CopyLot
    nodes: Nodes
    """Whose block each copy moves."""
    ok: bool | None = None
    """What was reported; None so far."""
    formation: int | None = None
    """Formation that ended while this was under way."""


class CopyQueue:
    """The lots of one cache."""

    def __init__(self) -> None:
        self.ended = 0
        """All lots up to this number have ended."""
        self._last = 0
        self._planned: deque[Lot] = deque()
        self._started: deque[Lot] = deque()
        """Handed out and not ended, in number order."""

    def plan(self, direction: CopyDirection, nodes: Nodes, device: Blocks, host: Blocks) -> list[Lot]:
        """Lots for these copies, at most MAX_COPIES each, in the order given."""
        lots = []
        for at in range(0, len(nodes), MAX_COPIES):
            part = slice(at, at + MAX_COPIES)
            self._last += 1
            lots.append(Lot(CopyLot(self._last, direction, device[part], host[part]), nodes[part]))
        self._planned.extend(lots)
        return lots

    def take(self) -> list[CopyLot]:
        """Lots to be started now; each is given out once."""
        taken: list[CopyLot] = []
        under_way = sum(lot.ok is None for lot in self._started)
        while self._planned and under_way + len(taken) < MAX_LOTS:
            lot = self._planned.popleft()
            self._started.append(lot)
            taken.append(lot.copy)
        return taken

    def report(self, number: int, ok: bool) -> list[Lot]:
        """A started lot is complete or failed; the lots that ended by it, in order. An unknown number ended before:
        nothing."""
        for lot in self._started:
            if lot.copy.number == number and lot.ok is None:
                lot.ok = ok
        return self.settle()

    def end_formation(self, formation: int) -> list[Lot]:
        """Copies of an ended formation: those that were not started never will be, and are returned; the others
        may still move. The caller undoes what was cancelled, then calls `settle`."""
        cancelled = list(self._planned)
        self._planned.clear()
        for lot in cancelled:
            lot.ok = False
        for lot in self._started:
            if lot.formation is None:
                lot.formation = formation
        self._started.extend(cancelled)
        return cancelled

    def executor_stopped(self, formation: int) -> list[Lot]:
        """Nothing of `formation` moves any more, nor what was started before it: what was not reported has failed."""
        last = max((lot.copy.number for lot in self._started if lot.formation == formation), default=0)
        for lot in self._started:
            if lot.copy.number <= last and lot.ok is None:
                lot.ok = False
        return self.settle()

    def unended(self) -> list[Lot]:
        """Every lot that may still move something (for `check`)."""
        return [*self._started, *self._planned]

    def settle(self) -> list[Lot]:
        """Lots that end now: all up to the first that may still move."""
        ended = []
        while self._started and self._started[0].ok is not None:
            ended.append(self._started.popleft())
            self.ended = ended[-1].copy.number
        return ended
