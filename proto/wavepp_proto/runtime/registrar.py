"""Registration of one daemon in the membership store (DESIGN.md).

Keeps the daemon's record under a lease whatever happens to the store, and never stops the daemon
from serving. Used by the stage daemon's runtime.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Final

from wavepp_proto import limits
from wavepp_proto.runtime.backoff import Backoff
from wavepp_proto.runtime.closers import end_tasks
from wavepp_proto.runtime.logs import get_log
from wavepp_proto.runtime.record import encode_record, member_key
from wavepp_proto.runtime.store import STORE_TROUBLE, LeaseGone, LeaseId, MembershipStore
from wavepp_proto.terms import MemberRecord

_CLOSE_S: Final = 3.0
"""Longest wait for the revoke at close; the lease ends by itself anyway."""

_log = get_log(__name__)


class Registrar:
    """Keeps `record` in the store under a lease until `close`. Starts whether the store is up or not.

    The lease is refreshed three times per TTL, with jitter. A lease that is gone is replaced and the
    record put again; a record that somebody deleted is put again at the next refresh. The first time a
    place is taken over from whoever had it, a process that died; later it is left to whoever took it over
    meanwhile, and taken again once it is free.
    """

    def __init__(
        self,
        store: MembershipStore,
        record: MemberRecord,
        ttl_s: int = limits.MEMBER_TTL_S,
        rng: random.Random | None = None,
    ) -> None:
        self.registered = asyncio.Event()
        """Set while the store has acknowledged the current record."""
        self._store = store
        self._ttl_s = ttl_s
        self._rng = rng or random.Random()
        self._backoff = Backoff(rng=self._rng)
        self._key, self._value = _encoded(record)
        self._lease: LeaseId | None = None
        self._placed_key: str | None = None
        """Key that was put under the lease."""
        self._held_key: str | None = None
        """Place that was ours once: from then on somebody else in it is our successor."""
        self._stale = asyncio.Event()
        """Set while the store lacks the current record."""
        self._stale.set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin registering in the background; `registered` tells when it is done."""
        self._task = asyncio.create_task(self._run(), name="registrar")

    def update(self, record: MemberRecord) -> None:
        """Register `record` instead, at once unless its place has gone to another. Raises InvalidRequest when it
        breaks the record's rules."""
        key, value = _encoded(record)
        self._key, self._value = key, value
        self.registered.clear()
        self._stale.set()

    async def close(self) -> None:
        """Withdraw the record, waiting a bounded time for the store. Idempotent."""
        task, self._task = self._task, None
        if task is None:
            return
        await end_tasks(task)
        self.registered.clear()
        lease, self._lease = self._lease, None
        if lease is not None:
            with contextlib.suppress(TimeoutError, *STORE_TROUBLE):
                async with asyncio.timeout(_CLOSE_S):
                    await self._store.revoke(lease)

    async def _run(self) -> None:
        while True:
            try:
                await self._refresh()
            except LeaseGone:
                _log.warning("registration lost", key=self._key)
                self._lease = None
                self.registered.clear()
                self._stale.set()
                await asyncio.sleep(self._backoff.next_s())
            except STORE_TROUBLE as error:
                _log.warning("registration waits for the store", key=self._key, error=str(error))
                await asyncio.sleep(self._backoff.next_s())
            else:
                self._backoff.reset()
                await self._wait_until_due()

    async def _refresh(self) -> None:
        """One pass: a living lease, and the current record under it."""
        if self._lease is not None and self._placed_key not in (None, self._key):
            # Another place: the old key dies with the old lease.
            await self._store.revoke(self._lease)
            self._lease = None
        if self._lease is None:
            self._lease = await self._store.grant(self._ttl_s)
            self._placed_key = None
            self._stale.set()
        else:
            await self._store.keep_alive(self._lease)
        await self._place(self._lease)

    async def _place(self, lease: LeaseId) -> None:
        """Put the record under the lease, if it is not there and its place is ours to take."""
        key, value = self._key, self._value
        self._placed_key = key
        if key == self._held_key:
            claim = await self._store.create_if_absent(key, value, lease)
            if claim.item.lease != lease:
                _log.warning("place is registered by another daemon too", key=key)
                self.registered.clear()
                self._stale.clear()  # looked at again at the next refresh
                return
            if claim.item.value != value:
                await self._store.put(key, value, lease)
        else:
            await self._store.put(key, value, lease)
        self._held_key = key
        if (key, value) == (self._key, self._value):
            self._stale.clear()
            if not self.registered.is_set():
                self.registered.set()
                _log.info("registered", key=key)

    async def _wait_until_due(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._ttl_s / 3 * self._rng.uniform(0.8, 1.0)):
                await self._stale.wait()


def _encoded(record: MemberRecord) -> tuple[str, bytes]:
    return member_key(record.cluster, record.key), encode_record(record)
