"""One watch on etcd: a reader thread that posts what the stream says into the event loop.

Made by `etcd_store.py`. The package's own watcher is not used: it reconnects in a busy loop while
etcd is down. Here a broken stream ends the watch with MembershipUnavailable, and the reader of the
watch decides when to list again.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, Final

import grpc

from wavepp_proto.errors import MembershipUnavailable
from wavepp_proto.runtime.etcd_client import EtcdConnection
from wavepp_proto.runtime.store import RevisionCompacted, StoreEvent

_DELETE: Final = 1
"""mvccpb.Event.EventType.DELETE"""


class EtcdWatch:
    """See store.Watch. Created inside the event loop; `begin` runs on the store's worker thread."""

    def __init__(self, prefix: str, from_revision: int, on_end: Callable[[EtcdWatch], None]) -> None:
        self._prefix = prefix
        self._from_revision = from_revision
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Queue[StoreEvent | Exception] = asyncio.Queue()
        self._failure: Exception | None = None
        self._requests: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._cancelled = False
        self._call: Any = None

    async def next(self) -> StoreEvent:
        if self._failure is None:
            arrived = await self._arrived.get()
            if isinstance(arrived, StoreEvent):
                return arrived
            self._failure = arrived
            self.cancel()
        raise self._failure

    def cancel(self) -> None:
        with self._lock:
            if self._cancelled:
                return
            self._cancelled = True
            call = self._call
        self._on_end(self)
        self._requests.put(None)
        if call is not None:
            call.cancel()
        self._arrived.put_nowait(MembershipUnavailable("the watch was cancelled"))

    def begin(self, connection: EtcdConnection) -> None:
        """Open the stream and start reading it; a failure to open is what `next` raises."""
        with self._lock:
            if self._cancelled:
                return
            try:
                self._call = connection.watch(self._prefix, self._from_revision, iter(self._requests.get, None))
            except Exception as error:
                self._post(error)
                return
        threading.Thread(target=self._read, name="etcd-watch", daemon=True).start()

    def _read(self) -> None:
        try:
            for response in self._call:
                for outcome in _outcomes(response):
                    self._post(outcome)
            self._post(MembershipUnavailable("etcd ended the watch"))
        except grpc.RpcError as error:
            self._post(MembershipUnavailable(f"the watch broke: {error.details()}"))

    def _post(self, outcome: StoreEvent | Exception) -> None:
        try:
            self._loop.call_soon_threadsafe(self._arrived.put_nowait, outcome)
        except RuntimeError:
            # The loop is closed: nobody is left to read. The stream ends with its channel.
            self._call.cancel()


def _outcomes(response: Any) -> list[StoreEvent | Exception]:
    if response.compact_revision:
        return [RevisionCompacted(f"compacted at revision {response.compact_revision}")]
    if response.canceled:
        return [MembershipUnavailable("etcd cancelled the watch")]
    return [_event(event) for event in response.events]


def _event(event: Any) -> StoreEvent:
    value = None if event.type == _DELETE else event.kv.value
    return StoreEvent(event.kv.key.decode(), value, event.kv.mod_revision)
