"""Requests that are ready to be prepared, first come first served (DESIGN.md section 6).

Owns their order and the question whether the first may be tried: it is HINTED, or it is WAITING and a
later capacity of every short daemon covers what was missing, or its timer ran out. Places are given
once, so a request that comes back stands where it stood.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping

from wavepp_controller.core.formation import Daemon
from wavepp_controller.core.request import Request
from wavepp_controller.core.request_table import RequestState
from wavepp_proto.terms import Capacity, DaemonKey


def room(capacity: Capacity) -> int:
    """Blocks that an escrow could still be backed with."""
    return capacity.free_blocks + capacity.evictable_blocks - capacity.escrowed_blocks


class ReadyOrder:
    """HINTED and WAITING requests of one formation."""

    def __init__(self, daemons: Mapping[DaemonKey, Daemon]) -> None:
        self._daemons = daemons
        self._order: list[Request] = []

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._order)

    def __contains__(self, request: Request) -> bool:
        at = bisect_left(self._order, request.place, key=_place)
        return at < len(self._order) and self._order[at] is request

    @property
    def head(self) -> Request | None:
        return self._order[0] if self._order else None

    def add(self, request: Request) -> None:
        insort(self._order, request, key=_place)

    def discard(self, request: Request) -> None:
        at = bisect_left(self._order, request.place, key=_place)
        if at < len(self._order) and self._order[at] is request:
            del self._order[at]

    def take(self, now: float) -> Request | None:
        """The first, out of the order, if it may be tried: nothing behind it is, while it waits."""
        head = self.head
        if head is None or (head.state is RequestState.WAITING and not self._due(head, now)):
            return None
        return self._order.pop(0)

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
            for key, shortage in shortages.items()
        )


def _place(request: Request) -> int:
    return request.place
