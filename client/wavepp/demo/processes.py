"""Which processes the demo's cluster consists of, as they say themselves.

Owns the list (pid, version, address, layers, pool) and how it is shown. Called once the pipeline serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wavepp.local_cluster import LocalCluster
from wavepp_proto import convert

if TYPE_CHECKING:
    from rich.table import Table

    from wavepp_proto.v1.admin_pb2 import StatusResponse


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    name: str
    pid: int
    version: str
    address: str
    layers: str = ""
    """First and last layer, of a stage."""
    pool_blocks: int | None = None
    """None where there is no pool."""


def processes(cluster: LocalCluster, status: StatusResponse) -> list[ProcessFacts]:
    """etcd, the controller and every stage; `status` is one in which the pipeline serves."""
    found = []
    if cluster.etcd is not None:
        found.append(ProcessFacts("etcd", cluster.etcd.pid, cluster.etcd.binary.version, cluster.etcd.endpoint))
    found.append(ProcessFacts("controller", status.pid, status.version, cluster.address))
    for pipeline in status.pipelines:
        for daemon in sorted(pipeline.daemons, key=lambda daemon: (daemon.key.stage, daemon.key.rank)):
            layers = f"{daemon.first_layer}..{daemon.last_layer - 1}"
            name = f"{convert.daemon_key_from_pb(daemon.key).place} ({daemon.engine})"
            found.append(
                ProcessFacts(name, daemon.pid, daemon.version, daemon.address, layers, int(daemon.pool_blocks))
            )
    return found


def table(found: Sequence[ProcessFacts]) -> Table:
    from rich.table import Table

    shown = Table("process", "pid", "version", "address", "layers", "pool blocks")
    for process in found:
        blocks = "" if process.pool_blocks is None else str(process.pool_blocks)
        shown.add_row(process.name, str(process.pid), process.version, process.address, process.layers, blocks)
    return shown
