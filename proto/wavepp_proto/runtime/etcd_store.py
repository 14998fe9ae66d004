"""MembershipStore over etcd: asyncio in front, one worker thread with a synchronous client behind.

All calls run on that one thread with a deadline each, so the event loop never blocks and the client
is never shared between threads. Watches have reader threads of their own (`etcd_watch.py`).
Opened by the runtimes of controller and stage daemon, and by the client to find the leader.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from wavepp_proto.errors import MembershipUnavailable
from wavepp_proto.runtime.etcd_client import EtcdConnection, EtcdOptions
from wavepp_proto.runtime.etcd_watch import EtcdWatch
from wavepp_proto.runtime.store import Claim, Item, LeaseGone, LeaseId, Listing

T = TypeVar("T")

_QUEUE_FACTOR: Final = 3
"""A call waits for the worker thread and runs within this many call deadlines."""


class EtcdStore:
    """See store.MembershipStore. Use it from one event loop. Raises InvalidRequest on bad options."""

    def __init__(self, options: EtcdOptions) -> None:
        self._patience_s = options.timeout_s * _QUEUE_FACTOR
        self._connection = EtcdConnection(options)
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="etcd")
        self._watches: set[EtcdWatch] = set()
        self._closed = False

    async def put(self, key: str, value: bytes, lease: LeaseId | None = None) -> None:
        await self._call(lambda client: client.put(key, value, lease=lease))

    async def create_if_absent(self, key: str, value: bytes, lease: LeaseId | None = None) -> Claim:
        def operation(client: Any) -> Claim:
            ops = client.transactions
            created, answers = client.transaction(
                compare=[ops.create(key) == 0],
                success=[ops.put(key, value, lease=lease), ops.get(key)],
                failure=[ops.get(key)],
            )
            ((stored, kv),) = answers[-1]
            return Claim(created, Item(key, stored, kv.create_revision, kv.mod_revision, _lease(kv.lease_id)))

        return await self._call(operation)

    async def get_prefix(self, prefix: str) -> Listing:
        def operation(client: Any) -> Listing:
            answer = client.get_prefix_response(prefix, sort_order="ascend")
            return Listing(answer.header.revision, tuple(_item(kv) for kv in answer.kvs))

        return await self._call(operation)

    def watch(self, prefix: str, from_revision: int) -> EtcdWatch:
        watch = EtcdWatch(prefix, from_revision, self._watches.discard)
        self._watches.add(watch)
        if self._closed:
            watch.cancel()
        else:
            self._worker.submit(watch.begin, self._connection)
        return watch

    async def grant(self, ttl_s: int) -> LeaseId:
        return await self._call(lambda client: LeaseId(client.lease(ttl_s).id))

    async def keep_alive(self, lease: LeaseId) -> None:
        answers = await self._call(lambda client: list(client.refresh_lease(lease)))
        # A dead lease is answered with TTL 0, not with an error.
        if not answers or answers[0].TTL <= 0:
            raise LeaseGone(f"lease {lease:x} is gone")

    async def revoke(self, lease: LeaseId) -> None:
        try:
            await self._call(lambda client: client.revoke_lease(lease))
        except LeaseGone:
            return

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for watch in tuple(self._watches):
            watch.cancel()
        closing = asyncio.get_running_loop().run_in_executor(self._worker, self._connection.close)
        await asyncio.wait((closing,), timeout=self._patience_s)  # behind calls that etcd does not answer
        self._worker.shutdown(wait=False)

    async def _call(self, operation: Callable[[Any], T]) -> T:
        if self._closed:
            raise MembershipUnavailable("the membership store is closed")
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._patience_s):
                return await loop.run_in_executor(self._worker, self._connection.perform, operation)
        except TimeoutError as error:
            raise MembershipUnavailable(f"etcd gave no answer within {self._patience_s} s") from error


def _item(kv: Any) -> Item:
    return Item(kv.key.decode(), kv.value, kv.create_revision, kv.mod_revision, _lease(kv.lease))


def _lease(number: int) -> LeaseId | None:
    return LeaseId(number) if number else None
