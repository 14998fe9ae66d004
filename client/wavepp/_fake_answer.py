"""What a test tells the fake controller and what it sees of it: answers, gates, received requests.

Owns plain values and the latches that order events; `testing.py` makes them public, `_fake_service.py`
acts on them. Latches may be opened by any thread, because blocking tests have no event loop.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from wavepp_proto.errors import WaveppError
from wavepp_proto.terms import PrefillRequest, StageIndex, Timings, TokenLogprob


class Step(Enum):
    """What the controller says about a request, in this order."""

    QUEUED = "queued"
    ADMITTED = "admitted"
    FINISHED = "finished"


class Outcome(Enum):
    """How a request ended, as the controller saw it."""

    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    """By id, or because its stream was closed."""


class Gate:
    """Holds requests until it is opened, by any thread: tests order events without sleeping."""

    def __init__(self) -> None:
        self._opened: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._reached: concurrent.futures.Future[None] = concurrent.futures.Future()

    def open(self) -> None:
        """Let everyone pass, from now on. May be called again."""
        _set(self._opened)

    async def reached(self) -> None:
        """Wait until a first request stands at the gate, or has passed it."""
        await _wait(self._reached)

    async def wait(self) -> None:
        """Stand at the gate."""
        _set(self._reached)
        await _wait(self._opened)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the controller answers to one request."""

    first_token: int = 0
    cached_tokens: int = 0
    """Also the endpoint; rule of the real one: a multiple of the block size, below the prompt's length."""
    candidate: int | None = None
    """None: the same as `cached_tokens`."""
    limiting_stage: StageIndex | None = None
    best_stage_hit: int | None = None
    """None: the same as the candidate."""
    lost_to_snapshots: int = 0
    shared_tokens: int = 0
    rounds: int = 1
    progress: tuple[int, ...] = ()
    """Computed tokens of the Progress events between Admitted and Finished."""
    waves: int = 1
    timings: Timings = field(default_factory=Timings)
    top_logprobs: tuple[TokenLogprob, ...] = ()
    logits: bytes = b""
    """Packed little-endian float32."""
    error: WaveppError | None = None
    """Ends the request at `error_at` instead of the event of that step."""
    error_at: Step = Step.QUEUED
    error_as_status: bool = False
    """Send the error as the stream's status alone; else as a Failed event."""
    gates: Mapping[Step, Gate] = field(default_factory=dict)
    """Gates before the event (or error) of a step."""
    heeds_deadline: bool = True
    """False: stays silent past the request's deadline, like a controller that hangs."""


@dataclass(eq=False)
class Received:
    """One request as it arrived, and how it ended."""

    request: PrefillRequest
    frames: int
    """Messages that its prompt came in."""
    outcome: Outcome | None = None
    """None while it lives."""
    _ended: concurrent.futures.Future[None] = field(default_factory=concurrent.futures.Future, repr=False)

    async def ended(self) -> Outcome:
        """Wait for the outcome."""
        await _wait(self._ended)
        assert self.outcome is not None
        return self.outcome

    def end(self, outcome: Outcome) -> None:
        """Called by the service; a request ends once."""
        if self.outcome is None:
            self.outcome = outcome
            _set(self._ended)


def _set(latch: concurrent.futures.Future[None]) -> None:
    if not latch.done():
        latch.set_result(None)


async def _wait(latch: concurrent.futures.Future[None]) -> None:
    # Shielded: cancelling one who waits must not cancel the latch for the others.
    await asyncio.shield(asyncio.wrap_future(latch))
