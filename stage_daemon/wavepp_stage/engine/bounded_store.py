"""A torch.distributed store whose every answer is waited for no longer than a limit.

Owns that bound: TCPStore's own `add`, `check` and `get` of a key that is there wait for its host without one, be it
frozen or cut off, and an executor that hangs in them can neither serve nor end a formation. One thread asks; once it
hangs, it is abandoned with the store. Called by engines whose daemons agree through a store.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from wavepp_proto.errors import EngineFault

T = TypeVar("T")


class KeyStore(Protocol):
    """What those ask of a torch.distributed store who only meet there..."""

    def set(self, key: str, value: str) -> None: ...

    def check(self, keys: list[str]) -> bool:
        """Whether all of them are set; does not wait for them."""


class Store(KeyStore, Protocol):
    """...and those who agree on something."""

    def add(self, key: str, amount: int) -> int: ...

    def get(self, key: str) -> bytes:
        """Of a key that is set."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Of a key that is not set and "" expected: sets it. Returns what is there now."""

    def delete_key(self, key: str) -> bool: ...


class BoundedStore:
    """A Store that raises EngineFault where another one would hang: from then on at once, whatever is asked."""

    def __init__(self, store: Store, limit_s: float) -> None:
        self._store, self._limit_s = store, limit_s
        self._silent = False
        self._asked: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._answer, name="store", daemon=True).start()

    def set(self, key: str, value: str) -> None:
        self._ask(lambda: self._store.set(key, value))

    def add(self, key: str, amount: int) -> int:
        return self._ask(lambda: self._store.add(key, amount))

    def check(self, keys: list[str]) -> bool:
        return self._ask(lambda: self._store.check(keys))

    def get(self, key: str) -> bytes:
        return self._ask(lambda: self._store.get(key))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._ask(lambda: self._store.compare_set(key, expected, desired))

    def delete_key(self, key: str) -> bool:
        return self._ask(lambda: self._store.delete_key(key))

    def close(self) -> None:
        """Ends the thread; the store is somebody else's."""
        self._asked.put(None)

    def _ask(self, question: Callable[[], T]) -> T:
        future: Future[T] = Future()
        if not self._silent:
            self._asked.put((question, future))
            try:
                return future.result(self._limit_s)
            except TimeoutError:
                self._silent = True
        raise EngineFault("the stages' common store does not answer", field="store", limit=f"{self._limit_s:g} s")

    def _answer(self) -> None:
        while (asked := self._asked.get()) is not None:
            question, future = asked
            try:
                future.set_result(question())
            except Exception as error:  # the store's own; raised where it was asked
                future.set_exception(error)
