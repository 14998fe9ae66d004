"""The copy thread of one stage in virtual time: lots one at a time, in the order in which the core made them.

Follows `wavepp_stage.runtime.copier`. Owns what is queued and under way, and which lot fails; the blocks are
the core's, the cells the engine's. A lot takes its time by the block, beside the executor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from wavepp_proto.errors import EngineFault
from wavepp_simulator.executor import Costs
from wavepp_simulator.ledger import Violation
from wavepp_stage.core import events as ev
from wavepp_stage.core.work import CopyLot

if TYPE_CHECKING:
    from wavepp_simulator.stage import SimStage


class SimCopier:
    def __init__(self, stage: SimStage, costs: Costs, rng: Random) -> None:
        self._stage, self._costs, self._rng = stage, costs, rng
        self.failing = 0
        """Lots that a scenario wants to fail."""
        self._lots: deque[CopyLot] = deque()
        self._busy = False
        self._drained: list[Callable[[], None]] = []

    @property
    def idle(self) -> bool:
        return not self._busy and not self._lots

    def start(self, lot: CopyLot) -> None:
        """Queue a lot behind the earlier ones."""
        self._lots.append(lot)
        self._next()

    def drain(self, done: Callable[[], None]) -> None:
        """`done` once every lot is complete, those that their ends set free as well."""
        if self.idle:
            done()
        else:
            self._drained.append(done)

    def _next(self) -> None:
        if self._busy or not self._lots:
            return
        self._busy, lot = True, self._lots.popleft()
        self._at_engine(lot, self._stage.engine.begin_copy)
        self._stage.world.note(self._stage.process.name, _words(lot, "begins"), "copy")
        self._stage.process.after(self._costs.copy_block_s * len(lot), lambda: self._end(lot))

    def _end(self, lot: CopyLot) -> None:
        ok = not self._fails()
        if not ok:
            self._stage.world.copies_failed = True
        else:
            self._at_engine(lot, self._stage.engine.end_copy)
        self._stage.world.note(self._stage.process.name, _words(lot, "is complete" if ok else "fails"), "copy")
        self._stage.post(ev.CopiesEnded(lot.number, ok, self._stage.now))
        self._busy = False
        self._next()
        self._stage.executor.copy_ended()
        if self.idle:
            drained, self._drained = self._drained, []
            for done in drained:
                done()

    def _at_engine(self, lot: CopyLot, work: Callable[[CopyLot], None]) -> None:
        try:
            work(lot)
        except EngineFault as fault:
            raise Violation("I3", f"stage {self._stage.name}: {fault.message}") from fault

    def _fails(self) -> bool:
        if self.failing:
            self.failing -= 1
            return True
        return bool(self._costs.copy_failures) and self._rng.random() < self._costs.copy_failures


def _words(lot: CopyLot, what: str) -> str:
    blocks = "1 block" if len(lot) == 1 else f"{len(lot)} blocks"
    return f"{lot.direction.value} {lot.number} of {blocks} {what}"
