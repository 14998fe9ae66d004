"""Compare what daemons hold with what the controller believes.

Owns the comparison; asks every daemon of a pipeline for its inventory at once. On a busy pipeline
the answers are of slightly different moments: findings that last are the ones that matter.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from wavepp_proto import convert
from wavepp_proto.errors import UnknownPipeline
from wavepp_proto.terms import DaemonKey, Inventory, PipelineId
from wavepp_proto.v1 import admin_pb2 as pb

if TYPE_CHECKING:
    from wavepp_controller.runtime.controller import Controller


async def audit(controller: Controller, pipeline: PipelineId) -> pb.AuditResponse:
    """One answer per daemon, and findings in words. Raises UnknownPipeline, or a daemon's own error."""
    links = controller.shell.links(pipeline)
    if not links:
        raise UnknownPipeline(f"no daemon serves {pipeline!r}", field="pipeline", value=pipeline)
    answers = await asyncio.gather(*(link.calls.inventory() for link in links.values()))
    inventories = dict(zip(links, answers, strict=True))
    live: set[str] = {request.request_id for request in controller.machine.status().requests}
    findings = [finding for key, found in inventories.items() for finding in _findings(key, found, live)]
    at_same_wave = {found.running_hash for found in inventories.values()}
    if len({found.last_wave for found in inventories.values()}) == 1 and len(at_same_wave) > 1:
        findings.append("stages executed different rows")
    return pb.AuditResponse(
        daemons=[_daemon(key, found) for key, found in sorted(inventories.items())], findings=findings
    )


def _findings(key: DaemonKey, found: Inventory, live: set[str]) -> list[str]:
    words = [
        f"{key} holds {hold.key.request_id}, which is not live"
        for hold in found.holds
        if hold.key.request_id not in live
    ]
    words += [
        f"{key} remembers {announced.request_id}, which is not live"
        for announced in found.announced
        if announced.request_id not in live
    ]
    return words


def _daemon(key: DaemonKey, found: Inventory) -> pb.DaemonAudit:
    free = found.capacity.free_blocks
    return pb.DaemonAudit(
        key=convert.daemon_key_to_pb(key),
        holds=len(found.holds),
        pool_blocks=found.pool_blocks,
        cached_blocks=found.cached_blocks,
        held_blocks=found.pool_blocks - free - found.cached_blocks - found.quarantined_blocks,
        quarantined_blocks=found.quarantined_blocks,
        capacity=convert.capacity_to_pb(found.capacity),
        running_hash=found.running_hash,
        last_wave=found.last_wave,
        held_states=found.state_slots - found.capacity.recurrent_free - found.cached_states - found.quarantined_states,
        quarantined_states=found.quarantined_states,
    )
