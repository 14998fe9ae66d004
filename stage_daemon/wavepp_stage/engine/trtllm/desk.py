"""One loaded TensorRT-LLM executor, as engine and cache share it.

Owns the calls that hold, claim, reserve, commit and free, the requests that run, and the fence: after any failure that
nobody expected nothing more is asked of TensorRT-LLM until everything is loaded again. All methods run on the
executor's thread; `rooms` and `fault` are plain data that any thread may read. Made by `load.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Protocol

from wavepp_proto.errors import InternalError
from wavepp_proto.terms import HoldKey
from wavepp_stage.engine.trtllm import compat
from wavepp_stage.engine.trtllm.plain import CacheEvent, Room

NO_ROOM = Room(0, 0, 0)


class DeskOwner(Protocol):
    """The engine, as the cache sees it."""

    @property
    def desk(self) -> Desk | None:
        """Of the present load; None where there is none."""


class Desk:
    """Whoever finds `fault` set must not call anything but `fence`."""

    def __init__(self, executor: compat.Executor, block_tokens: int) -> None:
        self.executor = executor
        self.manager = executor.kv_cache_manager
        self.block_tokens = block_tokens
        self.requests: dict[HoldKey, compat.Request] = {}
        """Sequences that waves may name."""
        self.fault = ""
        """Why nothing is asked any more; empty while all is well."""
        self.user: object | None = None
        """The cache whose holds these are: another one finds nothing reusable here."""
        self.rooms = (NO_ROOM, NO_ROOM)
        """Device and host, as they were after the last job."""
        self._numbers = count(1)
        self._pins: dict[int, compat.Pin] = {}
        """Everything that is held, whoever asked for it."""
        self._reserved: dict[int, compat.Request] = {}
        self.look()

    def fence(self, cause: str) -> None:
        self.fault = self.fault or cause

    @contextmanager
    def guarded(self, doing: str) -> Iterator[None]:
        """What fails in here fences the desk, and is told as the broken invariant that it is."""
        try:
            yield
        except InternalError as error:
            self.fence(error.message)  # told already, by an inner step
            raise
        except Exception as error:
            self.fence(f"it failed to {doing}: {type(error).__name__}: {error}")
            raise InternalError(f"TensorRT-LLM failed to {doing}: {error}", field="engine", value="trtllm") from error

    def look(self) -> None:
        """Read how full the tiers are."""
        host = compat.room(self.manager, 1)
        self.rooms = (compat.room(self.manager, 0) or NO_ROOM, host or NO_ROOM)

    def probe(self, tokens: list[int], salt: str | None) -> int:
        """Tokens of the longest reusable prefix, on a block boundary."""
        return self._floor(compat.probe(self.manager, tokens, salt)) if tokens else 0

    def pin(self, tokens: list[int], salt: str | None, endpoint: int) -> tuple[compat.Pin | None, int] | None:
        """Hold the longest usable prefix of at most `endpoint` tokens: (pin, its length), or None for want of a page.

        A manager may answer less than it was asked for (evicted meanwhile, pruned to a snapshot): then the shorter
        prefix is asked for by its own length, until what is held is exactly what was asked."""
        while endpoint > 0:
            held = compat.hold(self.manager, tokens[:endpoint], salt)
            if held is None:
                return None
            pin, reached = held
            if reached == endpoint:
                self._pins[id(pin)] = pin
                return pin, endpoint
            pin.close()
            endpoint = min(self._floor(reached), endpoint - self.block_tokens)
        return None, 0

    def unpin(self, pin: compat.Pin) -> None:
        del self._pins[id(pin)]
        pin.close()

    def close(self) -> None:
        """Ask nothing any more, and hold nothing: a hold that outlives the load must not keep its weights. Before the
        manager is shut down, which refuses while a cache is open that it does not know by request."""
        self.fence("the engine was closed")
        pins, self._pins = list(self._pins.values()), {}
        self.requests.clear()
        self._reserved.clear()
        del self.executor, self.manager
        for pin in pins:
            pin.close()

    def reserve(self, tokens: list[int], salt: str | None, endpoint: int) -> compat.Request | None:
        """A row, exactly `endpoint` tokens of cached prefix and pages for the whole prompt; None, and nothing taken,
        where any of it is not to be had."""
        if compat.free_rows(self.manager) == 0:
            return None
        request = compat.make_request(next(self._numbers), tokens, salt)
        if compat.claim(self.manager, request, endpoint) == endpoint:
            compat.settle(request, endpoint, self.block_tokens)
            if compat.reserve(self.manager, request):
                self._reserved[request.py_request_id] = request
                return request
        compat.free(self.executor, request)
        return None

    def free(self, request: compat.Request) -> None:
        del self._reserved[request.py_request_id]
        compat.free(self.executor, request)

    def commit(self, request: compat.Request) -> None:
        compat.commit(self.manager, request)

    def take_events(self) -> list[CacheEvent]:
        return compat.take_events(self.manager)

    def forget_reuse(self) -> None:
        """Drop everything reusable, and the events that say so; nothing may hold any of it."""
        self.manager.reset_reuse_state()
        compat.take_events(self.manager)

    def start_over(self) -> None:
        """Let go of everything, reusable blocks as well."""
        self.requests.clear()
        for request in list(self._reserved.values()):
            self.free(request)
        for pin in list(self._pins.values()):
            self.unpin(pin)
        self.forget_reuse()
        self.look()

    def block_keys(self, tokens: list[int], salt: str | None) -> list[str]:
        return compat.block_keys(self.manager, tokens, salt)

    def _floor(self, tokens: int) -> int:
        return tokens // self.block_tokens * self.block_tokens
