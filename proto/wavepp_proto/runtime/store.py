"""The membership store: what registration, watching and election need from etcd, and no more.

Owns the `MembershipStore` Protocol and its value types. `etcd_store.py` implements it over etcd,
`memory_store.py` inside one process for tests. Callers: `membership.py`, `election.py`.

Semantics are etcd's: every write has a revision that only grows; a key put under a lease vanishes
when the lease expires or is revoked; a watch started at an old, compacted revision fails with
`RevisionCompacted`, after which only a fresh listing is true.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NewType, Protocol

from wavepp_proto.errors import MembershipUnavailable, Unauthenticated

STORE_TROUBLE: Final = (MembershipUnavailable, Unauthenticated)
"""What a caller waits out: an unreachable store, or one whose users are still being set up."""

LeaseId = NewType("LeaseId", int)
"""A store's lease (not a prefix lease on a stage): what keeps a registered key alive."""


class LeaseGone(Exception):
    """The lease expired or was revoked, and every key under it is gone: register anew."""


class RevisionCompacted(Exception):
    """The watch starts before what the store remembers: list again."""


@dataclass(frozen=True, slots=True)
class Item:
    key: str
    value: bytes
    create_revision: int
    """Revision at which the key came into being; a re-created key has a higher one."""
    mod_revision: int
    lease: LeaseId | None


@dataclass(frozen=True, slots=True)
class Listing:
    """An atomic copy of everything under a prefix, by key."""

    revision: int
    """Revision of the copy; watch from `revision + 1`."""
    items: tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class StoreEvent:
    key: str
    value: bytes | None
    """None: the key was deleted."""
    revision: int


@dataclass(frozen=True, slots=True)
class Claim:
    """Answer of `create_if_absent`: whether it created, and what stands there now."""

    created: bool
    item: Item


class Watch(Protocol):
    """Events of one prefix in revision order. Reading may be cancelled and resumed without loss."""

    async def next(self) -> StoreEvent:
        """The next event. Raises RevisionCompacted, or MembershipUnavailable once the stream broke."""
        ...

    def cancel(self) -> None:
        """Stop; idempotent. A pending or later `next` raises MembershipUnavailable."""
        ...


class MembershipStore(Protocol):
    """Every call has a deadline of its own and raises MembershipUnavailable when it passes.

    A call that failed so may still have taken effect: callers repeat, and repeating is harmless.
    """

    async def put(self, key: str, value: bytes, lease: LeaseId | None = None) -> None:
        """Write; replaces value and lease. Raises LeaseGone."""
        ...

    async def create_if_absent(self, key: str, value: bytes, lease: LeaseId | None = None) -> Claim:
        """Write only if the key does not exist. Raises LeaseGone (when it had to write)."""
        ...

    async def get_prefix(self, prefix: str) -> Listing: ...

    def watch(self, prefix: str, from_revision: int) -> Watch:
        """Events at or after `from_revision`; never blocks, errors come from `next`."""
        ...

    async def grant(self, ttl_s: int) -> LeaseId: ...

    async def keep_alive(self, lease: LeaseId) -> None:
        """Reset the lease's time to live. Raises LeaseGone."""
        ...

    async def revoke(self, lease: LeaseId) -> None:
        """End the lease and delete its keys; a lease that is gone already is no error."""
        ...

    async def close(self) -> None:
        """Cancel watches, then let go of the connection. Idempotent."""
        ...
