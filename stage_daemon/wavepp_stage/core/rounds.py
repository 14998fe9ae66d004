"""Prepare rounds on one stage: apply each once, in order, and remember the last votes.

Owns the round ordinal of a formation and the votes that a re-delivered round is answered with. A
round applies releases, then revises, then prepares, each entry atomic, behind what was announced with it; a
malformed round is refused before any of it is applied. Does not own holds (the cache manager); machine.py is
the only caller.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from wavepp_proto.errors import InternalError, InvalidRequest, QueueFull, StaleMessage
from wavepp_proto.limits import MAX_ROUND_ENTRIES, MAX_STATE_SLOTS
from wavepp_proto.terms import (
    AnnounceFrame,
    CacheGroup,
    GroupBlocks,
    GroupEndpoint,
    HoldKey,
    JoinPlan,
    Prepare,
    Release,
    Revise,
    Round,
    RoundOrdinal,
    Vote,
    VoteOutcome,
    Votes,
)
from wavepp_stage.core.announcements import Announcement, Announcements
from wavepp_stage.core.cache_manager import CacheManager, Escrow, Lease, Shortfall
from wavepp_stage.core.holds import Phase

REMEMBERED_ROUNDS = 64
"""Twice what a controller leaves unanswered: a prepare round and, behind it, rounds that only release. A stream
that was opened again starts with the first of them."""
_TREE = frozenset({CacheGroup.ATTENTION})
"""Every stage numbers blocks, one without attention layers too."""
_UNMATERIALISED = (Phase.ESCROWED.value, Phase.COMMITTED.value)


class Rounds:
    """The rounds of one formation. Its first may carry any ordinal: earlier ones died with their formation."""

    def __init__(
        self,
        plan: JoinPlan,
        cache: CacheManager,
        announcements: Announcements,
        release: Callable[[Release], None],
    ) -> None:
        self._block_tokens = plan.block_tokens
        self._groups = _TREE | set(plan.groups)
        self._cache = cache
        self._announcements = announcements
        self._release = release
        self.last = RoundOrdinal(max(0, plan.first_round - 1))
        self._in_order = plan.first_round > 0
        """`last` says what comes next; not so before the first round of a controller that does not tell."""
        self._answered: deque[Votes] = deque(maxlen=REMEMBERED_ROUNDS)
        self._last_vote: dict[HoldKey, tuple[Vote, int]] = {}
        """Of every hold, with the snapshots it was promised: a repeated prepare is answered alike."""

    def apply(self, asked: Round, announces: Sequence[AnnounceFrame] = ()) -> Votes:
        """Votes of `asked`; the remembered ones if it was applied before. Raises StaleMessage, InvalidRequest."""
        ordinal = RoundOrdinal(asked.fence.ordinal)
        if self._in_order and ordinal <= self.last:
            return self._replay(ordinal)
        if self._in_order and ordinal != self.last + 1:
            raise StaleMessage("a round is missing", field="ordinal", value=ordinal, limit=self.last + 1)
        self._check(asked)
        self.last, self._in_order = ordinal, True
        for frame in announces:
            self._hear(frame)
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

    def _hear(self, frame: AnnounceFrame) -> None:
        """What is refused of it is not known here, and its prepare is answered so."""
        with suppress(InvalidRequest, QueueFull):
            self._announcements.add(frame, self._block_tokens)

    def _replay(self, ordinal: RoundOrdinal) -> Votes:
        for votes in self._answered:
            if votes.fence.ordinal == ordinal:
                return votes
        raise StaleMessage("round too old to be answered again", field="ordinal", value=ordinal, limit=self.last)

    def _prepare(self, asked: Prepare) -> Vote:
        announcement = self._announcements.get(asked.key)
        if announcement is None:
            return Vote(asked.key, VoteOutcome.NOT_ANNOUNCED, 0, 0)
        held, snapshots = self._last_vote.get(asked.key, (None, 0))
        if held is not None and _answers(held, asked.candidate) and snapshots == asked.snapshots:
            return held
        state = self._cache.hold_state(asked.key)
        if state is not None and state.phase not in _UNMATERIALISED:
            outcome = VoteOutcome.COMMITTED if state.endpoint == asked.candidate else VoteOutcome.NO_HOLD
            return Vote(asked.key, outcome, state.endpoint, state.endpoint)
        if state is not None:
            self._cache.release(asked.key)  # another candidate starts over
        vote = self._lease(asked, announcement)
        self.forget(asked.key)
        if vote.outcome is not VoteOutcome.NO_CAPACITY:
            self._last_vote[asked.key] = (vote, asked.snapshots)
        return vote

    def _lease(self, asked: Prepare, known: Announcement) -> Vote:
        """Lease, then escrow, then commit if the lease is the candidate; all or nothing."""
        key = asked.key
        lease = self._cache.lease(
            key,
            known.prompt_tokens,
            known.hashes,
            asked.candidate,
            asked.snapshots,
            asked.ignore_headroom,
            known.token_ids,
        )
        if lease.shortfall:
            return _nothing(key, lease, 0, lease.shortfall)
        escrow, outcome = self._cache.escrow(key), VoteOutcome.LOWER
        if not escrow.shortfall and escrow.endpoint == asked.candidate:
            escrow, outcome = self._cache.commit(key), VoteOutcome.COMMITTED
        if escrow.shortfall:
            self._cache.release(key)
            return _nothing(key, lease, escrow.demand, escrow.shortfall)
        return _promised(key, outcome, lease.own_hit, lease.group_hits, escrow)

    def _revise(self, asked: Revise) -> Vote:
        held, _ = self._last_vote.get(asked.key, (None, 0))
        state = self._cache.hold_state(asked.key)
        if held is None or state is None or state.phase not in _UNMATERIALISED:
            return Vote(asked.key, VoteOutcome.NO_HOLD, 0, 0)
        if asked.endpoint > held.endpoint:
            return replace(held, outcome=VoteOutcome.LOWER)
        escrow = self._cache.revise(asked.key, asked.endpoint, asked.snapshots)
        if escrow.shortfall:
            missing = _missing(escrow.shortfall)
            return replace(held, outcome=VoteOutcome.NO_CAPACITY, demand_blocks=escrow.demand, shortfall=missing)
        exact = escrow.endpoint == asked.endpoint
        outcome = VoteOutcome.COMMITTED if exact else VoteOutcome.LOWER
        vote = _promised(asked.key, outcome, held.own_hit, held.group_endpoints, escrow)
        self._last_vote[asked.key] = (vote, asked.snapshots)
        return vote

    def _check(self, asked: Round) -> None:
        entries = len(asked.revises) + len(asked.prepares)
        if entries > MAX_ROUND_ENTRIES:
            raise InvalidRequest("too many entries in a round", field="round", value=entries, limit=MAX_ROUND_ENTRIES)
        for prepare in asked.prepares:
            self._check_entry(prepare.candidate, "candidate", prepare.group_endpoints, prepare.snapshots)
        for revise in asked.revises:
            self._check_entry(revise.endpoint, "endpoint", revise.group_endpoints, revise.snapshots)

    def _check_entry(self, endpoint: int, field: str, groups: tuple[GroupEndpoint, ...], snapshots: int) -> None:
        self._check_endpoint(endpoint, field)
        for group in groups:
            if group.group not in self._groups:
                raise InvalidRequest("this stage has no such cache group", field="group", value=group.group.value)
            self._check_endpoint(group.endpoint, "group_endpoints")
        if not 0 <= snapshots <= MAX_STATE_SLOTS:
            raise InvalidRequest(
                "snapshots are counted in slots", field="snapshots", value=snapshots, limit=MAX_STATE_SLOTS
            )

    def _check_endpoint(self, endpoint: int, field: str) -> None:
        if endpoint < 0 or endpoint % self._block_tokens:
            raise InvalidRequest(
                "an endpoint is a multiple of the block size", field=field, value=endpoint, limit=self._block_tokens
            )

    def check(self) -> None:
        """Verify that the last vote about each hold tells what is held; raises InternalError."""
        for key, (vote, _) in self._last_vote.items():
            state = self._cache.hold_state(key)
            if state is None or state.endpoint != vote.endpoint:
                raise InternalError(
                    "a vote is remembered that no hold keeps",
                    field="endpoint",
                    value=vote.endpoint,
                    limit=state.endpoint if state else None,
                )


def _answers(held: Vote, candidate: int) -> bool:
    """The hold that was voted for is what a prepare at `candidate` asks for."""
    return held.outcome is VoteOutcome.COMMITTED and held.endpoint == candidate


def _nothing(key: HoldKey, lease: Lease, demand: int, shortfall: Shortfall) -> Vote:
    missing = _missing(shortfall)
    return Vote(key, VoteOutcome.NO_CAPACITY, 0, lease.own_hit, lease.group_hits, demand, missing)


def _promised(
    key: HoldKey, outcome: VoteOutcome, own_hit: int, group_hits: tuple[GroupEndpoint, ...], escrow: Escrow
) -> Vote:
    return Vote(
        key,
        outcome,
        escrow.endpoint,
        own_hit,
        group_hits,
        escrow.demand,
        backed_free=escrow.backed_free,
        backed_offload=escrow.backed_offload,
        backed_evict=escrow.backed_evict,
    )


def _missing(shortfall: Shortfall) -> tuple[GroupBlocks, ...]:
    counts = ((CacheGroup.ATTENTION, shortfall.blocks), (CacheGroup.RECURRENT, shortfall.states))
    return tuple(GroupBlocks(group, missing) for group, missing in counts if missing)
