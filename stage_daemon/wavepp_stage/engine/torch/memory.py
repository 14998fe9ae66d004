"""Everything that a loaded stage keeps besides weights: allocated at load, and never again.

Owns which parts a band needs (paged cache, host tier, recurrent states) and how large they are by the plan.
Called by `engine.py` at load.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from wavepp_proto.errors import EngineFault
from wavepp_proto.terms import CacheGroup
from wavepp_stage.engine.base import EnginePlan
from wavepp_stage.engine.torch.attention import CausalMask
from wavepp_stage.engine.torch.device import first_line, free_bytes
from wavepp_stage.engine.torch.host_tier import HostTier
from wavepp_stage.engine.torch.model import Band, kv_shape, state_shape
from wavepp_stage.engine.torch.paged_cache import PagedCache
from wavepp_stage.engine.torch.recurrent_states import RecurrentStates

_Part = TypeVar("_Part")


@dataclass(frozen=True, slots=True)
class StageMemory:
    cache: PagedCache
    """Of the attention layers; a band without any still numbers its blocks."""
    host: HostTier | None
    states: RecurrentStates
    """Of the recurrent layers, if there are any."""
    mask: CausalMask

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        parts = ((CacheGroup.ATTENTION, self.cache.layers), (CacheGroup.RECURRENT, self.states.layers))
        return tuple(group for group, layers in parts if layers)


def check_slots(plan: EnginePlan, band: Band) -> None:
    """Raises EngineFault where the band needs state slots and the plan has none; called before weights are read."""
    if band.recurrent_layers and plan.state_slots < 1:
        raise EngineFault("the band has recurrent layers and no slot for their states", field="state_slots",
                          value=plan.state_slots, limit=1)  # fmt: skip


def check_fit(plan: EnginePlan, band: Band, device: torch.device) -> None:
    """Raises EngineFault naming `pool_blocks`, and how many would fit, where weights and pool together exceed what is
    free on the device now; called before weights are read. What several processes take of one device at the same
    moment shows at the allocation."""
    free = free_bytes(device)
    if free is None:
        return
    fitting = max(0, (free - weight_bytes(band)) // max(1, block_bytes(plan, band)))
    if plan.pool_blocks > fitting and block_bytes(plan, band):
        raise EngineFault(
            f"weights of {weight_bytes(band)} bytes and the pool exceed the {free} bytes that are free on {device}",
            field="pool_blocks", value=plan.pool_blocks, limit=fitting,
        )  # fmt: skip


def weight_bytes(band: Band) -> int:
    """Of all parameters; tied ones count once."""
    parameters: list[torch.Tensor] = list(band.model.parameters())
    return sum(parameter.nbytes for parameter in parameters)


def block_bytes(plan: EnginePlan, band: Band) -> int:
    """Of one block over all attention layers, K and V."""
    kv_heads, head_dim = kv_shape(band.model.config)
    itemsize: int = band.model.dtype.itemsize
    return 2 * len(band.attention_layers) * plan.block_tokens * kv_heads * head_dim * itemsize


def allocate(plan: EnginePlan, band: Band, device: torch.device) -> StageMemory:
    """Raises EngineFault naming the plan's field that asks for more than there is."""
    dtype = band.model.dtype
    kv_heads, head_dim = kv_shape(band.model.config)
    cache = _make("pool_blocks", plan.pool_blocks, lambda: PagedCache(
        band.attention_layers, blocks=plan.pool_blocks, block_tokens=plan.block_tokens, kv_heads=kv_heads,
        head_dim=head_dim, dtype=dtype, device=device,
    ))  # fmt: skip
    host = None
    if plan.host_pool_blocks:
        host = _make("host_pool_blocks", plan.host_pool_blocks, lambda: HostTier(cache, plan.host_pool_blocks, device))
    states = _make("state_slots", plan.state_slots, lambda: RecurrentStates(
        band.recurrent_layers, state_shape(band.model.config), slots=plan.state_slots, dtype=dtype, device=device
    ))  # fmt: skip
    return StageMemory(cache, host, states, CausalMask(dtype, device))


def _make(field: str, value: int, build: Callable[[], _Part]) -> _Part:
    try:
        return build()
    except RuntimeError as error:  # torch has no narrower class for a failed allocation on CPU
        raise EngineFault(f"no memory for the pool: {first_line(error)}", field=field, value=value) from error
