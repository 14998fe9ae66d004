"""The blocking client: the asyncio one on an event loop of its own thread.

Owns nothing but the translation of its methods; no rule of the SDK is written here a second time.
The methods, their options and their errors are those of `AsyncClient`.
"""

from __future__ import annotations

import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from contextlib import suppress
from typing import Self, TypeVar, Unpack

from wavepp._client import AsyncClient, ClientOptions
from wavepp._loop_thread import STOP_S, LoopThread
from wavepp._status import ClusterStatus
from wavepp._stream import PrefillStream
from wavepp._types import Description, PrefillOutcome, PrefillResult, Prompt, RequestOptions, SharedOptions
from wavepp._wire import Event
from wavepp_proto.errors import DeadlineExpired

T = TypeVar("T")


class Client:
    """A blocking client of one controller. May be shared by threads; close it, or use it in `with`.

    `with wavepp.Client() as client: result = client.prefill([1, 2, 3])`

    Ctrl-C during a call cancels its request. Not usable from its own callbacks; a child that was
    forked gets InvalidRequest.
    """

    def __init__(self, address: str | None = None, **options: Unpack[ClientOptions]) -> None:
        """The settings are those of `AsyncClient`."""
        self._thread = LoopThread("wavepp-client")
        try:
            self._client = AsyncClient(address, **options)
        except BaseException:
            self._thread.stop()
            raise
        # A client that nobody closed must not keep the interpreter from ending.
        self._stop = weakref.finalize(self, LoopThread.stop, self._thread)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what is under way, in any thread, with Cancelled. May be called again."""
        if self._thread.forked:
            self._stop.detach()  # the parent's connections are the parent's to close
        elif self._stop.alive:
            try:
                with suppress(DeadlineExpired):
                    self._thread.run(self._client.close(), within_s=STOP_S)
            finally:
                self._stop()

    def prefill(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> PrefillResult:
        """Prefill one prompt and return its first token."""
        return self._thread.run(self._client.prefill(prompt, **options))

    def stream(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> Stream:
        """The same request as events: Queued, Admitted, Progress, Finished; a failure is raised."""
        return Stream(self._thread, self._thread.run(self._begin(prompt, options)))

    def prefill_many(
        self, prompts: Iterable[Prompt], *, concurrency: int = 8, **options: Unpack[SharedOptions]
    ) -> Iterator[PrefillOutcome]:
        """Prefill `prompts`, `concurrency` at a time; one outcome each, in the order they complete.

        `prompts` is read on the client's thread.
        """
        outcomes = self._client.prefill_many(prompts, concurrency=concurrency, **options)
        return _pulled(self._thread, outcomes)

    def cancel(self, request_id: str) -> bool:
        """Cancel a request, of any client. False: no such live request."""
        return self._thread.run(self._client.cancel(request_id))

    def describe(self, pipeline: str | None = None) -> Description:
        """Model, window and readiness of a pipeline; None asks for the controller's default one."""
        return self._thread.run(self._client.describe(pipeline))

    def status(self, *, requests: bool = False) -> ClusterStatus:
        """What the controller knows and does; `requests` lists every live request too."""
        return self._thread.run(self._client.status(requests=requests))

    async def _begin(self, prompt: Prompt, options: RequestOptions) -> PrefillStream:
        return self._client.stream(prompt, **options)


class Stream:
    """A `PrefillStream` for a caller without event loop: an iterator and a context manager."""

    def __init__(self, thread: LoopThread, stream: PrefillStream) -> None:
        self._thread = thread
        self._stream = stream

    @property
    def request_id(self) -> str:
        return self._stream.request_id

    @property
    def trace_id(self) -> str:
        return self._stream.trace_id

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        event = self._thread.run(_next(self._stream))
        if event is None:
            raise StopIteration
        return event

    def result(self) -> PrefillResult:
        """Read on to the outcome and sum it up."""
        return self._thread.run(self._stream.result())

    def close(self) -> None:
        """Cancel the request if it has no outcome yet. May be called again."""
        if not (self._thread.stopped or self._thread.forked):
            self._thread.run(self._stream.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _pulled(thread: LoopThread, items: AsyncGenerator[T, None]) -> Iterator[T]:
    try:
        while (item := thread.run(_next(items))) is not None:
            yield item
    finally:
        if not (thread.stopped or thread.forked):
            thread.run(items.aclose())


async def _next(items: AsyncIterator[T]) -> T | None:
    """The next item; None at the end, which no item is."""
    return await anext(items, None)
