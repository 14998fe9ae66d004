"""What one run answers, gathered while the request lives.

Owns the three facts of the answer. A stream of events tells each as it comes; a run tells them all at the end, so
whoever waits for it is woken once, not at each. Filled by the shell, which sees no difference; read by
`prefill_service` and `run_stream`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod

from wavepp_proto import convert
from wavepp_proto.errors import InternalError, from_info
from wavepp_proto.terms import Admitted, Failed, Finished, PipelineId, PrefillEvent, Queued
from wavepp_proto.v1 import prefill_pb2 as pb


class RunOutcome(ABC):
    """Of one request."""

    def __init__(self) -> None:
        self.pipeline: PipelineId | None = None
        """None: it was refused at the door."""
        self.admitted: Admitted | None = None
        """Of the last attempt."""
        self.outcome: Finished | Failed | None = None

    def put_nowait(self, event: PrefillEvent) -> None:
        match event:
            case Finished() | Failed():
                if self.outcome is None:
                    self.outcome = event
                    self.ended()
            case Queued():
                self.pipeline = event.pipeline
            case Admitted():
                self.admitted = event

    @abstractmethod
    def ended(self) -> None:
        """Called once, when the outcome is there."""

    def response(self) -> pb.RunResponse:
        """The answer, once the outcome is there. Raises what the request was refused with at the door."""
        if self.outcome is None:
            raise InternalError("a run is answered before it has ended")
        if self.pipeline is not None:
            return convert.run_response_to_pb(self.pipeline, self.admitted, self.outcome)
        if isinstance(self.outcome, Failed):
            raise from_info(self.outcome.error)
        raise InternalError("a request was finished that was never queued")


class AwaitedRun(RunOutcome):
    """A run that has a handler of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._there = asyncio.Event()

    def ended(self) -> None:
        self._there.set()

    async def answered(self) -> pb.RunResponse:
        """Wait for the outcome. Raises as `response` does."""
        await self._there.wait()
        return self.response()
