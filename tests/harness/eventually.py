"""Waiting for real processes without sleeps in tests.

`eventually` polls a predicate until it returns something truthy and hands that back; the limit is
generous, so that a slow machine makes a test slow and never red.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, overload

T = TypeVar("T")

_POLL_S = 0.02


@overload
async def eventually(predicate: Callable[[], Awaitable[T | None]], within: float = 30.0, about: str = "") -> T: ...
@overload
async def eventually(predicate: Callable[[], T | None], within: float = 30.0, about: str = "") -> T: ...
async def eventually(predicate: Callable[[], Any], within: float = 30.0, about: str = "") -> Any:
    """First truthy value of `predicate` (plain or async); AssertionError after `within` seconds."""
    deadline = time.monotonic() + within
    while True:
        outcome = predicate()
        value = await outcome if inspect.isawaitable(outcome) else outcome
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within} s: {about or predicate}")
        await asyncio.sleep(_POLL_S)


def eventually_sync(predicate: Callable[[], T | None], within: float = 30.0, about: str = "") -> T:
    """The same for tests without an event loop."""
    deadline = time.monotonic() + within
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within} s: {about or predicate}")
        time.sleep(_POLL_S)
