"""Which engine and which link a daemon uses; heavy imports happen here, late.

Owns the choice by name. The torch engine brings torch and transformers (seconds of import), so
nothing else imports it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

from wavepp_proto.errors import JoinRefused
from wavepp_proto.runtime.channels import ClientSecurity
from wavepp_proto.terms import Incarnation, JoinPlan, LinkKind, ModelFacts
from wavepp_stage.engine.base import ActivationLink, EnginePlan, LinkListener, LinkPlan, StageEngine
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
        from wavepp_stage.engine.emulated import EmulatedEngine, emulated_model_facts

        return Equipment(EmulatedEngine(), emulated_model_facts(settings.model), None, "")
    from wavepp_stage.engine.torch.engine import TorchEngine
    from wavepp_stage.engine.torch.facts import model_facts
    from wavepp_stage.engine.torch.gloo_link import open_store

    facts = model_facts(settings.model)
    engine = TorchEngine(device=settings.device, dtype=settings.dtype, threads=settings.threads)
    store, link_address = open_store(advertise_host)
    return Equipment(engine, facts, store, link_address)


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
