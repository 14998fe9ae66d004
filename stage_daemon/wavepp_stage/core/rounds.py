"""Prepare rounds on one stage: apply each once, in order, and remember the last votes.

Owns the round ordinal of a formation and the votes that a re-delivered round is answered with. A
round applies releases, then revises, then prepares, each entry atomic; a malformed round is refused
before any of it is applied. Does not own holds (the cache manager); machine.py is the only caller.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from wavepp_proto.errors import InvalidRequest, StaleMessage
from wavepp_proto.limits import MAX_ROUND_ENTRIES
from wavepp_proto.terms import (
    CacheGroup,
    GroupBlocks,
    GroupEndpoint,
    HoldKey,
    Prepare,
    Release,
    Revise,
    Round,
    RoundOrdinal,
    Vote,
    VoteOutcome,
    Votes,
)
from wavepp_stage.core.announcements import Announcements
from wavepp_stage.core.cache_manager import CacheManager, Escrow
from wavepp_stage.core.holds import Phase

REMEMBERED_ROUNDS = 64
"""One prepare round is in flight at a time, behind it rounds that only release; a broken stream
re-sends from the last one it saw answered."""
_UNMATERIALISED = (Phase.ESCROWED.value, Phase.COMMITTED.value)


class Rounds:
    """The rounds of one formation. Its first may carry any ordinal: earlier ones died with their formation."""

    def __init__(
        self,
        block_tokens: int,
        cache: CacheManager,
        announcements: Announcements,
        release: Callable[[Release], None],
    ) -> None:
        self._block_tokens = block_tokens
        self._cache = cache
        self._announcements = announcements
        self._release = release
        self.last = RoundOrdinal(0)
        self._answered: deque[Votes] = deque(maxlen=REMEMBERED_ROUNDS)
        self._last_vote: dict[HoldKey, Vote] = {}
        """Of every hold: a repeated prepare is answered alike."""

    def apply(self, asked: Round) -> Votes:
        """Votes of `asked`; the remembered ones if it was applied before. Raises StaleMessage, InvalidRequest."""
        ordinal = RoundOrdinal(asked.fence.ordinal)
        if self.last and ordinal <= self.last:
            return self._replay(ordinal)
        if self.last and ordinal != self.last + 1:
            raise StaleMessage("a round is missing", field="ordinal", value=ordinal, limit=self.last + 1)
        self._check(asked)
        self.last = ordinal
        for release in asked.releases:
            self._release(release)
        votes = [self._revise(revise) for revise in asked.revises]
        votes += [self._prepare(prepare) for prepare in asked.prepares]
        answer = Votes(asked.fence, tuple(votes), self._cache.capacity())
        self._answered.append(answer)
        return answer

    def forget(self, key: HoldKey) -> None:
        """The hold of `key` is gone."""
        self._last_vote.pop(key, None)

    def _replay(self, ordinal: RoundOrdinal) -> Votes:
        for votes in self._answered:
            if votes.fence.ordinal == ordinal:
                return votes
        raise StaleMessage("round too old to be answered again", field="ordinal", value=ordinal, limit=self.last)

    def _prepare(self, asked: Prepare) -> Vote:
        announcement = self._announcements.get(asked.key)
        if announcement is None:
            return Vote(asked.key, VoteOutcome.NOT_ANNOUNCED, 0, 0)
        held = self._last_vote.get(asked.key)
        if held is not None and held.outcome is VoteOutcome.COMMITTED and held.endpoint == asked.candidate:
            return held
        state = self._cache.hold_state(asked.key)
        if state is not None and state.phase not in _UNMATERIALISED:
            outcome = VoteOutcome.COMMITTED if state.endpoint == asked.candidate else VoteOutcome.NO_HOLD
            return Vote(asked.key, outcome, state.endpoint, state.endpoint)
        self._cache.release(asked.key)  # another candidate starts over
        vote = self._lease(asked)
        self.forget(asked.key)
        if vote.outcome is not VoteOutcome.NO_CAPACITY:
            self._last_vote[asked.key] = vote
        return vote

    def _lease(self, asked: Prepare) -> Vote:
        """Lease, then escrow, then commit if the lease is the candidate; all or nothing."""
        known = self._announcements.get(asked.key)
        assert known is not None, "checked by the caller"
        lease = self._cache.lease(asked.key, known.prompt_tokens, known.hashes, asked.candidate, asked.ignore_headroom)
        if lease.shortfall:
            return _no_capacity(asked.key, 0, lease.own_hit, 0, lease.shortfall)
        escrow = self._cache.escrow(asked.key)
        if escrow.shortfall:
            self._cache.release(asked.key)
            return _no_capacity(asked.key, 0, lease.own_hit, escrow.demand, escrow.shortfall)
        if escrow.endpoint < asked.candidate:
            return _promised(asked.key, VoteOutcome.LOWER, lease.own_hit, escrow)
        self._cache.commit(asked.key)
        return _promised(asked.key, VoteOutcome.COMMITTED, lease.own_hit, escrow)

    def _revise(self, asked: Revise) -> Vote:
        held, state = self._last_vote.get(asked.key), self._cache.hold_state(asked.key)
        if held is None or state is None or state.phase not in _UNMATERIALISED:
            return Vote(asked.key, VoteOutcome.NO_HOLD, 0, 0)
        if asked.endpoint > held.endpoint:
            return replace(held, outcome=VoteOutcome.LOWER)
        escrow = self._cache.revise(asked.key, asked.endpoint)
        if escrow.shortfall:
            return _no_capacity(asked.key, held.endpoint, held.own_hit, escrow.demand, escrow.shortfall)
        vote = _promised(asked.key, VoteOutcome.COMMITTED, held.own_hit, escrow)
        self._last_vote[asked.key] = vote
        return vote

    def _check(self, asked: Round) -> None:
        entries = len(asked.revises) + len(asked.prepares)
        if entries > MAX_ROUND_ENTRIES:
            raise InvalidRequest("too many entries in a round", field="round", value=entries, limit=MAX_ROUND_ENTRIES)
        for prepare in asked.prepares:
            self._check_endpoint(prepare.candidate, "candidate", prepare.group_endpoints)
        for revise in asked.revises:
            self._check_endpoint(revise.endpoint, "endpoint", revise.group_endpoints)

    def _check_endpoint(self, endpoint: int, field: str, groups: tuple[GroupEndpoint, ...]) -> None:
        if endpoint < 0 or endpoint % self._block_tokens:
            raise InvalidRequest(
                "an endpoint is a multiple of the block size", field=field, value=endpoint, limit=self._block_tokens
            )
        for group in groups:
            if group.group is not CacheGroup.ATTENTION:
                raise InvalidRequest("this stage has no such cache group", field="group", value=group.group.value)


def _promised(key: HoldKey, outcome: VoteOutcome, own_hit: int, escrow: Escrow) -> Vote:
    return Vote(
        key,
        outcome,
        escrow.endpoint,
        own_hit,
        demand_blocks=escrow.demand,
        backed_free=escrow.backed_free,
        backed_offload=escrow.backed_offload,
        backed_evict=escrow.backed_evict,
    )


def _no_capacity(key: HoldKey, endpoint: int, own_hit: int, demand: int, shortfall: int) -> Vote:
    missing = (GroupBlocks(CacheGroup.ATTENTION, shortfall),)
    return Vote(key, VoteOutcome.NO_CAPACITY, endpoint, own_hit, demand_blocks=demand, shortfall=missing)
