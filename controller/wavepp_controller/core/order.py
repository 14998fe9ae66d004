"""First come first served within priority classes, with bounded bypass (DESIGN.md, order).

Owns an ordered set of requests and the count of who overtook whom: a request goes before those that came
earlier with a lower priority. One that was overtaken as often as the setting allows is aged: it stands before every
class, but only one token in so many that are served may be of an aged one: at three times the load that can be served
everything below the high class is aged, and would hold it up. Used for the ready order and for the lanes of waves.
Does not decide whether a request may be served.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from heapq import heappop, heappush
from math import inf

from wavepp_controller.core.request import Request


class RankedOrder:
    def __init__(self, most_bypasses: int, aged_every: int) -> None:
        self._most, self._aged_every = most_bypasses, aged_every
        self._owed = 0.0
        """Tokens to be served before the next aged request: `aged_every` times those of the last one, its own too."""
        self._aged: list[tuple[float, int, Request]] = []
        """Heap by (place, life): overtaken often enough and not promoted yet; an entry may be out of date."""
        self._order: list[Request] = []
        self._counted: tuple[int, int] | None = None
        """(life, place) of the last one served, as long as all that it overtakes have counted it."""

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._order)

    def __contains__(self, request: Request) -> bool:
        return self._at(request) is not None

    @property
    def head(self) -> Request | None:
        return self._order[0] if self._order else None

    @property
    def peers(self) -> int:
        """How many are of the head's class, itself included."""
        return self._end_of_class(self._order[0]) if self._order else 0

    def add(self, request: Request) -> None:
        if not self._most:
            request.promoted = True  # classes count for nothing
        elif len(request.overtaken_by) >= self._most and not request.promoted:
            heappush(self._aged, (request.place, request.life, request))
        if self._counted is not None and request.life != self._counted[0] and request.place < self._counted[1]:
            self._counted = None
        insort(self._order, request, key=_rank)

    def discard(self, request: Request) -> None:
        at = self._at(request)
        if at is not None:
            del self._order[at]

    def serve(self, request: Request) -> None:
        """`request` is served now: whoever came earlier and stands behind it was overtaken, once by each.

        Visits those alone, and none for one that is served again and again because it lacks room: so each request is
        visited about `most_bypasses` times in all, however many stand here."""
        counted = (request.life, request.place)
        if counted == self._counted:
            return
        for other in self._overtaken(request):
            other.overtaken_by.add(request.life)
            if len(other.overtaken_by) == self._most and not other.promoted:
                heappush(self._aged, (other.place, other.life, other))
        self._counted = counted
        self._owed = max(0.0, self._owed - request.prompt_tokens)
        self._promote()

    def _promote(self) -> None:
        """The next aged request stands before every class, if enough others were served since the last."""
        while self._aged and not self._owed:
            _, _, request = heappop(self._aged)
            if request in self and not request.promoted:
                self.discard(request)
                request.promoted = True
                self._owed = float(self._aged_every) * request.prompt_tokens
                self.add(request)

    def _overtaken(self, request: Request) -> list[Request]:
        """In each class below that of `request`, those that came earlier."""
        found: list[Request] = []
        at = self._end_of_class(request)
        while at < len(self._order):
            place: tuple[bool, int, float] = (*_rank(self._order[at])[:2], request.place)
            found += self._order[at : bisect_left(self._order, place, lo=at, key=_rank)]
            at = self._end_of_class(self._order[at])
        return found

    def _end_of_class(self, request: Request) -> int:
        """Where the class below that of `request` begins."""
        return bisect_right(self._order, (*_rank(request)[:2], inf), key=_rank)

    def check(self) -> list[str]:
        ranks = [_rank(request) for request in self._order]
        return [] if ranks == sorted(set(ranks)) else ["an order is not first come first served within its classes"]

    def _at(self, request: Request) -> int | None:
        at = bisect_left(self._order, _rank(request), key=_rank)
        return at if at < len(self._order) and self._order[at] is request else None


def goes_before(one: Request, other: Request) -> bool:
    """Whether `one` is of a higher class than `other`, wherever they came from."""
    return _rank(one)[:2] < _rank(other)[:2]


def _rank(request: Request) -> tuple[bool, int, float]:
    """Who goes first: the smaller."""
    return not request.promoted, 0 if request.promoted else -request.prefill.priority, request.place
