"""Requests that are ready to be prepared, in the order in which they may be (DESIGN.md).

Owns the question whether the first may be tried: it is HINTED, or it is WAITING for room and a later
capacity of every short daemon covers what was missing, or its timer ran out. While it may not, nothing
behind it is. Places are given once, so a request that comes back stands where it stood.
"""

from __future__ import annotations

from collections.abc import Mapping

from wavepp_controller.core.formation import Daemon
from wavepp_controller.core.order import RankedOrder
from wavepp_controller.core.request import Request
from wavepp_controller.core.request_table import RequestState
from wavepp_proto.terms import Capacity, DaemonKey


def room(capacity: Capacity) -> int:
    """Blocks that an escrow could still be backed with."""
    return capacity.free_blocks + capacity.evictable_blocks - capacity.escrowed_blocks


def slots(capacity: Capacity) -> int:
    """The same in recurrent slots."""
    return capacity.recurrent_free + capacity.recurrent_evictable - capacity.recurrent_escrowed


class ReadyOrder(RankedOrder):
    """HINTED and WAITING requests of one formation."""

    def __init__(self, daemons: Mapping[DaemonKey, Daemon], most_bypasses: int, aged_every: int) -> None:
        super().__init__(most_bypasses, aged_every)
        self._daemons = daemons

    def first(self, now: float) -> Request | None:
        """The head, if it may be tried."""
        head = self.head
        if head is None or (head.state is RequestState.WAITING and not self._due(head, now)):
            return None
        return head

    def take(self, request: Request) -> None:
        """It is prepared now."""
        self.discard(request)
        self.serve(request)

    def next_retry(self) -> float | None:
        head = self.head
        return head.current.retry_at if head is not None and head.state is RequestState.WAITING else None

    def _due(self, request: Request, now: float) -> bool:
        if now >= request.current.retry_at:
            return True
        shortages = request.current.shortages
        return bool(shortages) and all(
            (capacity := self._daemons[key].capacity) is not None
            and capacity.seq > shortage.seq
            and room(capacity) >= shortage.wanted_blocks
            and slots(capacity) >= shortage.wanted_slots
            for key, shortage in shortages.items()
        )
