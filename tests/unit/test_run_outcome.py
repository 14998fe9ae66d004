"""What a run gathers of a request's events, and when its handler is woken."""

from __future__ import annotations

import asyncio

import pytest

from wavepp_controller.runtime.run_outcome import AwaitedRun
from wavepp_proto import convert, errors
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
    run = AwaitedRun()
    waiting = asyncio.create_task(run.answered())
    for event in (Queued(ID, PipelineId("p"), 0), ADMITTED, Progress(ID, 32, 64)):
        run.put_nowait(event)
        await asyncio.sleep(0)
        assert not waiting.done()
    run.put_nowait(FAILED)
    assert convert.run_response_from_pb(ID, await waiting) == ("p", ADMITTED, FAILED)


async def test_refusal_is_raised_when_the_door_refused() -> None:
    run = AwaitedRun()
    run.put_nowait(FAILED)
    with pytest.raises(errors.Cancelled, match="it was cancelled"):
        await run.answered()


async def test_outcome_is_dropped_when_the_caller_has_gone() -> None:
    run = AwaitedRun()
    waiting = asyncio.create_task(run.answered())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    run.put_nowait(FAILED)
    assert waiting.cancelled()


def test_answer_without_an_outcome_is_a_bug_when_asked_for() -> None:
    with pytest.raises(errors.InternalError):
        AwaitedRun().response()
