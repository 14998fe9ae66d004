"""The controller's view of who is registered (DESIGN.md).

Turns the store's listings and events into changes of membership. Does not register anybody
(`registrar.py`) and decides nothing about liveness: that is the heartbeat's business. Losing the
store freezes membership and ends nothing that runs. Used by the controller's runtime.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import Final

from wavepp_proto import limits
from wavepp_proto.errors import InvalidRequest
from wavepp_proto.runtime.backoff import Backoff
from wavepp_proto.runtime.logs import get_log
from wavepp_proto.runtime.record import decode_record, member_key, members_prefix
from wavepp_proto.runtime.store import STORE_TROUBLE, Listing, MembershipStore, RevisionCompacted, StoreEvent
from wavepp_proto.terms import DaemonKey, Incarnation, MemberRecord

RELIST_S: Final = limits.RELIST_MS / 1000
"""A listing this old is taken again even if the watch says nothing: it finds what a silent watch has missed, and a
connection that does not answer, well within the time for which a request waits (PIPELINE_WAIT_MS)."""

_log = get_log(__name__)


@dataclass(frozen=True, slots=True)
class MemberUp:
    """A daemon registered, or changed its record."""

    record: MemberRecord


@dataclass(frozen=True, slots=True)
class MemberGone:
    """A registration ended, or another incarnation took its place (its MemberUp follows)."""

    key: DaemonKey
    incarnation: Incarnation


MemberChange = MemberUp | MemberGone


class MemberWatch:
    """The members of one cluster as a stream of changes, for one reader.

    List, then watch from the listing's revision; list again after compaction, after a broken watch
    and every RELIST_S. Each change is told once. While the store does not answer, `frozen` is True
    and no change is told: nobody is gone because etcd is.
    """

    def __init__(
        self, store: MembershipStore, cluster: str, relist_s: float = RELIST_S, rng: random.Random | None = None
    ) -> None:
        self.frozen = True
        """What `members` holds may be old: the store has not answered since (or ever)."""
        self.listed = asyncio.Event()
        """Set once the changes of a first whole listing have been told."""
        self._store = store
        self._prefix = members_prefix(cluster)
        self._relist_s = relist_s
        self._backoff = Backoff(rng=rng)
        self._known: dict[str, MemberRecord] = {}

    @property
    def members(self) -> tuple[MemberRecord, ...]:
        """Every member told so far and not gone, by key."""
        return tuple(sorted(self._known.values(), key=lambda record: record.key))

    async def changes(self) -> AsyncGenerator[MemberChange, None]:
        """Changes without end; cancel the reading task to stop."""
        while True:
            try:
                listing = await self._store.get_prefix(self._prefix)
                self._thaw()
                for change in self._reconcile(listing):
                    yield change
                self.listed.set()
                async with contextlib.aclosing(self._follow(listing.revision + 1)) as followed:
                    async for change in followed:
                        yield change
            except RevisionCompacted:
                _log.info("watch was compacted away, listing again")
            except STORE_TROUBLE as error:
                self._freeze(error)
                await asyncio.sleep(self._backoff.next_s())

    async def _follow(self, from_revision: int) -> AsyncGenerator[MemberChange, None]:
        """Changes from the watch until the next listing is due."""
        loop = asyncio.get_running_loop()
        relist_at = loop.time() + self._relist_s
        watch = self._store.watch(self._prefix, from_revision)
        try:
            while (remaining := relist_at - loop.time()) > 0:
                try:
                    event = await asyncio.wait_for(watch.next(), remaining)
                except TimeoutError:
                    return
                for change in self._apply(event):
                    yield change
        finally:
            watch.cancel()

    def _reconcile(self, listing: Listing) -> Iterator[MemberChange]:
        present = {item.key: item for item in listing.items}
        for key in [key for key in self._known if key not in present]:
            yield from self._remove(key)
        for item in present.values():
            yield from self._set(item.key, item.value)

    def _apply(self, event: StoreEvent) -> Iterator[MemberChange]:
        if event.value is None:
            yield from self._remove(event.key)
        else:
            yield from self._set(event.key, event.value)

    def _set(self, key: str, value: bytes) -> Iterator[MemberChange]:
        try:
            record = decode_record(value)
            if member_key(record.cluster, record.key) != key:
                raise InvalidRequest("the record belongs to another key", field="key", value=key)
        except InvalidRequest as error:
            _log.warning("unreadable registration", key=key, error=error.message, **error.fields)
            yield from self._remove(key)
            return
        known = self._known.get(key)
        if known == record:
            return
        if known is not None and known.incarnation != record.incarnation:
            yield from self._remove(key)
        self._known[key] = record
        yield MemberUp(record)

    def _remove(self, key: str) -> Iterator[MemberChange]:
        record = self._known.pop(key, None)
        if record is not None:
            yield MemberGone(record.key, record.incarnation)

    def _thaw(self) -> None:
        self._backoff.reset()
        if self.frozen:
            _log.info("membership is live", members=len(self._known))
        self.frozen = False

    def _freeze(self, error: BaseException) -> None:
        if not self.frozen:
            _log.warning("membership is frozen", error=str(error), members=len(self._known))
        self.frozen = True
