"""What the nodes hold, in lines for a scenario's output.

Reads inventories and the controller's requests; owns only the wording.
"""

from __future__ import annotations

from collections.abc import Iterator

from wavepp_proto.terms import HoldState
from wavepp_simulator.stage import SimStage
from wavepp_simulator.world import World


def blocks(world: World) -> list[str]:
    """Block counts by stage: the first four add up to the pool."""
    return [_blocks(stage) for stage in world.stages]


def holds(world: World) -> list[str]:
    return [line for stage in world.stages for line in _holds(stage)]


def requests(world: World) -> list[str]:
    """Living requests as the controller sees them."""
    found = [request for pipeline in world.controller.machine.pipelines.values() for request in pipeline.book]
    return [f"{r.id} attempt {r.attempt} is {r.state.value}" for r in found] or ["no living request"]


def _blocks(stage: SimStage) -> str:
    if not stage.process.alive:
        return f"stage {stage.name}: dead"
    found = stage.machine.inventory()
    free, cached, quarantined = found.capacity.free_blocks, found.cached_blocks, found.quarantined_blocks
    held = found.pool_blocks - free - cached - quarantined
    promised = found.capacity.escrowed_blocks
    return (
        f"stage {stage.name}: free {free} cached {cached} held {held} quarantined {quarantined} "
        f"of {found.pool_blocks}, promised {promised}"
    )


def _holds(stage: SimStage) -> Iterator[str]:
    if not stage.process.alive:
        yield f"stage {stage.name}: dead"
        return
    found = stage.machine.inventory()
    yield f"stage {stage.name}: " + ("; ".join(_hold(hold) for hold in found.holds) or "holds nothing")
    if found.announced:
        yield f"stage {stage.name} knows: " + " ".join(f"{key.request_id}.{key.attempt}" for key in found.announced)


def _hold(hold: HoldState) -> str:
    return (
        f"{hold.key.request_id}.{hold.key.attempt} {hold.phase} at {hold.endpoint} "
        f"(leased {hold.leased_blocks}, promised {hold.escrow_blocks}, owned {hold.owned_blocks})"
    )
