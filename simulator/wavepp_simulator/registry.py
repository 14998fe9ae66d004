"""Membership as etcd keeps it: one record per place, each under a lease that its process renews.

Owns the records and when a lease runs out; tells whoever watches, in order. Does not own etcd's own
failures. A process that comes back after its lease ran out registers again, as the daemons do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from wavepp_proto import limits
from wavepp_proto.terms import DaemonKey, Incarnation, MemberRecord
from wavepp_simulator.network import Network, Wire
from wavepp_simulator.process import Process

Up = Callable[[MemberRecord], None]
Gone = Callable[[DaemonKey, Incarnation], None]


@dataclass(slots=True)
class _Lease:
    record: MemberRecord
    process: Process
    renewed: float


class Registry:
    def __init__(self, network: Network) -> None:
        self._network = network
        self._leases: dict[DaemonKey, _Lease] = {}
        self._watcher: tuple[Wire, Up, Gone] | None = None
        """One stream of changes, in order."""

    def watch(self, process: Process, up: Up, gone: Gone) -> None:
        """List, then watch: replaces the watcher before."""
        self._watcher = (Wire(self._network, "etcd", process), up, gone)
        for lease in list(self._leases.values()):
            self._tell_up(lease.record)

    def register(self, record: MemberRecord, process: Process) -> None:
        """Put the record under a new lease, kept alive for as long as `process` runs."""
        known = self._leases.get(record.key)
        if known is not None and known.record.incarnation != record.incarnation:
            self._tell_gone(known.record)
        lease = self._leases[record.key] = _Lease(record, process, self._network.agenda.now)
        self._tell_up(record)
        self._renew(lease)
        self._watch_lease(lease)

    def leave(self, record: MemberRecord) -> None:
        """The lease is revoked: an orderly end."""
        lease = self._leases.get(record.key)
        if lease is not None and lease.record.incarnation == record.incarnation:
            self._expire(lease)

    def _renew(self, lease: _Lease) -> None:
        """Every third of the TTL; a lease found lost is replaced."""
        if self._leases.get(lease.record.key) is lease:
            lease.renewed = self._network.agenda.now
            lease.process.after(limits.MEMBER_TTL_S / 3, lambda: self._renew(lease), background=True)
        elif lease.record.key not in self._leases:
            self.register(lease.record, lease.process)

    def _watch_lease(self, lease: _Lease) -> None:
        def look() -> None:
            if self._leases.get(lease.record.key) is not lease:
                return
            if self._network.agenda.now >= lease.renewed + limits.MEMBER_TTL_S:
                self._expire(lease)
            else:
                self._watch_lease(lease)

        self._network.agenda.at(lease.renewed + limits.MEMBER_TTL_S, look, background=True)

    def _expire(self, lease: _Lease) -> None:
        del self._leases[lease.record.key]
        self._tell_gone(lease.record)

    def _tell_up(self, record: MemberRecord) -> None:
        if self._watcher is not None:
            wire, up, _ = self._watcher
            wire.send(lambda: up(record))

    def _tell_gone(self, record: MemberRecord) -> None:
        if self._watcher is not None:
            wire, _, gone = self._watcher
            wire.send(lambda: gone(record.key, record.incarnation))
