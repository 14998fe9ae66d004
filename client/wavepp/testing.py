"""A fake controller, so that users can test THEIR code without stages, etcd or a model.

    async with wavepp.testing.FakeController() as controller:
        controller.script(Answer(first_token=7, cached_tokens=64), Answer(error=errors.QueueFull("full")))
        async with wavepp.AsyncClient(controller.address) as client: ...

Owns what a test says and sees: answers, gates, received requests. It is a real gRPC server on
loopback that speaks the real contract, frames and cancellation included (`_fake_service.py`); it
computes nothing and accepts every token id. Blocking tests use `with FakeController.sync() as controller`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Self

from wavepp._fake_answer import Answer, Gate, Outcome, Received, Step
from wavepp._fake_service import add_services
from wavepp._loop_thread import LoopThread
from wavepp._types import Description
from wavepp_proto.runtime.channels import PLAIN_SERVER, ServerSecurity, bind_server, new_server, parse_address
from wavepp_proto.terms import PrefillRequest

__all__ = ["Answer", "FakeController", "Gate", "Outcome", "Received", "Step"]


DEFAULT_ANSWER: Final = Answer()
DESCRIPTION: Final = Description(
    pipeline="default",
    model="fake",
    model_path="",
    model_fingerprint="fake",
    vocabulary=32_000,
    window=1_048_576,
    block_tokens=64,
    stages=4,
    ready=True,
)


class FakeController:
    """An async context manager that serves Prefill and Admin.Status at `address`."""

    def __init__(
        self,
        listen: str = "127.0.0.1:0",
        *,
        answer: Answer | Callable[[PrefillRequest], Answer] = DEFAULT_ANSWER,
        description: Description = DESCRIPTION,
        tls: ServerSecurity = PLAIN_SERVER,
    ) -> None:
        """`answer` (or what it returns for a request) serves every request that nothing was scripted for."""
        self.answer = answer
        self.description = description
        self.requests: list[Received] = []
        """Every request that arrived whole, in order of arrival, refused ones included."""
        self.cancelled_ids: list[str] = []
        """Ids that `cancel` was called for, live or not."""
        self.describe_calls = 0
        self._listen = listen
        self._security = tls
        self._script: deque[Answer] = deque()
        self._arrived: asyncio.Queue[Received] = asyncio.Queue()
        self._address = ""
        self._stop: Callable[[], Any] | None = None

    @property
    def address(self) -> str:
        """host:port to give to a client."""
        if not self._address:
            raise RuntimeError("the fake controller has not been started")
        return self._address

    def script(self, *answers: Answer) -> None:
        """Answers for the next requests, in order of arrival."""
        self._script.extend(answers)

    async def next_request(self) -> Received:
        """Wait for the next request that this method has not returned yet."""
        return await self._arrived.get()

    def receive(self, received: Received) -> Answer:
        """Called by the service: note a request and choose its answer."""
        self.requests.append(received)
        self._arrived.put_nowait(received)
        if self._script:
            return self._script.popleft()
        return self.answer if isinstance(self.answer, Answer) else self.answer(received.request)

    async def start(self) -> Self:
        """Bind and serve. A stopped controller may be started again: same port, nothing live."""
        server = new_server()
        add_services(server, self)
        port = bind_server(server, self._address or self._listen, self._security)
        self._address = f"{parse_address(self._listen).host}:{port}"
        await server.start()
        self._stop = lambda: server.stop(None)
        return self

    async def stop(self) -> None:
        """Break every connection, as a crash would. May be called again."""
        stop, self._stop = self._stop, None
        if stop is not None:
            await stop()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @classmethod
    @contextmanager
    def sync(cls, listen: str = "127.0.0.1:0", **settings: Any) -> Iterator[Self]:
        """The same on a thread of its own, for tests without an event loop."""
        thread = LoopThread("fake-controller")
        try:
            controller = cls(listen, **settings)
            thread.run(controller.start())
            try:
                yield controller
            finally:
                thread.run(controller.stop())
        finally:
            thread.stop()
