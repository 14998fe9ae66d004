"""What a `Run` gathers of a request's events, and when its handler is woken."""

from __future__ import annotations

import asyncio

from wavepp_controller.runtime.run_outcome import RunOutcome
from wavepp_proto.terms import (
    Admitted,
    Attempt,
    ErrorInfo,
    Failed,
    PipelineId,
    Progress,
    Queued,
    RequestId,
)

ID = RequestId("a")
ADMITTED = Admitted(ID, Attempt(1), endpoint=32, candidate=32, limiting_stage=None, best_stage_hit=32, rounds=1)
FAILED = Failed(ID, ErrorInfo("CANCELLED", "it was cancelled"))


async def test_handler_is_woken_once_when_the_request_has_ended() -> None:
    run = RunOutcome()
    waiting = asyncio.create_task(run.outcome())
    for event in (Queued(ID, PipelineId("p"), 0), ADMITTED, Progress(ID, 32, 64)):
        run.put_nowait(event)
        await asyncio.sleep(0)
        assert not waiting.done()
    run.put_nowait(FAILED)
    assert await waiting is FAILED
    assert (run.pipeline, run.admitted) == ("p", ADMITTED)


async def test_nothing_is_known_but_the_failure_when_the_door_refused() -> None:
    run = RunOutcome()
    run.put_nowait(FAILED)
    assert await run.outcome() is FAILED
    assert (run.pipeline, run.admitted) == (None, None)


async def test_outcome_is_dropped_when_the_caller_has_gone() -> None:
    run = RunOutcome()
    waiting = asyncio.create_task(run.outcome())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    run.put_nowait(FAILED)
    assert waiting.cancelled()
