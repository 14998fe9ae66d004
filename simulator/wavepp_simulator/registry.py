"""Membership as etcd keeps it: one record per place, each under a lease that its process renews.

Owns the records and when a lease runs out; tells whoever watches, in order. While etcd is stopped no
lease runs out, nobody is told anything and registrations wait. A process that comes back after its lease
ran out registers again, as the daemons do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from wavepp_proto import limits
from wavepp_proto.terms import DaemonKey, Incarnation, MemberRecord
from wavepp_simulator.network import Network, Wire
from wavepp_simulator.process import Process

RETRY_S = 0.5
Up = Callable[[MemberRecord], None]
Gone = Callable[[DaemonKey, Incarnation], None]
Frozen = Callable[[bool], None]


@dataclass(slots=True)
class _Lease:
    record: MemberRecord
    process: Process
    renewed: float


@dataclass(slots=True)
class _Watcher:
    wire: Wire
    up: Up
    gone: Gone
    frozen: Frozen
    told: dict[DaemonKey, MemberRecord]
    """What it believes to be there."""


class Registry:
    def __init__(self, network: Network) -> None:
        self._network = network
        self._leases: dict[DaemonKey, _Lease] = {}
        self._watcher: _Watcher | None = None
        """One stream of changes, in order."""
        self._stopped = False
        self._waiting: list[Callable[[], None]] = []
        """What was asked of etcd while it was stopped."""

    @property
    def stopped(self) -> bool:
        return self._stopped

    def stop(self) -> None:
        """Nobody is answered; whoever watches knows that it is blind."""
        if not self._stopped:
            self._stopped = True
            self._tell_frozen(True)

    def start(self) -> None:
        """Leases begin anew, as after an election of etcd's own; watchers list again."""
        if not self._stopped:
            return
        self._stopped = False
        for lease in self._leases.values():
            lease.renewed = self._network.agenda.now
        waiting, self._waiting = self._waiting, []
        for ask in waiting:
            ask()
        self._tell_frozen(False)
        self._tell_changes()

    def watch(self, process: Process, up: Up, gone: Gone, frozen: Frozen) -> None:
        """List, then watch: replaces the watcher before."""
        if self._stopped:
            self._waiting.append(lambda: self.watch(process, up, gone, frozen))
            return
        self._watcher = _Watcher(Wire(self._network, "etcd", process), up, gone, frozen, {})
        self._tell_changes()

    def register(self, record: MemberRecord, process: Process) -> None:
        """Put the record under a new lease, kept alive for as long as `process` runs and reaches etcd."""
        if not process.alive:
            return
        if self._stopped or self._network.silent(f"{process.name}>etcd"):
            self._later(record, process)
            return
        lease = self._leases[record.key] = _Lease(record, process, self._network.agenda.now)
        self._tell_changes()
        self._renew(lease)
        self._watch_lease(lease)

    def _later(self, record: MemberRecord, process: Process) -> None:
        """etcd cannot be reached: tried again, unless somebody newer has the place by then."""

        def retry() -> None:
            known = self._leases.get(record.key)
            if known is None or known.record.incarnation < record.incarnation:
                self.register(record, process)

        if self._stopped:
            self._waiting.append(retry)
        else:
            process.after(RETRY_S, retry, background=True)

    def _renew(self, lease: _Lease) -> None:
        """Every third of the TTL; a lease found lost is replaced."""
        if self._leases.get(lease.record.key) is lease:
            if not self._stopped and not self._network.silent(f"{lease.process.name}>etcd"):
                lease.renewed = self._network.agenda.now
            lease.process.after(limits.MEMBER_TTL_S / 3, lambda: self._renew(lease), background=True)
        elif lease.record.key not in self._leases:
            self.register(lease.record, lease.process)

    def _watch_lease(self, lease: _Lease) -> None:
        def look() -> None:
            if self._leases.get(lease.record.key) is not lease:
                return
            if self._network.agenda.now >= lease.renewed + limits.MEMBER_TTL_S and not self._stopped:
                self._expire(lease)
            else:
                self._watch_lease(lease)

        due = max(lease.renewed + limits.MEMBER_TTL_S, self._network.agenda.now + RETRY_S)
        self._network.agenda.at(due, look, background=True)

    def _expire(self, lease: _Lease) -> None:
        del self._leases[lease.record.key]
        self._tell_changes()

    # --- the watcher ------------------------------------------------------------------------------

    def _tell_changes(self) -> None:
        """Every difference between what is there and what the watcher believes; gone before up."""
        watcher = self._watcher
        if watcher is None or self._stopped:
            return
        for key, record in list(watcher.told.items()):
            lease = self._leases.get(key)
            if lease is None or lease.record.incarnation != record.incarnation:
                del watcher.told[key]
                self._tell_gone(watcher, key, record.incarnation)
        for key, lease in self._leases.items():
            if key not in watcher.told:
                watcher.told[key] = lease.record
                self._tell_up(watcher, lease.record)

    def _tell_up(self, watcher: _Watcher, record: MemberRecord) -> None:
        watcher.wire.send(lambda: watcher.up(record))

    def _tell_gone(self, watcher: _Watcher, key: DaemonKey, incarnation: Incarnation) -> None:
        watcher.wire.send(lambda: watcher.gone(key, incarnation))

    def _tell_frozen(self, frozen: bool) -> None:
        if (watcher := self._watcher) is not None:
            watcher.wire.send(lambda: watcher.frozen(frozen))
