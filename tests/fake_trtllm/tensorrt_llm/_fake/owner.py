"""One thread at a time: neither the cache manager nor a request may be used from two.

Owns the check. The first thread that calls owns the objects until it has ended; a call from another
one is a RuntimeError here, where the real package would corrupt memory. A started executor loop owns
them for ever.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


class Owner:
    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._loop_runs = False

    def take_for_loop(self) -> None:
        self._loop_runs = True

    def check(self, what: str) -> None:
        if self._loop_runs:
            raise RuntimeError(f"{what}: the executor's own loop runs and owns the cache")
        current = threading.current_thread()
        if self._thread is None or not self._thread.is_alive():
            self._thread = current
        if self._thread is not current and os.environ.get("FAKE_TRTLLM_THREADS") != "any":
            raise RuntimeError(f"{what}: called by {current.name}, but {self._thread.name} owns the cache")


def owned(method: Callable[_Params, _Result]) -> Callable[_Params, _Result]:
    """For methods of objects that have an `owner`."""

    @functools.wraps(method)
    def checked(*args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        target: Any = args[0]
        target.owner.check(f"{type(target).__name__}.{method.__name__}")
        return method(*args, **kwargs)

    return checked
