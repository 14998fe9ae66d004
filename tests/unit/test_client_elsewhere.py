"""A client where it does not belong: in a forked child, on a second event loop, closed while something hangs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from wavepp import AsyncClient, Client, _loop_thread
from wavepp._loop_thread import LoopThread
from wavepp.errors import DeadlineExpired, InvalidRequest, WaveppError
from wavepp.testing import FakeController

FORKED = """
import os, sys, wavepp
address = sys.argv[1]
with wavepp.Client(address) as parent:
    parent.prefill([1, 2, 3])
    stream = parent.stream([1, 2, 3])
    next(stream)
    child = os.fork()
    if not child:
        told = []
        for client in (parent, wavepp.Client(address)):
            try:
                client.prefill([1, 2, 3])
            except wavepp.errors.InvalidRequest as error:
                told.append(error.fields["field"])
            client.close()
        stream.close()
        del stream
        print(*told, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    print(parent.prefill([1, 2, 3]).prompt_tokens)
"""
"""In a process of its own: pytest's is not forked."""


def test_client_in_a_forked_child_is_refused_at_once_and_closes() -> None:
    with FakeController.sync() as controller:
        ran = subprocess.run(
            [sys.executable, "-c", FORKED, controller.address],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split("\n")[:2] == ["process process", "3"]


def test_fork_before_the_first_client_is_free_to_use_one() -> None:
    code = "import os, wavepp, sys\nif os.fork():\n    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))\n" + (
        "with wavepp.Client(sys.argv[1]) as client:\n    print(client.prefill([1, 2]).prompt_tokens)\n"
    )
    with FakeController.sync() as controller:
        ran = subprocess.run(
            [sys.executable, "-c", code, controller.address], capture_output=True, text=True, timeout=60
        )
    assert (ran.returncode, ran.stdout) == (0, "2\n"), ran.stderr


def test_second_event_loop_is_a_typed_error_and_close_is_safe_there() -> None:
    with FakeController.sync() as controller:
        client = AsyncClient(controller.address)

        async def use() -> int:
            return (await client.prefill([1, 2, 3])).prompt_tokens

        assert asyncio.run(use()) == 3
        with pytest.raises(InvalidRequest) as caught:
            asyncio.run(use())
        assert caught.value.fields["field"] == "loop"
        asyncio.run(client.close())  # the first loop has ended


def test_stream_read_on_another_loop_is_a_typed_error() -> None:
    with FakeController.sync() as controller:
        client = AsyncClient(controller.address)

        async def begin() -> object:
            return client.stream([1, 2, 3])

        async def read(stream: object) -> None:
            with pytest.raises(InvalidRequest):
                await anext(stream)  # type: ignore[call-overload]

        asyncio.run(read(asyncio.run(begin())))
        asyncio.run(client.close())


def test_close_returns_while_an_iterable_of_the_caller_holds_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_loop_thread, "STOP_S", 0.1)
    monkeypatch.setattr("wavepp._sync.STOP_S", 0.1)
    holds, free = threading.Event(), threading.Event()

    def prompts() -> Iterator[list[int]]:
        holds.set()
        free.wait(30)
        yield [1, 2, 3]

    with FakeController.sync() as controller:
        client = Client(controller.address)

        def read() -> None:
            with suppress(RuntimeError, WaveppError):  # the client was closed meanwhile
                list(client.prefill_many(prompts()))

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        assert holds.wait(30)
        client.close()
        assert not free.is_set()
        free.set()
        reader.join(30)
    assert not reader.is_alive()


def test_call_on_the_thread_has_a_deadline_when_it_is_given_one() -> None:
    thread = LoopThread("test")
    try:
        with pytest.raises(DeadlineExpired):
            thread.run(asyncio.sleep(30), within_s=0.05)
    finally:
        thread.stop()
    assert thread.stopped
