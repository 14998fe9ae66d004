"""MembershipStore inside one process, for tests: etcd's semantics without etcd.

Owns revisions, history with compaction, leases with an injectable clock, and two faults: `available`
(calls and watches fail as if etcd were unreachable) and `compact`. Expired leases are collected by
every call and by `expire`, which a test calls after moving its clock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from wavepp_proto.errors import MembershipUnavailable
from wavepp_proto.runtime.store import Claim, Item, LeaseGone, LeaseId, Listing, RevisionCompacted, StoreEvent


@dataclass(slots=True)
class _Lease:
    ttl_s: float
    expires_at: float
    keys: set[str] = field(default_factory=set)


class MemoryStore:
    """See store.MembershipStore. `clock` returns seconds and never goes back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._available = True
        self._revision = 1
        self._compacted = 0
        self._items: dict[str, Item] = {}
        self._history: list[StoreEvent] = []
        self._leases: dict[LeaseId, _Lease] = {}
        self._last_lease = 0
        self._watches: set[MemoryWatch] = set()

    @property
    def available(self) -> bool:
        return self._available

    @available.setter
    def available(self, value: bool) -> None:
        """False: every call fails from now on and every watch breaks; leases go on ageing."""
        self._available = value
        if not value:
            self._break_watches()

    def compact(self) -> None:
        """Forget the history up to now: a watch from an older revision fails with RevisionCompacted."""
        self._compacted = self._revision
        self._history.clear()

    def expire(self) -> None:
        """End every lease whose time has passed, and delete its keys."""
        now = self._clock()
        for lease in [lease for lease, state in self._leases.items() if state.expires_at <= now]:
            self._end(lease)

    async def put(self, key: str, value: bytes, lease: LeaseId | None = None) -> None:
        self._enter()
        self._write(key, value, lease)

    async def create_if_absent(self, key: str, value: bytes, lease: LeaseId | None = None) -> Claim:
        self._enter()
        standing = self._items.get(key)
        return Claim(False, standing) if standing else Claim(True, self._write(key, value, lease))

    async def get_prefix(self, prefix: str) -> Listing:
        self._enter()
        items = sorted((item for key, item in self._items.items() if key.startswith(prefix)), key=lambda item: item.key)
        return Listing(self._revision, tuple(items))

    def watch(self, prefix: str, from_revision: int) -> MemoryWatch:
        watch = MemoryWatch(prefix, self._watches.discard)
        self._watches.add(watch)
        if not self._available:
            watch.feed(MembershipUnavailable("the membership store is switched off"))
        elif from_revision <= self._compacted:
            watch.feed(RevisionCompacted(f"compacted at revision {self._compacted}"))
        for event in self._history:
            if event.revision >= from_revision:
                watch.feed(event)
        return watch

    async def grant(self, ttl_s: int) -> LeaseId:
        self._enter()
        self._last_lease += 1
        lease = LeaseId(self._last_lease)
        self._leases[lease] = _Lease(ttl_s, self._clock() + ttl_s)
        return lease

    async def keep_alive(self, lease: LeaseId) -> None:
        self._enter()
        state = self._living(lease)
        state.expires_at = self._clock() + state.ttl_s

    async def revoke(self, lease: LeaseId) -> None:
        self._enter()
        if lease in self._leases:
            self._end(lease)

    async def close(self) -> None:
        self.available = False

    def _enter(self) -> None:
        self.expire()
        if not self._available:
            raise MembershipUnavailable("the membership store is switched off")

    def _living(self, lease: LeaseId) -> _Lease:
        state = self._leases.get(lease)
        if state is None:
            raise LeaseGone(f"lease {lease} is gone")
        return state

    def _write(self, key: str, value: bytes, lease: LeaseId | None) -> Item:
        state = self._living(lease) if lease is not None else None
        before = self._items.get(key)
        if before and before.lease is not None:
            self._leases[before.lease].keys.discard(key)
        if state:
            state.keys.add(key)
        self._revision += 1
        created = before.create_revision if before else self._revision
        item = self._items[key] = Item(key, value, created, self._revision, lease)
        self._tell(StoreEvent(key, value, self._revision))
        return item

    def _end(self, lease: LeaseId) -> None:
        """One revision for all keys of the lease, as in etcd."""
        keys = sorted(self._leases.pop(lease).keys)
        if keys:
            self._revision += 1
        for key in keys:
            del self._items[key]
            self._tell(StoreEvent(key, None, self._revision))

    def _tell(self, event: StoreEvent) -> None:
        self._history.append(event)
        for watch in self._watches:
            watch.feed(event)

    def _break_watches(self) -> None:
        for watch in tuple(self._watches):
            watch.feed(MembershipUnavailable("the membership store is switched off"))


class MemoryWatch:
    """See store.Watch."""

    def __init__(self, prefix: str, on_end: Callable[[MemoryWatch], None]) -> None:
        self._prefix = prefix
        self._on_end = on_end
        self._arrived: asyncio.Queue[StoreEvent | Exception] = asyncio.Queue()
        self._failure: Exception | None = None

    def feed(self, outcome: StoreEvent | Exception) -> None:
        if isinstance(outcome, Exception) or outcome.key.startswith(self._prefix):
            self._arrived.put_nowait(outcome)

    async def next(self) -> StoreEvent:
        if self._failure is None:
            arrived = await self._arrived.get()
            if isinstance(arrived, StoreEvent):
                return arrived
            self._failure = arrived
            self._on_end(self)
        raise self._failure

    def cancel(self) -> None:
        self._on_end(self)
        self.feed(MembershipUnavailable("the watch was cancelled"))
