"""Rules about a JoinPlan on the stage's side: is it sane, and does it need another cache.

Owns these two questions only; what engines can load is theirs to refuse (engine/base.py).
"""

from __future__ import annotations

from wavepp_proto.errors import JoinRefused
from wavepp_proto.limits import MAX_BLOCK_TOKENS, MAX_LANES, MAX_POOL_BLOCKS, MAX_RANKS, MAX_STAGES, MAX_STATE_SLOTS
from wavepp_proto.terms import NOTHING_LOADED, CacheGroup, JoinPlan

MIN_STATE_SLOTS = 2
"""A sequence's working state, and one snapshot beside it."""


def check_plan(plan: JoinPlan) -> None:
    """Raise JoinRefused naming the first field out of range."""
    _check_groups(plan)
    recurrent = CacheGroup.RECURRENT in plan.groups
    ranges = [
        ("stages", plan.stages, 1, MAX_STAGES),
        ("stage", plan.key.stage, 0, plan.stages - 1),
        ("ranks", plan.ranks, 1, MAX_RANKS),
        ("rank", plan.key.rank, 0, plan.ranks - 1),
        ("block_tokens", plan.block_tokens, 1, MAX_BLOCK_TOKENS),
        ("pool_blocks", plan.pool_blocks, 1, MAX_POOL_BLOCKS),
        ("host_pool_blocks", plan.host_pool_blocks, 0, MAX_POOL_BLOCKS),
        ("state_slots", plan.state_slots, MIN_STATE_SLOTS * recurrent, MAX_STATE_SLOTS * recurrent),
        ("floor_blocks", plan.floor_blocks, 0, plan.pool_blocks - 1),
        ("lanes", plan.lanes, 1, MAX_LANES),
        ("wave_tokens", plan.wave_tokens, 1, None),
        ("silence_ms", plan.silence_ms, 1, None),
        ("last_layer", plan.last_layer, plan.first_layer + 1, None),
    ]
    for name, value, least, most in ranges:
        if value < least:
            raise JoinRefused(f"{name} is too small", field=name, value=value, limit=least)
        if most is not None and value > most:
            raise JoinRefused(f"{name} is too large", field=name, value=value, limit=most)


def _check_groups(plan: JoinPlan) -> None:
    if not plan.groups or len(set(plan.groups)) != len(plan.groups):
        names = ",".join(group.value for group in plan.groups)
        raise JoinRefused("a band has one or more cache groups, each once", field="groups", value=names)


def needs_rebuild(old: JoinPlan | None, new: JoinPlan) -> bool:
    """True when cached blocks of `old` mean nothing under `new`, or the engine must load again."""
    return old is None or _shape(old) != _shape(new) or (_together(new) and common_load(new) is None)


def common_load(plan: JoinPlan) -> int | None:
    """The load that all peers' engines come from, which need not be done again. None if they come from several or none,
    and where every stage loads alone."""
    loads = {peer.engine_load for peer in plan.peers}
    return loads.pop() if len(loads) == 1 and min(loads) > NOTHING_LOADED else None


def _together(plan: JoinPlan) -> bool:
    return any(peer.engine_load for peer in plan.peers)


def _shape(plan: JoinPlan) -> tuple[object, ...]:
    return (
        plan.key,
        plan.stages,
        plan.ranks,
        plan.model_fingerprint,
        plan.first_layer,
        plan.last_layer,
        plan.block_tokens,
        plan.pool_blocks,
        plan.host_pool_blocks,
        plan.wave_tokens,
        plan.lanes,
        plan.state_slots,
        frozenset(plan.groups),
        _loaded_with(plan),
    )


def _loaded_with(plan: JoinPlan) -> tuple[tuple[int, int, int], ...]:
    """Band and pool of every daemon, of an engine that all load together; empty for others: what the other stages hold
    is no matter to a stage that loads alone."""
    return tuple((peer.first_layer, peer.last_layer, peer.pool_blocks) for peer in plan.peers if _together(plan))
