"""A real etcd for tests, started through the product's own `etcd_server.py`.

Runs it from an event loop on a thread of its own, so that it fits tests of any scope, plain or
asyncio, and so that the child's parent thread lives as long as the child.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from tests.harness.eventually import eventually_sync
from wavepp_proto.runtime.channels import PLAIN_SERVER, ServerSecurity
from wavepp_proto.runtime.etcd_client import EtcdConnection, EtcdOptions
from wavepp_proto.runtime.etcd_server import EtcdServer
from wavepp_proto.runtime.etcd_store import EtcdStore

T = TypeVar("T")


class RealEtcd:
    """Start with the constructor, end with `close`."""

    def __init__(
        self, security: ServerSecurity = PLAIN_SERVER, base: Path | None = None, client_port: int | None = None
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="test-etcd", daemon=True)
        self._thread.start()
        self._paused = False
        self.server: EtcdServer = self._await(EtcdServer.start(security=security, base=base, client_port=client_port))

    @property
    def options(self) -> EtcdOptions:
        return self.server.options

    def open_store(self, timeout_s: float = 2.0) -> EtcdStore:
        """A new connection; the test closes it."""
        return EtcdStore(EtcdOptions(endpoints=self.options.endpoints, timeout_s=timeout_s))

    def perform(self, operation: Callable[[Any], T]) -> T:
        """`operation(client)` on a raw etcd3 client, as an operator from outside would."""
        connection = EtcdConnection(self.options)
        try:
            return connection.perform(operation)
        finally:
            connection.close()

    def compact(self) -> None:
        """Compact the whole history up to now."""
        self.perform(lambda client: client.compact(client.get_prefix_response("/").header.revision, physical=True))

    def pause(self) -> None:
        os.kill(self.server.pid, signal.SIGSTOP)
        # The signal is sent, not yet obeyed: until every thread stands still, a request may be answered.
        eventually_sync(lambda: all(_is_stopped(task) for task in Path(f"/proc/{self.server.pid}/task").iterdir()))
        self._paused = True

    def resume(self) -> None:
        os.kill(self.server.pid, signal.SIGCONT)
        self._paused = False

    def close(self) -> None:
        if self._paused:
            self.resume()
        self._await(self.server.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _await(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=120)


def is_running(pid: int) -> bool:
    """False for a process that is gone or a zombie (nobody may be there to reap an orphan)."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def _is_stopped(task: Path) -> bool:
    """Whether one thread is in state T (stopped), by /proc."""
    return (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"
