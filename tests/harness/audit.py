"""What Admin.Audit must show once nothing runs any more: invariants I1 and I2 of a whole cluster, from outside.

Owns that judgement alone. Used by clusters whose stages are processes.
"""

from __future__ import annotations

from wavepp_proto.v1 import admin_pb2


def is_quiet(audit: admin_pb2.AuditResponse, daemons: int) -> bool:
    """Nothing is held on any of `daemons` daemons, every pool is complete, and all ran the same rows."""
    found = audit.daemons
    return (
        len(found) == daemons
        and not audit.findings
        and not any(d.holds or d.held_blocks or d.quarantined_blocks or d.capacity.escrowed_blocks for d in found)
        and not any(d.held_states or d.quarantined_states or d.capacity.recurrent_escrowed for d in found)
        and all(d.cached_blocks + d.capacity.free_blocks == d.pool_blocks for d in found)
        and len({(d.last_wave, d.running_hash) for d in found}) == 1
    )
