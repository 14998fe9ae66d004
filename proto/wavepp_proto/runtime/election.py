"""Who is the controller: one leader key in the store, under a lease (DESIGN.md).

The epoch is the key's create revision, so each authority has a higher one than all before it.
`Leadership` is used by the controller; `leader_address` by whoever wants to find it.

Safety rests on the epoch, not on clocks: a leader goes on while the store is away (losing etcd must
stop nothing that runs), and daemons refuse it as soon as they have seen the next one's higher epoch.
A key that expired meanwhile is claimed again under the same authority, unless somebody else leads.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass, field

from wavepp_proto import limits
from wavepp_proto.runtime.backoff import Backoff
from wavepp_proto.runtime.closers import end_tasks
from wavepp_proto.runtime.logs import get_log
from wavepp_proto.runtime.membership import RELIST_S
from wavepp_proto.runtime.record import leader_key
from wavepp_proto.runtime.store import (
    STORE_TROUBLE,
    Claim,
    Item,
    LeaseGone,
    LeaseId,
    MembershipStore,
    RevisionCompacted,
)
from wavepp_proto.terms import Epoch

_log = get_log(__name__)


@dataclass(frozen=True, slots=True)
class Leader:
    address: str
    """host:port that clients dial."""
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Authority:
    """One life of leadership, from winning the key to `lost`."""

    epoch: Epoch
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once somebody else leads, or on `resign`."""


async def find_leader(store: MembershipStore, cluster: str) -> Leader | None:
    """The current leader, or None while there is none. Raises MembershipUnavailable."""
    item = await _standing(store, leader_key(cluster))
    return Leader(item.value.decode(), Epoch(item.create_revision)) if item else None


async def leader_address(store: MembershipStore, cluster: str) -> str | None:
    """Address of the current leader, or None while there is none. Raises MembershipUnavailable."""
    leader = await find_leader(store, cluster)
    return leader.address if leader else None


class Leadership:
    """Campaigns for the leader key with `address` as its value, and holds it. One authority at a time."""

    def __init__(
        self,
        store: MembershipStore,
        cluster: str,
        address: str,
        ttl_s: int = limits.MEMBER_TTL_S,
        rng: random.Random | None = None,
    ) -> None:
        self._store = store
        self._key = leader_key(cluster)
        self._address = address
        self._ttl_s = ttl_s
        self._rng = rng or random.Random()
        self._backoff = Backoff(rng=self._rng)
        self._authority: Authority | None = None
        self._holding: asyncio.Task[None] | None = None
        self._lease: LeaseId | None = None

    async def campaign(self) -> Authority:
        """Wait until this controller leads, however long another does or the store is away."""
        await self.resign()
        while True:
            try:
                authority = await self._try_to_win()
                if authority is not None:
                    return authority
            except LeaseGone:
                self._lease = None
            except STORE_TROUBLE as error:
                _log.warning("campaign waits for the store", error=str(error))
                await asyncio.sleep(self._backoff.next_s())

    async def resign(self) -> None:
        """Give the key up, waiting a bounded time for the store; the authority is lost at once. Idempotent."""
        holding, self._holding = self._holding, None
        if holding is not None and self._authority is not None:
            self._authority.lost.set()
            await end_tasks(holding)
        lease, self._lease = self._lease, None
        if lease is not None:
            with contextlib.suppress(TimeoutError, *STORE_TROUBLE):
                async with asyncio.timeout(self._ttl_s / 3):
                    await self._store.revoke(lease)

    async def _try_to_win(self) -> Authority | None:
        """Wait for the key to be free, then claim it; None if another was faster."""
        standing = await _standing(self._store, self._key)
        if standing is not None and (standing.lease is None or standing.lease != self._lease):
            _log.info("another controller leads", leader=standing.value.decode(), epoch=standing.create_revision)
            await self._until_gone(standing.create_revision)
        if self._lease is None:
            self._lease = await self._store.grant(self._ttl_s)
        else:
            await self._store.keep_alive(self._lease)
        claim = await self._store.create_if_absent(self._key, self._address.encode(), self._lease)
        # The lease tells whose it is: a claim whose answer was lost is found again, and is ours.
        if claim.item.lease != self._lease:
            return None
        self._backoff.reset()
        authority = self._authority = Authority(Epoch(claim.item.create_revision))
        holding = self._hold(authority, self._lease, claim.item.create_revision)
        self._holding = asyncio.create_task(holding, name="leadership")
        _log.info("leading", epoch=authority.epoch, address=self._address)
        return authority

    async def _hold(self, authority: Authority, lease: LeaseId, create_revision: int) -> None:
        """Until somebody else leads. A key that only expired is claimed again, under the same authority."""
        try:
            while True:
                await self._until_lease_or_key_is_gone(lease, create_revision)
                lease, claim = await self._claim_again()
                if claim.item.lease != lease:
                    _log.warning("another controller leads", leader=claim.item.value.decode())
                    return
                _log.info("leader key claimed again", epoch=authority.epoch)
                create_revision = claim.item.create_revision
        finally:
            authority.lost.set()
            _log.warning("leadership ended", epoch=authority.epoch)

    async def _until_lease_or_key_is_gone(self, lease: LeaseId, create_revision: int) -> None:
        tasks = [
            asyncio.create_task(self._refresh_until_gone(lease)),
            asyncio.create_task(self._until_gone(create_revision)),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end_tasks(*tasks)

    async def _claim_again(self) -> tuple[LeaseId, Claim]:
        """A new lease, and the key under it unless somebody has it; however long the store is away."""
        while True:
            try:
                lease = self._lease = await self._store.grant(self._ttl_s)
                return lease, await self._store.create_if_absent(self._key, self._address.encode(), lease)
            except LeaseGone:
                continue
            except STORE_TROUBLE as error:
                _log.warning("leadership waits for the store", error=str(error))
                await asyncio.sleep(self._backoff.next_s())

    async def _refresh_until_gone(self, lease: LeaseId) -> None:
        """Return when the store says that the lease is gone; an unreachable store proves nothing."""
        pause_s = 0.0
        while True:
            await asyncio.sleep(pause_s)
            try:
                await self._store.keep_alive(lease)
            except LeaseGone:
                return
            except STORE_TROUBLE as error:
                _log.warning("leadership waits for the store", error=str(error))
                pause_s = self._backoff.next_s()
            else:
                self._backoff.reset()
                pause_s = self._ttl_s / 3 * self._rng.uniform(0.8, 1.0)

    async def _until_gone(self, create_revision: int) -> None:
        """Return when the key no longer has this life; an unreachable store proves nothing."""
        backoff = Backoff(rng=self._rng)
        while True:
            try:
                listing = await self._store.get_prefix(self._key)
                if not any(item.key == self._key and item.create_revision == create_revision for item in listing.items):
                    return
                backoff.reset()
                await self._until_deleted(listing.revision + 1)
            except RevisionCompacted:
                continue
            except STORE_TROUBLE as error:
                _log.debug("watch of the leader key broke", error=str(error))
                await asyncio.sleep(backoff.next_s())

    async def _until_deleted(self, from_revision: int) -> None:
        """Return at the first deletion of the key, or when a listing is due anyway."""
        watch = self._store.watch(self._key, from_revision)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RELIST_S):
                    while True:
                        event = await watch.next()
                        if event.key == self._key and event.value is None:
                            return
        finally:
            watch.cancel()


async def _standing(store: MembershipStore, key: str) -> Item | None:
    listing = await store.get_prefix(key)
    return next((item for item in listing.items if item.key == key), None)
