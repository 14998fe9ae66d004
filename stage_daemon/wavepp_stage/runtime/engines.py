"""Which engine, which cache and which link a daemon uses; heavy imports happen here, late.

Owns the choice by name. The engines torch and trtllm bring their libraries (seconds of import), so
nothing else imports them.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field, replace
from typing import Any

from wavepp_proto.errors import JoinRefused
from wavepp_proto.runtime.channels import ClientSecurity, parse_address
from wavepp_proto.terms import NOTHING_LOADED, Incarnation, JoinPlan, LinkKind, ModelFacts, Numerics
from wavepp_stage.core.join_plan import common_load
from wavepp_stage.core.machine import MakeCache, block_cache
from wavepp_stage.engine.base import (
    ActivationLink,
    EnginePlan,
    EngineTraits,
    LinkListener,
    LinkPlan,
    StageEngine,
    StageGroup,
)
from wavepp_stage.runtime.grpc_link import GrpcLink, LinkHub
from wavepp_stage.runtime.settings import StageSettings


@dataclass(frozen=True, slots=True)
class Equipment:
    """An engine that is not loaded yet, and what is known of its model."""

    engine: StageEngine
    model: ModelFacts
    store: Any | None
    """The torch.distributed store this daemon opened; kept alive for its life."""
    link_address: str
    traits: EngineTraits = field(default_factory=EngineTraits)
    make_cache: MakeCache = block_cache
    gpu: str = ""
    """Names the GPU that it computes on among all others; empty on a CPU."""
    numerics: Numerics = field(default_factory=Numerics)
    """What all stages of its pipeline must compute alike."""


LOAD_MARGIN = 0.9
"""Share of a join's deadline that a collective load may wait: its own error, which says who is missing, comes first."""


def as_profiled(settings: StageSettings) -> StageSettings:
    """With the sizes of the device that an `emulated:profile=FILE` preset names: pools, slots, blocks and waves are
    the profile's, whatever was asked for. Raises EngineFault or InvalidRequest naming the field."""
    if settings.engine != "emulated":
        return settings
    from wavepp_stage.engine.emulated_model import parse_preset

    preset = parse_preset(settings.model)
    if preset.profile is None:
        return settings
    preset.pace(settings.stage, settings.stages)
    profile, own = preset.profile, preset.profile.stages[settings.stage]
    return replace(
        settings,
        block_tokens=profile.block_tokens,
        pool_blocks=own.pool_blocks,
        host_pool_blocks=own.host_pool_blocks,
        state_slots=max(1, own.state_slots),
        wave_tokens=profile.wave_tokens,
        lanes=profile.lanes,
    )


def equip(settings: StageSettings, advertise_host: str) -> Equipment:
    """Build the engine that `settings` names. Raises EngineFault or InvalidRequest naming the field."""
    if settings.engine == "emulated":
        from wavepp_stage.engine.emulated import EmulatedEngine, emulated_model_facts, emulated_traits

        traits = emulated_traits(settings.model)
        # Computes in whole numbers: the dtype is that of the engine which it stands for, and as binding.
        numerics = Numerics(dtype=settings.dtype or "auto")
        return Equipment(EmulatedEngine(), emulated_model_facts(settings.model), None, "", traits, numerics=numerics)
    made = _equip_trtllm if settings.engine == "trtllm" else _equip_torch
    return made(settings, advertise_host)


def _equip_torch(settings: StageSettings, advertise_host: str) -> Equipment:
    from wavepp_stage.engine.torch.engine import TorchEngine
    from wavepp_stage.engine.torch.facts import model_facts
    from wavepp_stage.engine.torch.gloo_link import open_store
    from wavepp_stage.engine.torch.link_transport import gpu_name
    from wavepp_stage.engine.torch.model import numerics

    facts, device, dtype = model_facts(settings.model), settings.device or "cpu", settings.dtype or "float32"
    alike = numerics(settings.model, dtype)
    engine = TorchEngine(device=device, dtype=dtype, threads=settings.threads)
    store, link_address = open_store(parse_address(settings.listen).host, advertise_host)
    return Equipment(engine, facts, store, link_address, gpu=gpu_name(device, advertise_host), numerics=alike)


def _equip_trtllm(settings: StageSettings, advertise_host: str) -> Equipment:
    """The cache is the engine's own, and all stages load it together, when they join: before that what configuration
    alone refuses is told, and what it needs of its library is looked up: EngineFault lists whatever is missing."""
    from wavepp_stage.engine.torch.gloo_link import open_store
    from wavepp_stage.engine.torch.link_transport import gpu_name
    from wavepp_stage.engine.trtllm.cache import TrtllmCache
    from wavepp_stage.engine.trtllm.engine import TrtllmEngine
    from wavepp_stage.engine.trtllm.facts import AUTO, model_facts, numerics
    from wavepp_stage.engine.trtllm.served import served_config

    served_config(settings.model, settings.ranks, settings.block_tokens)
    facts, device = model_facts(settings.model), settings.device or "cuda:0"
    dtype = settings.dtype or AUTO
    engine = TrtllmEngine(device=device, dtype=dtype)
    store, link_address = open_store(parse_address(settings.listen).host, advertise_host)
    return Equipment(
        engine,
        facts,
        store,
        link_address,
        engine.traits,
        make_cache=lambda plan, feed: TrtllmCache(engine, plan, feed),
        gpu=gpu_name(device, advertise_host),
        numerics=numerics(settings.model, dtype, engine.version),
    )


def engine_plan(plan: JoinPlan, model: str) -> EnginePlan:
    return EnginePlan(
        model=model,
        stage=plan.key.stage,
        stages=plan.stages,
        first_layer=plan.first_layer,
        last_layer=plan.last_layer,
        block_tokens=plan.block_tokens,
        pool_blocks=plan.pool_blocks,
        wave_tokens=plan.wave_tokens,
        lanes=plan.lanes,
        host_pool_blocks=plan.host_pool_blocks,
        state_slots=plan.state_slots,
        rank=plan.key.rank,
        ranks=plan.ranks,
    )


def load_group(plan: JoinPlan) -> StageGroup:
    """Who loads together under `plan`. Raises JoinRefused where a peer cannot, or does not say what it loads."""
    for peer in plan.peers:
        if not (peer.engine_load and peer.link_address and peer.last_layer > peer.first_layer):
            raise JoinRefused(
                f"{peer.key} does not load together with others",
                field="engine_load", value=peer.engine_load, limit=">0",
            )  # fmt: skip
    return StageGroup(
        load=common_load(plan) or _load_number(plan),
        bands=tuple((peer.first_layer, peer.last_layer) for peer in plan.peers if peer.key.rank == 0),
        pools=tuple(peer.pool_blocks for peer in plan.peers),
        name=f"{plan.fence.epoch}.{plan.fence.formation}",
        store=plan.peers[0].link_address,
        timeout_s=LOAD_MARGIN * plan.deadline_ms / 1000,
    )


def _load_number(plan: JoinPlan) -> int:
    """The same on all stages, and on no other join: another controller may count epochs and formations anew, but not
    among the same incarnations."""
    said = f"{plan.fence.epoch}.{plan.fence.formation}." + ".".join(str(peer.incarnation) for peer in plan.peers)
    return NOTHING_LOADED + 1 + int.from_bytes(hashlib.sha256(said.encode()).digest()[:7])


def link_plan(plan: JoinPlan, advertise_host: str, connect_timeout_s: float, wave_timeout_s: float) -> LinkPlan:
    place = (plan.key.stage + 1, plan.key.rank)
    following = next((peer for peer in plan.peers if (peer.key.stage, peer.key.rank) == place), None)
    return LinkPlan(
        kind=plan.link,
        epoch=plan.fence.epoch,
        formation=plan.fence.formation,
        stage=plan.key.stage,
        stages=plan.stages,
        store=plan.link_store,
        next_address=following.address if following else "",
        next_incarnation=following.incarnation if following else Incarnation(0),
        advertise_host=advertise_host,
        connect_timeout_s=connect_timeout_s,
        wave_timeout_s=wave_timeout_s,
        rank=plan.key.rank,
    )


def make_link(
    plan: LinkPlan,
    engine: StageEngine,
    listener: LinkListener,
    hub: LinkHub,
    security: ClientSecurity,
    loop: asyncio.AbstractEventLoop,
) -> ActivationLink | None:
    """The link of one formation; None for a pipeline of one stage."""
    if plan.stages == 1:
        return None
    if plan.kind is LinkKind.GRPC:
        arrival = getattr(engine, "arrival", None)  # of an engine that models the wire, too
        return GrpcLink(plan, listener, engine.encode, engine.decode, hub, security, loop, arrival)
    if plan.kind is LinkKind.NONE or engine.name == "emulated":
        raise JoinRefused(
            f"engine {engine.name} cannot use link {plan.kind.value}", field="link", value=plan.kind.value, limit="grpc"
        )
    from wavepp_stage.engine.torch.gloo_link import TorchLink

    return TorchLink(plan, engine, listener)
