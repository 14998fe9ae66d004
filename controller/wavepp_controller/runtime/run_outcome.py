"""What one `Run` answers, gathered while the request lives.

Owns the three facts of the answer. A stream tells every event as it comes; a `Run` tells them all at the end, so
its handler is woken once, not at each. Filled by the shell, which sees no difference; read by `prefill_service`.
"""

from __future__ import annotations

import asyncio

from wavepp_proto.terms import Admitted, Failed, Finished, PipelineId, PrefillEvent, Queued


class RunOutcome:
    """Of one request, on the running event loop."""

    def __init__(self) -> None:
        self.pipeline: PipelineId | None = None
        """None: it was refused at the door."""
        self.admitted: Admitted | None = None
        """Of the last attempt."""
        self._outcome: asyncio.Future[Finished | Failed] = asyncio.get_running_loop().create_future()

    def put_nowait(self, event: PrefillEvent) -> None:
        match event:
            case Finished() | Failed():
                if not self._outcome.done():  # its caller may be gone already
                    self._outcome.set_result(event)
            case Queued():
                self.pipeline = event.pipeline
            case Admitted():
                self.admitted = event

    async def outcome(self) -> Finished | Failed:
        return await self._outcome
