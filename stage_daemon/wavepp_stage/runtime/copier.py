"""The copy thread: a stage's copies between device and host, beside the executor (DESIGN.md).

Owns the order in which lots run (as handed over, one at a time) and what became of each. Does not own
which blocks are copied, nor when: the core says so with StartCopies and hears CopiesEnded. Lots come
from both threads of a daemon; nothing here waits for either of them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from wavepp_proto.errors import EngineFault, WaveppError
from wavepp_proto.runtime.logs import get_log
from wavepp_stage.core.events import CopiesEnded
from wavepp_stage.core.work import CopyDirection, CopyLot
from wavepp_stage.engine.base import StageEngine
from wavepp_stage.runtime.core_shell import CoreShell

log = get_log("wavepp.stage.copier")

RecordCopy = Callable[[CopyLot, int, int, bool], None]
"""(lot, wall-clock start and end in ns, whether it is complete)."""
DRAIN_S: Final = 30.0
"""Longest wait for copies under way: far beyond any copy, so what takes longer hangs."""


class CopyCounts:
    """What the copy thread did since it started. Every key is there from the start: a scrape copies these dicts
    while the thread counts."""

    def __init__(self) -> None:
        self.blocks = {direction.value: 0 for direction in CopyDirection}
        """Copied, by direction."""
        self.seconds = {direction.value: 0.0 for direction in CopyDirection}
        self.failed_lots = 0


class Copier:
    """One thread. `start` never blocks; `drain` and `close` wait, bounded."""

    def __init__(self, core: CoreShell, engine: StageEngine, record: RecordCopy, name: str) -> None:
        """`record` is told of each lot, on the copy thread."""
        self._core = core
        self._engine = engine
        self._record = record
        self._condition = threading.Condition()
        self._lots: deque[CopyLot] = deque()
        self._busy = False
        self._closing = False
        self.on_ended: Callable[[], None] = lambda: None
        """Called on the copy thread after each lot, once the core knows."""
        self.counts = CopyCounts()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def start(self, lot: CopyLot) -> None:
        """Queue a lot behind the earlier ones. Called under the core's mutex, which keeps their order."""
        with self._condition:
            if not self._closing:
                self._lots.append(lot)
                self._condition.notify_all()

    def drain(self, timeout_s: float = DRAIN_S) -> None:
        """Wait until every lot handed over is complete, and those that its end set free as well.

        Raises EngineFault after `timeout_s`: a copy hangs, and may still write."""
        with self._condition:
            if not self._condition.wait_for(lambda: not self._lots and not self._busy, timeout_s):
                raise EngineFault(
                    f"copies between device and host did not end within {timeout_s:g} s",
                    field="copies", value=len(self._lots) + self._busy, limit=f"{timeout_s:g} s",
                )  # fmt: skip

    def close(self, timeout_s: float) -> bool:
        """Drop what has not begun and stop; True if the thread ended in time (else it is abandoned)."""
        with self._condition:
            self._closing = True
            self._lots.clear()
            self._condition.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    # --- the thread -------------------------------------------------------------------------------

    def _loop(self) -> None:
        while (lot := self._next()) is not None:
            started_ns = time.time_ns()
            ok = self._copy(lot)
            self._record(lot, started_ns, time.time_ns(), ok)
            try:
                self._core.post(CopiesEnded(lot.number, ok, time.monotonic()))
            except WaveppError as error:
                log.error("the core refused the end of a copy", lot=lot.number, reason=error.reason)
            self.on_ended()
            with self._condition:
                self._busy = False
                self._condition.notify_all()

    def _next(self) -> CopyLot | None:
        with self._condition:
            self._condition.wait_for(lambda: self._lots or self._closing)
            if self._closing:
                return None
            self._busy = True
            return self._lots.popleft()

    def _copy(self, lot: CopyLot) -> bool:
        """Whether the lot is complete. An engine may raise anything; the core drops what did not move."""
        direction, started = lot.direction.value, time.perf_counter()
        try:
            self._engine.copy(lot)
        except EngineFault as error:
            log.warning("a copy failed", lot=lot.number, direction=direction, blocks=len(lot), error=error.message)
        except Exception as error:
            log.exception("a copy failed", error, lot=lot.number, direction=direction, blocks=len(lot))
        else:
            self.counts.blocks[direction] += len(lot)
            return True
        finally:
            self.counts.seconds[direction] += time.perf_counter() - started
        self.counts.failed_lots += 1
        return False
