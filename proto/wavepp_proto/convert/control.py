"""StageControl: what makes a standing daemon part of a formation, and what ends that."""

from __future__ import annotations

from wavepp_proto import limits
from wavepp_proto.convert import _check
from wavepp_proto.convert import common as c
from wavepp_proto.terms import (
    CacheGroup,
    ErrorInfo,
    Fence,
    Incarnation,
    JoinPlan,
    JoinReply,
    LinkKind,
    Peer,
    RoundOrdinal,
)
from wavepp_proto.v1 import control_pb2 as pb

_LINK_TO_PB = {
    LinkKind.NONE: pb.LINK_KIND_NONE,
    LinkKind.GLOO: pb.LINK_KIND_GLOO,
    LinkKind.NCCL: pb.LINK_KIND_NCCL,
    LinkKind.GRPC: pb.LINK_KIND_GRPC,
}
_LINK_FROM_PB: dict[int, LinkKind] = {number: link for link, number in _LINK_TO_PB.items()}


def join_plan_to_pb(plan: JoinPlan) -> pb.JoinRequest:
    return pb.JoinRequest(
        fence=c.fence_to_pb(plan.fence),
        key=c.daemon_key_to_pb(plan.key),
        stages=plan.stages,
        ranks=plan.ranks,
        model_fingerprint=plan.model_fingerprint,
        first_layer=plan.first_layer,
        last_layer=plan.last_layer,
        block_tokens=plan.block_tokens,
        pool_blocks=plan.pool_blocks,
        host_pool_blocks=plan.host_pool_blocks,
        floor_blocks=plan.floor_blocks,
        wave_tokens=plan.wave_tokens,
        lanes=plan.lanes,
        link=_LINK_TO_PB[plan.link],
        link_store=plan.link_store,
        peers=[_peer_to_pb(peer) for peer in plan.peers],
        deadline_ms=plan.deadline_ms,
        heartbeat_ms=plan.heartbeat_ms,
        silence_ms=plan.silence_ms,
        state_slots=plan.state_slots,
        groups=[c.GROUP_TO_PB[group] for group in plan.groups],
        first_round=plan.first_round,
    )


def join_plan_from_pb(msg: pb.JoinRequest) -> JoinPlan:
    """Raises InvalidRequest naming the first field that no pipeline could have."""
    _check.present("fence", msg.HasField("fence"))
    _check_shape(msg)
    return JoinPlan(
        fence=c.fence_from_pb(msg.fence),
        key=c.daemon_key_from_pb(msg.key),
        stages=msg.stages,
        ranks=msg.ranks,
        model_fingerprint=msg.model_fingerprint,
        first_layer=msg.first_layer,
        last_layer=msg.last_layer,
        block_tokens=msg.block_tokens,
        pool_blocks=msg.pool_blocks,
        host_pool_blocks=msg.host_pool_blocks,
        floor_blocks=msg.floor_blocks,
        wave_tokens=msg.wave_tokens,
        lanes=msg.lanes,
        link=_check.one_of("link", msg.link, _LINK_FROM_PB),
        link_store=msg.link_store,
        peers=tuple(_peer_from_pb(peer) for peer in msg.peers),
        deadline_ms=msg.deadline_ms,
        heartbeat_ms=msg.heartbeat_ms,
        silence_ms=msg.silence_ms,
        state_slots=msg.state_slots,
        groups=tuple(c.group_from_pb(group) for group in msg.groups) or (CacheGroup.ATTENTION,),
        first_round=RoundOrdinal(msg.first_round),
    )


def _check_shape(msg: pb.JoinRequest) -> None:
    stages = _check.at_most("stages", _check.at_least("stages", msg.stages, 1), limits.MAX_STAGES)
    _check.at_most("key.stage", msg.key.stage, stages - 1)
    ranks = _check.at_most("ranks", _check.at_least("ranks", msg.ranks, 1), limits.MAX_RANKS)
    _check.at_most("key.rank", msg.key.rank, ranks - 1)
    _check.at_most("peers", len(msg.peers), stages * ranks)
    _check.at_least("last_layer", msg.last_layer, msg.first_layer + 1)
    _check.at_most("block_tokens", _check.at_least("block_tokens", msg.block_tokens, 1), limits.MAX_BLOCK_TOKENS)
    _check.at_least("pool_blocks", msg.pool_blocks, 1)
    _check.at_most("floor_blocks", msg.floor_blocks, msg.pool_blocks)
    _check.at_most("state_slots", msg.state_slots, limits.MAX_STATE_SLOTS)
    _check.at_least("wave_tokens", msg.wave_tokens, 1)
    _check.at_most("lanes", _check.at_least("lanes", msg.lanes, 1), limits.MAX_LANES)
    _check.at_least("silence_ms", msg.silence_ms, _check.at_least("heartbeat_ms", msg.heartbeat_ms, 1) + 1)


def _peer_to_pb(peer: Peer) -> pb.Peer:
    return pb.Peer(
        key=c.daemon_key_to_pb(peer.key),
        incarnation=peer.incarnation,
        address=peer.address,
        link_address=peer.link_address,
        first_layer=peer.first_layer,
        last_layer=peer.last_layer,
        engine_load=peer.engine_load,
        pool_blocks=peer.pool_blocks,
    )


def _peer_from_pb(msg: pb.Peer) -> Peer:
    return Peer(
        c.daemon_key_from_pb(msg.key),
        Incarnation(msg.incarnation),
        msg.address,
        msg.link_address,
        msg.first_layer,
        msg.last_layer,
        msg.engine_load,
        msg.pool_blocks,
    )


def join_reply_to_pb(reply: JoinReply) -> pb.JoinResponse:
    return pb.JoinResponse(
        fence=c.fence_to_pb(reply.fence),
        key=c.daemon_key_to_pb(reply.key),
        pool_blocks=reply.pool_blocks,
        needs_tokens=reply.needs_tokens,
        groups=[c.GROUP_TO_PB[group] for group in reply.groups],
        hidden=reply.hidden,
        bytes_per_block=reply.bytes_per_block,
        capacity=c.capacity_to_pb(reply.capacity),
        device=reply.device,
        loaded_layers=reply.loaded_layers,
        state_slots=reply.state_slots,
        bytes_per_state=reply.bytes_per_state,
        engine_load=reply.engine_load,
        host_pool_blocks=reply.host_pool_blocks,
        wave_allowance_ms=reply.wave_allowance_ms,
    )


def join_reply_from_pb(msg: pb.JoinResponse) -> JoinReply:
    """Raises InvalidRequest when fence or capacity is missing, a group is unknown or a pool larger than any may be."""
    _check.present("fence", msg.HasField("fence"))
    _check.present("capacity", msg.HasField("capacity"))
    _check.at_most("pool_blocks", msg.pool_blocks, limits.MAX_POOL_BLOCKS)
    _check.at_most("host_pool_blocks", msg.host_pool_blocks, limits.MAX_POOL_BLOCKS)
    _check.at_most("state_slots", msg.state_slots, limits.MAX_STATE_SLOTS)
    return JoinReply(
        fence=c.fence_from_pb(msg.fence),
        key=c.daemon_key_from_pb(msg.key),
        pool_blocks=msg.pool_blocks,
        needs_tokens=msg.needs_tokens,
        groups=tuple(c.group_from_pb(group) for group in msg.groups),
        hidden=msg.hidden,
        bytes_per_block=msg.bytes_per_block,
        capacity=c.capacity_from_pb(msg.capacity),
        device=msg.device,
        loaded_layers=tuple(msg.loaded_layers),
        state_slots=msg.state_slots,
        bytes_per_state=msg.bytes_per_state,
        engine_load=msg.engine_load,
        host_pool_blocks=msg.host_pool_blocks if msg.HasField("host_pool_blocks") else None,
        wave_allowance_ms=msg.wave_allowance_ms if msg.HasField("wave_allowance_ms") else None,
    )


def end_formation_to_pb(fence: Fence, cause: ErrorInfo | None = None) -> pb.EndFormationRequest:
    out = pb.EndFormationRequest(fence=c.fence_to_pb(fence))
    if cause is not None:
        c.fill_error(out.cause, cause)
    return out


def end_formation_from_pb(msg: pb.EndFormationRequest) -> tuple[Fence, ErrorInfo | None]:
    _check.present("fence", msg.HasField("fence"))
    return c.fence_from_pb(msg.fence), c.error_from_pb(msg.cause) if msg.HasField("cause") else None


def drain_stage_to_pb(fence: Fence, deadline_ms: int) -> pb.DrainStageRequest:
    return pb.DrainStageRequest(fence=c.fence_to_pb(fence), deadline_ms=deadline_ms)


def drain_stage_from_pb(msg: pb.DrainStageRequest) -> tuple[Fence, int]:
    """The fence and the remaining milliseconds."""
    _check.present("fence", msg.HasField("fence"))
    return c.fence_from_pb(msg.fence), msg.deadline_ms


def refuse_to_pb(fence: Fence, error: ErrorInfo | None) -> pb.RefuseRequest:
    out = pb.RefuseRequest(fence=c.fence_to_pb(fence))
    if error is not None:
        c.fill_error(out.error, error)
    return out


def refuse_from_pb(msg: pb.RefuseRequest) -> tuple[Fence, ErrorInfo | None]:
    """The fence and why the daemon is refused, None if it is not any more. Raises InvalidRequest on more text than a
    log line should have."""
    _check.present("fence", msg.HasField("fence"))
    fence = c.fence_from_pb(msg.fence)
    if not msg.HasField("error"):
        return fence, None
    _check.text("error.reason", msg.error.reason)
    _check.text("error.message", msg.error.message, limits.MAX_REFUSAL_CHARS)
    _check.at_most("error.fields", len(msg.error.fields), limits.MAX_REFUSAL_FIELDS)
    for name, value in msg.error.fields.items():
        _check.text("error.fields", name)
        _check.text("error.fields", value)
    return fence, c.error_from_pb(msg.error)
