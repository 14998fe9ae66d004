"""Waiting behind a request that computes the same prefix right now (DESIGN.md, in-flight sharing).

Owns who is parked behind whom, the offer that a holder makes (how far its prefix is shared, and would be
reusable), and the stop and snapshot that the one in front is given there. A parked request holds nothing
and stands in no order; it comes back, with its old place, when the boundary can be reused or the one in
front is gone. Called by `admission`, which owns the holders.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from wavepp_controller.core import traced
from wavepp_controller.core.attempt import Behind
from wavepp_controller.core.config import ControllerConfig
from wavepp_controller.core.fresh import common_blocks, hash_at
from wavepp_controller.core.index import ReuseIndex
from wavepp_controller.core.order import goes_before
from wavepp_controller.core.request import Request
from wavepp_controller.core.request_table import RequestInput, RequestState
from wavepp_controller.core.snapshot_policy import SnapshotPolicy
from wavepp_proto.terms import HoldKey

MOST_STOPS = 4
"""Chunks of one request that end early for others: each may cost a part of a wave."""


@dataclass(frozen=True, slots=True)
class Offer:
    front: Request
    boundary: int
    """Tokens; where reuse of its prefix would end."""

    @property
    def published(self) -> bool:
        """The front has computed it on every stage, digests are on their way: nothing to wait for."""
        return self.front.current.computed >= self.boundary


class Sharing:
    def __init__(self, policy: SnapshotPolicy, config: ControllerConfig) -> None:
        self._policy, self._most_parks = policy, config.most_parks
        least = policy.block_tokens if config.share_tokens is None else config.share_tokens
        self._least = least and max(least, policy.block_tokens)
        self._parked: dict[HoldKey, dict[int, dict[str, Request]]] = {}
        """By front, boundary and id, in order: a burst of equal prompts has one boundary, looked up once."""

    def __iter__(self) -> Iterator[Request]:
        return (one for places in self._parked.values() for parked in places.values() for one in parked.values())

    def __contains__(self, request: Request) -> bool:
        behind = request.current.behind
        return behind is not None and request.id in self._parked.get(behind.front, {}).get(behind.boundary, ())

    def offer(self, request: Request, holders: Iterable[Request]) -> Offer | None:
        """The best that any holder promises beyond the hint; None if none promises enough."""
        best, beaten, size = None, request.current.candidate, self._policy.block_tokens
        if request.chain is None or not self._least or beaten + self._least > request.cap:
            return None
        enough = beaten + self._least
        wanted = hash_at(request.chain, beaten // size)
        for front in holders:
            # the cheap test first: with many holders most share nothing beyond what is beaten already
            if front.chain is None or hash_at(front.chain, beaten // size) != wanted or front.root != request.root:
                continue
            boundary = self._boundary(request, front, beaten)
            if boundary >= enough and boundary > beaten:
                best, beaten = Offer(front, boundary), boundary
                wanted = hash_at(request.chain, beaten // size)
        if best is None or best.published or request.current.parks < self._most_parks:
            return best
        return None

    def park(self, request: Request, offer: Offer, now: float) -> None:
        """`request` waits, holding nothing; the front is asked to end a chunk, with a snapshot, at the boundary."""
        front, boundary, current = offer.front, offer.boundary, request.current
        self._ask(front, boundary)
        if not current.parks:
            current.hint_when_parked = current.candidate
        current.parks += 1
        current.behind = Behind(front.key, boundary, now)
        self._parked.setdefault(front.key, {}).setdefault(boundary, {})[request.id] = request
        request.advance(RequestInput.BEHIND, now)
        traced.parked(request, front.id, boundary)

    def shown(self, holders: Mapping[str, Request], index: ReuseIndex) -> list[Request]:
        """Who need not wait any longer: the boundary can be reused, or its front is gone."""
        found: list[Request] = []
        for key, places in self._parked.items():
            front = holders.get(key.request_id)
            for boundary, parked in places.items():
                gone = front is None or front.key != key
                done = front is not None and front.current.computed >= boundary
                if gone or done or _reusable(next(iter(parked.values())), boundary, index):
                    found += parked.values()
        return found

    def leave(self, request: Request, now: float) -> int:
        """Stop waiting, for whatever reason; the milliseconds it waited."""
        behind = request.current.behind
        if behind is None:
            return 0
        places = self._parked[behind.front]
        del places[behind.boundary][request.id]
        if not places[behind.boundary]:
            del places[behind.boundary]
        if not places:
            del self._parked[behind.front]
        request.current.behind = None
        return round((now - behind.since) * 1e3)

    def check(self, holders: Mapping[str, Request]) -> list[str]:
        findings = []
        for key, places in self._parked.items():
            front = holders.get(key.request_id)
            for request in (request for parked in places.values() for request in parked.values()):
                if front is None or front.key != key:
                    findings.append(f"{request.id} waits behind {key.request_id}, which is gone")
                if request.state is not RequestState.WAITING or request not in self:
                    findings.append(f"{request.id} is {request.state.value} and counted as waiting behind another")
        return findings

    # --- the boundary ---------------------------------------------------------------------------

    def _boundary(self, request: Request, front: Request, beaten: int) -> int:
        """How far `request` could reuse what `front` computes (tokens); 0 if certainly not beyond `beaten`,
        up to where, and for a block more, their prefixes are the same."""
        known = beaten // self._policy.block_tokens
        chain, other = request.chain, front.chain
        if chain is None or other is None or known >= min(chain.size, other.size):
            return 0
        boundary = min(common_blocks(chain, other, known + 1) * self._policy.block_tokens, request.cap)
        if self._policy.most:
            boundary = self._snapshot_at(front, boundary)
        if front.current.scheduled < boundary and goes_before(request, front):
            return 0  # an urgent request does not stand behind one that may itself be overtaken
        return boundary

    def _snapshot_at(self, front: Request, most: int) -> int:
        """The deepest place of at most `most` tokens where `front` takes a snapshot, or still can."""
        asked = front.current.wanted_snapshots
        if most in self._positions(front, (*asked, most)):  # asked last: whatever others wait for stays
            return most
        places = (*front.current.taken_snapshots, *self._positions(front, asked))
        return max((place for place in places if place <= most), default=0)

    def _positions(self, front: Request, wanted: tuple[int, ...]) -> tuple[int, ...]:
        """Snapshots that `front` has yet to take, if these were wanted of it."""
        current = front.current
        if front.admitted:
            room = current.promised_snapshots - len(current.taken_snapshots)
            return self._policy.positions(current.scheduled, front.prompt_tokens, wanted, room)
        room = self._policy.promised(current.candidate, front.prompt_tokens)
        return self._policy.positions(current.candidate, front.prompt_tokens, wanted, room)

    def _ask(self, front: Request, boundary: int) -> None:
        current = front.current
        if boundary <= current.scheduled:
            return
        if len(current.stops) < MOST_STOPS and boundary not in current.stops:
            current.stops = tuple(sorted((*current.stops, boundary)))
        if self._policy.most and boundary not in current.wanted_snapshots:
            current.wanted_snapshots += (boundary,)
            if front.admitted:
                current.snapshots = self._positions(front, current.wanted_snapshots)


def _reusable(request: Request, boundary: int, index: ReuseIndex) -> bool:
    return request.chain is not None and index.reusable_to(request.chain, boundary // request.block_tokens)
