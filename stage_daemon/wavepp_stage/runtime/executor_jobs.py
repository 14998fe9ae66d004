"""What the executor's thread does besides waves, and what goes first.

Owns two queues: jobs for the engine (a load), which go before everything else, and admissions of engines
whose cache belongs to their thread (`cache_door.py`). At most ADMISSIONS_PER_WAVE of these go between two
steps of the wave path: admission waits for one wave at most, and a wave for a bounded number of admissions.
Plain data under the executor's condition.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from wavepp_proto.errors import EngineFault, InternalError, WaveppError

T = TypeVar("T")

BROKEN = (EngineFault, InternalError)
"""What says that the engine, or a cache of its own, is not to be trusted any more."""

ADMISSIONS_PER_WAVE = 16
"""Each is a round of up to 32 requests, and one controller leaves one unanswered: a bound for whatever comes later."""


@dataclass(frozen=True, slots=True)
class Job:
    """Work that somebody waits for on another thread."""

    work: Callable[[], Any]
    future: Future[Any]

    def run(self, engine: str) -> WaveppError | None:
        """Do it and answer; the fault that it ended in, if it was one of `engine` and not of who asked."""
        if not self.future.set_running_or_notify_cancel():
            return None
        try:
            self.future.set_result(self.work())
        except Exception as error:
            told = typed(error, engine)
            self.future.set_exception(told)
            return told if isinstance(told, BROKEN) else None
        return None

    def refuse(self, error: WaveppError) -> None:
        """Answer without doing it."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


def typed(error: Exception, engine: str) -> WaveppError:
    """An engine may raise anything; whoever hears of it gets it typed."""
    if isinstance(error, WaveppError):
        return error
    return EngineFault(f"{type(error).__name__}: {error}", engine=engine)


def closed() -> EngineFault:
    """What waits for a thread that ends."""
    return EngineFault("the executor is closing", field="executor")


class ExecutorJobs:
    def __init__(self) -> None:
        self._engine: deque[Job] = deque()
        self._admissions: deque[Job] = deque()
        self._gone_ahead = 0
        """Admissions since the last step of the wave path."""

    def for_engine(self, work: Callable[[], T]) -> Future[T]:
        return _put(self._engine, work)

    def admit(self, work: Callable[[], T]) -> Future[T]:
        return _put(self._admissions, work)

    def next_for_engine(self) -> Job | None:
        return self._engine.popleft() if self._engine else None

    def next_admission(self, wave_waits: bool) -> Job | None:
        """The next admission, unless the wave path waits and has let enough of them go ahead."""
        if not self._admissions or (wave_waits and self._gone_ahead >= ADMISSIONS_PER_WAVE):
            return None
        self._gone_ahead += 1
        return self._admissions.popleft()

    def wave_goes(self) -> None:
        """The wave path takes a step."""
        self._gone_ahead = 0

    def refuse_admissions(self, error: WaveppError) -> None:
        """Answer all that wait: what they were about is over."""
        while self._admissions:
            self._admissions.popleft().refuse(error)

    def refuse_all(self, error: WaveppError) -> None:
        self.refuse_admissions(error)
        while self._engine:
            self._engine.popleft().refuse(error)


def _put(queue: deque[Job], work: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()
    queue.append(Job(work, future))
    return future
