"""Frames of prompts on their way in: what all of them may hold together, and how long one may take."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.harness.eventually import eventually
from wavepp_controller.runtime.prompt_intake import PromptIntake
from wavepp_proto import convert, errors, limits
from wavepp_proto.v1 import prefill_pb2


def header(name: str, tokens: int, **more: Any) -> prefill_pb2.PrefillHeader:
    return prefill_pb2.PrefillHeader(request_id=name, prompt_tokens=tokens, **more)


def packed(tokens: int) -> bytes:
    return b"\1\0\0\0" * tokens


def frame(name: str = "", said: int = 0, tokens: int = 0, **more: Any) -> prefill_pb2.SubmitRequest:
    """With a header if `name` is given; never the last."""
    said_by = header(name, said, **more) if name else None
    return prefill_pb2.SubmitRequest(header=said_by, token_ids=packed(tokens))


async def sent(*frames: prefill_pb2.SubmitRequest) -> AsyncIterator[prefill_pb2.SubmitRequest]:
    """These frames; then the stream stays open and silent."""
    for each in frames:
        yield each
    await asyncio.Event().wait()


async def trickle(first: prefill_pb2.SubmitRequest) -> AsyncIterator[prefill_pb2.SubmitRequest]:
    """One token at a time, for ever."""
    yield first
    while True:
        await asyncio.sleep(0)
        yield frame(tokens=1)


async def outcome(intake: PromptIntake, frames: AsyncIterator[prefill_pb2.SubmitRequest]) -> errors.WaveppError:
    with pytest.raises(errors.WaveppError) as refused:
        await intake.receive(convert.PromptAssembler(), frames)
    return refused.value


async def test_prompt_is_refused_when_others_half_sent_fill_the_room_and_taken_when_they_have_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "MAX_ASSEMBLING_BYTES", 1000)
    intake = PromptIntake()
    halves = [
        asyncio.create_task(intake.receive(convert.PromptAssembler(), sent(frame(f"r{number}", 500, 100))))
        for number in range(2)
    ]
    await eventually(lambda: intake.assembling_bytes == 800)
    refused = await outcome(intake, sent(frame("late", 51, 51)))
    assert type(refused) is errors.QueueFull
    assert refused.retry_after_ms == 1000
    assert refused.fields == {"field": "assembling_bytes", "value": "1004", "limit": "1000"}
    for half in halves:
        half.cancel()
    await asyncio.gather(*halves, return_exceptions=True)
    assert intake.assembling_bytes == 0
    whole = prefill_pb2.SubmitRequest(header=header("late", 250), token_ids=packed(250), last=True)
    assembler = convert.PromptAssembler()
    assert (await intake.receive(assembler, sent(whole))).prompt_tokens == 250
    assert intake.assembling_bytes == 0


async def test_prompt_is_given_up_when_its_own_deadline_passes_between_frames() -> None:
    intake = PromptIntake()
    late = await outcome(intake, sent(frame("r", 100, 10, deadline_ms=50)))
    assert type(late) is errors.DeadlineExpired
    assert late.fields == {"field": "deadline_ms", "value": "50"}
    assert intake.assembling_bytes == 0


async def test_prompt_is_given_up_when_it_trickles_beyond_the_longest_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_ASSEMBLY_MS", 50)
    intake = PromptIntake()
    late = await outcome(intake, trickle(frame("r", limits.MAX_PROMPT_TOKENS, 1)))
    assert type(late) is errors.DeadlineExpired
    assert late.fields == {"field": "assembly_ms", "limit": "50"}
    assert intake.assembling_bytes == 0


async def test_prompts_that_arrive_end_typed_when_the_intake_closes() -> None:
    intake = PromptIntake()
    half = asyncio.create_task(outcome(intake, sent(frame("r", 100, 10))))
    await eventually(lambda: intake.assembling_bytes == 40)
    intake.close()
    late = await outcome(intake, sent(frame("later", 100, 10)))
    assert (type(await half), type(late)) == (errors.ControllerUnavailable,) * 2
    assert (late.retry_after_ms, intake.assembling_bytes) == (1000, 0)
