"""StageAdmission: rounds and votes (the critical path of every admission), releases, inventory.

Rounds and votes are filled in place and read field by field: 32 prepares cost about as much as one
block hash. Announcements are in `announce.py`.
"""

from __future__ import annotations

from wavepp_proto import limits
from wavepp_proto.convert import _check
from wavepp_proto.convert import common as c
from wavepp_proto.terms import (
    Fence,
    HoldState,
    Inventory,
    Prepare,
    Release,
    Revise,
    Round,
    RoundOrdinal,
    Vote,
    VoteOutcome,
    Votes,
    WaveOrdinal,
)
from wavepp_proto.v1 import admission_pb2 as pb

_OUTCOME_TO_PB = {
    VoteOutcome.COMMITTED: pb.VOTE_OUTCOME_COMMITTED,
    VoteOutcome.LOWER: pb.VOTE_OUTCOME_LOWER,
    VoteOutcome.NO_CAPACITY: pb.VOTE_OUTCOME_NO_CAPACITY,
    VoteOutcome.NOT_ANNOUNCED: pb.VOTE_OUTCOME_NOT_ANNOUNCED,
    VoteOutcome.NO_HOLD: pb.VOTE_OUTCOME_NO_HOLD,
}
_OUTCOME_FROM_PB: dict[int, VoteOutcome] = {number: outcome for outcome, number in _OUTCOME_TO_PB.items()}

RUNNING_HASH_BYTES = 32


def _fill_release(out: pb.Release, release: Release) -> None:
    c.fill_hold_key(out.key, release.key)
    if release.after_wave is not None:
        out.after_wave = release.after_wave
    out.ended = release.ended


def _fill_revise(out: pb.Revise, revise: Revise) -> None:
    c.fill_hold_key(out.key, revise.key)
    out.endpoint = revise.endpoint
    out.snapshots = revise.snapshots
    if revise.group_endpoints:
        out.group_endpoints.extend(c.group_endpoints_to_pb(revise.group_endpoints))


def _fill_prepare(out: pb.Prepare, prepare: Prepare) -> None:
    c.fill_hold_key(out.key, prepare.key)
    out.candidate = prepare.candidate
    out.snapshots = prepare.snapshots
    out.ignore_headroom = prepare.ignore_headroom
    if prepare.group_endpoints:
        out.group_endpoints.extend(c.group_endpoints_to_pb(prepare.group_endpoints))


def round_to_pb(term: Round) -> pb.Round:
    out = pb.Round(deadline_ms=term.deadline_ms)
    c.fill_fence(out.fence, term.fence)
    for release in term.releases:
        _fill_release(out.releases.add(), release)
    for revise in term.revises:
        _fill_revise(out.revises.add(), revise)
    for prepare in term.prepares:
        _fill_prepare(out.prepares.add(), prepare)
    return out


def round_from_pb(msg: pb.Round) -> Round:
    """Raises InvalidRequest when the fence is missing or more entries come than a round may hold."""
    _check.present("fence", msg.HasField("fence"))
    revises, prepares = msg.revises, msg.prepares
    _check.at_most("round entries", len(revises) + len(prepares), limits.MAX_ROUND_ENTRIES)
    return Round(
        c.fence_from_pb(msg.fence),
        msg.deadline_ms,
        tuple([_release_from_pb(item) for item in msg.releases]),
        tuple([_revise_from_pb(item) for item in revises]),
        tuple([_prepare_from_pb(item) for item in prepares]),
    )


def _release_from_pb(msg: pb.Release) -> Release:
    after = WaveOrdinal(msg.after_wave) if msg.HasField("after_wave") else None
    return Release(c.hold_key_from_pb(msg.key), after, msg.ended)


def _revise_from_pb(msg: pb.Revise) -> Revise:
    groups = c.group_endpoints_from_pb(msg.group_endpoints)
    return Revise(c.hold_key_from_pb(msg.key), msg.endpoint, groups, msg.snapshots)


def _prepare_from_pb(msg: pb.Prepare) -> Prepare:
    return Prepare(
        c.hold_key_from_pb(msg.key),
        msg.candidate,
        c.group_endpoints_from_pb(msg.group_endpoints),
        msg.snapshots,
        msg.ignore_headroom,
    )


def votes_to_pb(term: Votes) -> pb.Votes:
    out = pb.Votes()
    c.fill_fence(out.fence, term.fence)
    c.fill_capacity(out.capacity, term.capacity)
    for vote in term.votes:
        _fill_vote(out.votes.add(), vote)
    return out


def _fill_vote(out: pb.Vote, vote: Vote) -> None:
    c.fill_hold_key(out.key, vote.key)
    out.outcome = _OUTCOME_TO_PB[vote.outcome]
    out.endpoint = vote.endpoint
    out.own_hit = vote.own_hit
    out.demand_blocks = vote.demand_blocks
    out.backed_free = vote.backed_free
    out.backed_offload = vote.backed_offload
    out.backed_evict = vote.backed_evict
    if vote.group_endpoints:
        out.group_endpoints.extend(c.group_endpoints_to_pb(vote.group_endpoints))
    if vote.shortfall:
        out.shortfall.extend(c.group_blocks_to_pb(vote.shortfall))


def votes_from_pb(msg: pb.Votes) -> Votes:
    """Raises InvalidRequest when fence or capacity is missing, or more votes come than a round asks for."""
    _check.present("fence", msg.HasField("fence"))
    _check.present("capacity", msg.HasField("capacity"))
    votes = msg.votes
    _check.at_most("votes", len(votes), limits.MAX_ROUND_ENTRIES)
    return Votes(
        c.fence_from_pb(msg.fence), tuple([_vote_from_pb(item) for item in votes]), c.capacity_from_pb(msg.capacity)
    )


def _vote_from_pb(msg: pb.Vote) -> Vote:
    return Vote(
        c.hold_key_from_pb(msg.key),
        _check.one_of("outcome", msg.outcome, _OUTCOME_FROM_PB),
        msg.endpoint,
        msg.own_hit,
        c.group_endpoints_from_pb(msg.group_endpoints),
        msg.demand_blocks,
        c.group_blocks_from_pb(msg.shortfall),
        msg.backed_free,
        msg.backed_offload,
        msg.backed_evict,
    )


def inventory_request_to_pb(fence: Fence) -> pb.InventoryRequest:
    return pb.InventoryRequest(fence=c.fence_to_pb(fence))


def inventory_request_from_pb(msg: pb.InventoryRequest) -> Fence:
    _check.present("fence", msg.HasField("fence"))
    return c.fence_from_pb(msg.fence)


def inventory_to_pb(term: Inventory) -> pb.InventoryResponse:
    return pb.InventoryResponse(
        fence=c.fence_to_pb(term.fence),
        holds=[_hold_state_to_pb(hold) for hold in term.holds],
        announced=[c.hold_key_to_pb(key) for key in term.announced],
        last_round=term.last_round,
        last_wave=term.last_wave,
        running_hash=term.running_hash,
        capacity=c.capacity_to_pb(term.capacity),
        pool_blocks=term.pool_blocks,
        cached_blocks=term.cached_blocks,
        quarantined_blocks=term.quarantined_blocks,
        handoffs=term.handoffs,
        state_slots=term.state_slots,
        cached_states=term.cached_states,
        quarantined_states=term.quarantined_states,
        host_pool_blocks=term.host_pool_blocks,
        host_cached_blocks=term.host_cached_blocks,
    )


def inventory_from_pb(msg: pb.InventoryResponse) -> Inventory:
    """Raises InvalidRequest when fence or capacity is missing or the running hash has another size."""
    _check.present("fence", msg.HasField("fence"))
    _check.present("capacity", msg.HasField("capacity"))
    return Inventory(
        fence=c.fence_from_pb(msg.fence),
        holds=tuple(_hold_state_from_pb(hold) for hold in msg.holds),
        announced=tuple(c.hold_key_from_pb(key) for key in msg.announced),
        last_round=RoundOrdinal(msg.last_round),
        last_wave=WaveOrdinal(msg.last_wave),
        running_hash=running_hash(msg.running_hash),
        capacity=c.capacity_from_pb(msg.capacity),
        pool_blocks=msg.pool_blocks,
        cached_blocks=msg.cached_blocks,
        quarantined_blocks=msg.quarantined_blocks,
        handoffs=tuple(msg.handoffs),
        state_slots=msg.state_slots,
        cached_states=msg.cached_states,
        quarantined_states=msg.quarantined_states,
        host_pool_blocks=msg.host_pool_blocks,
        host_cached_blocks=msg.host_cached_blocks,
    )


def running_hash(data: bytes) -> bytes:
    """A SHA-256, or empty outside a formation."""
    return data if not data else _check.exactly("running_hash", data, RUNNING_HASH_BYTES)


def _hold_state_to_pb(hold: HoldState) -> pb.HoldState:
    return pb.HoldState(
        key=c.hold_key_to_pb(hold.key),
        phase=hold.phase,
        endpoint=hold.endpoint,
        leased_blocks=hold.leased_blocks,
        escrow_blocks=hold.escrow_blocks,
        owned_blocks=hold.owned_blocks,
        escrow_states=hold.escrow_states,
        owned_states=hold.owned_states,
    )


def _hold_state_from_pb(msg: pb.HoldState) -> HoldState:
    return HoldState(
        key=c.hold_key_from_pb(msg.key),
        phase=msg.phase,
        endpoint=msg.endpoint,
        leased_blocks=msg.leased_blocks,
        escrow_blocks=msg.escrow_blocks,
        owned_blocks=msg.owned_blocks,
        escrow_states=msg.escrow_states,
        owned_states=msg.owned_states,
    )
