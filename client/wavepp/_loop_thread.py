"""An event loop on a thread of its own, for callers that have none.

Owns the thread's life and the hand-over of coroutines to it; knows nothing of clients. Called by the
blocking client and by the fake controller for blocking tests.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from wavepp_proto.errors import Cancelled, DeadlineExpired
from wavepp_proto.limits import CLOSE_S
from wavepp_proto.runtime.channels import check_not_forked

Started = concurrent.futures.Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]]
T = TypeVar("T")
STOP_S = 2 * CLOSE_S
"""Longest wait for the thread: a callback or an iterable of the caller's may hold its loop. It is a daemon thread."""


class LoopThread:
    """`run` may be called from any number of other threads, `stop` once or often."""

    def __init__(self, name: str) -> None:
        # Guards the order of the last `run` and `stop`: nothing may be handed to a loop that ended.
        self._gate = threading.Lock()
        self._stopped = False
        self._process = os.getpid()
        started: concurrent.futures.Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = (
            concurrent.futures.Future()
        )
        self._thread = threading.Thread(target=lambda: asyncio.run(_serve(started)), name=name, daemon=True)
        self._thread.start()
        self._loop, self._stop = started.result(STOP_S)

    @property
    def stopped(self) -> bool:
        return self._stopped

    @property
    def forked(self) -> bool:
        """This is a child of the process that has the thread: nothing runs here."""
        return os.getpid() != self._process

    def run(self, work: Coroutine[Any, Any, T], within_s: float | None = None) -> T:
        """The result of `work`. Interrupting the wait (Ctrl-C) cancels it; so does `stop`, with Cancelled.

        Raises InvalidRequest in a forked child, DeadlineExpired after `within_s` seconds."""
        if self.forked:
            work.close()
            check_not_forked(self._process)
        with self._gate:
            if self._stopped or threading.current_thread() is self._thread:
                work.close()
                raise RuntimeError("the client is closed" if self._stopped else "called from the client's own thread")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(within_s)
        except TimeoutError:
            if future.done():
                raise
            raise DeadlineExpired(f"not done within {within_s:g} s", field="within_s", value=within_s) from None
        except concurrent.futures.CancelledError:
            raise Cancelled("the client was closed while the call was under way") from None
        finally:
            future.cancel()

    def stop(self) -> None:
        """Cancel what still runs, end the loop and wait for its thread, `STOP_S` at most. Nothing in a forked child."""
        if self.forked:
            return
        with self._gate:
            already, self._stopped = self._stopped, True
        if not already:
            self._loop.call_soon_threadsafe(self._stop.set)
        if threading.current_thread() is not self._thread:
            self._thread.join(STOP_S)


async def _serve(started: Started) -> None:
    stop = asyncio.Event()
    started.set_result((asyncio.get_running_loop(), stop))
    await stop.wait()
