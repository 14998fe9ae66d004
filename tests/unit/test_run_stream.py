"""The controller's side of a RunMany stream: numbers, answers that travel together, and who is not read on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from wavepp_controller.runtime.run_stream import RunStream, StreamedRun
from wavepp_proto import convert, errors, limits
from wavepp_proto.terms import ErrorInfo, Failed, PipelineId, PrefillRequest, Queued, RequestId
from wavepp_proto.v1 import prefill_pb2 as pb

FAILED = ErrorInfo("ROW_VOIDED", "void")


def asked(*numbers: int, cancels: tuple[int, ...] = ()) -> pb.RunManyRequest:
    parts = [convert.run_part(number, PrefillRequest(RequestId(f"r{number}"), bytes(4))) for number in numbers]
    return pb.RunManyRequest.FromString(b"".join([convert.cancels_part(cancels), *parts]))


class Door:
    """What begins runs for a stream, and the client behind it."""

    def __init__(self) -> None:
        self.refuse: errors.WaveppError | None = None
        self.begun: dict[int, StreamedRun] = {}
        self.let_go: list[int] = []
        self.written: list[list[int]] = []
        self.may_write = asyncio.Event()
        self.may_write.set()
        self.messages: asyncio.Queue[pb.RunManyRequest | None] = asyncio.Queue()
        self.stream = RunStream(self._begin, lambda run: self.let_go.append(run.number))
        self.serving = asyncio.create_task(self.stream.serve(self._said(), self._write))

    def _begin(self, run: pb.RunRequest, streamed: StreamedRun) -> None:
        streamed.request_id = convert.shared_run_from_pb(run).request_id
        if self.refuse is not None:
            raise self.refuse
        self.begun[streamed.number] = streamed

    async def _said(self) -> AsyncIterator[pb.RunManyRequest]:
        while (message := await self.messages.get()) is not None:
            yield message

    async def _write(self, response: pb.RunManyResponse) -> None:
        await self.may_write.wait()
        self.written.append([answer.number for answer in response.answers])

    def end(self, *numbers: int) -> None:
        for number in numbers:
            run = self.begun[number]
            run.put_nowait(Queued(run.request_id, PipelineId("p"), 0))
            run.put_nowait(Failed(run.request_id, FAILED))

    async def say(self, *messages: pb.RunManyRequest | None) -> None:
        """Until each is taken, if it is."""
        for message in messages:
            self.messages.put_nowait(message)
        await settle()


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def test_answers_share_a_message_when_runs_end_at_once() -> None:
    door = Door()
    await door.say(asked(1, 2, 3), asked(4))
    door.end(3, 1)
    await settle()
    door.end(2)
    await door.say(None)
    assert not door.serving.done(), "a client that says no more still gets its answers"
    door.end(4)
    await door.serving
    assert door.written == [[3, 1], [2], [4]]
    assert door.let_go == []


async def test_cancelled_run_is_let_go_and_not_answered() -> None:
    door = Door()
    await door.say(asked(1, 2), asked(3, cancels=(1, 1, 77)))
    assert door.let_go == [1]
    door.end(1, 2, 3)
    await door.say(None)
    await door.serving
    assert door.written == [[2, 3]]


async def test_refused_run_is_answered_alone_when_others_go_on() -> None:
    door = Door()
    await door.say(asked(1))
    door.refuse = errors.QueueFull("full")
    await door.say(asked(2))
    assert door.written == [[2]]
    door.refuse = None
    await door.say(asked(3))
    door.end(1, 3)
    await door.say(None)
    await door.serving
    assert door.written == [[2], [1, 3]]


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([asked(0)], "number"),
        ([asked(2), asked(2)], "number"),
        ([asked(2), asked(1)], "number"),
        ([asked(*range(1, limits.MAX_MESSAGE_RUNS + 2))], "runs"),
        ([asked(1, cancels=tuple(range(limits.MAX_STREAM_RUNS + 1)))], "cancels"),
    ],
)
async def test_stream_ends_typed_when_a_message_breaks_its_rules(messages: list[pb.RunManyRequest], field: str) -> None:
    door = Door()
    await door.say(*messages)
    with pytest.raises(errors.InvalidRequest) as refused:
        await door.serving
    assert refused.value.fields["field"] == field
    await door.stream.abandon()
    assert sorted(door.let_go) == sorted(door.begun)


async def test_run_beyond_the_limit_is_refused_when_so_many_are_live() -> None:
    door = Door()
    most, step = limits.MAX_STREAM_RUNS, limits.MAX_MESSAGE_RUNS
    for first in range(1, most + 1, step):
        await door.say(asked(*range(first, first + step)))
    assert len(door.begun) == most
    await door.say(asked(most + 1), asked(most + 2, cancels=(7,)))
    assert door.written == [[most + 1]]
    assert most + 2 in door.begun


async def test_client_is_not_read_on_when_it_does_not_take_its_answers() -> None:
    door = Door()
    door.refuse = errors.Draining("draining")
    door.may_write.clear()
    step = limits.MAX_MESSAGE_RUNS
    enough = limits.MAX_STREAM_RUNS // step + 4
    for index in range(2 * enough):
        door.messages.put_nowait(asked(*range(1 + index * step, 1 + (index + 1) * step)))
    for _ in range(10):
        await settle()
    unread = door.messages.qsize()
    assert unread >= enough - 4, "answers that nobody takes are bounded"
    door.may_write.set()
    door.messages.put_nowait(None)
    await door.serving
    assert sum(map(len, door.written)) == 2 * enough * step


async def test_abandoned_stream_lets_go_of_all_when_its_call_is_cancelled() -> None:
    door = Door()
    await door.say(asked(*range(1, 31)))
    door.serving.cancel()
    await asyncio.wait([door.serving])
    await door.stream.abandon()
    assert sorted(door.let_go) == list(range(1, 31))


async def test_closed_stream_answers_what_has_ended_and_ends() -> None:
    door = Door()
    await door.say(asked(1, 2))
    door.end(2)
    door.stream.close()
    await door.serving
    assert door.written == [[2]]
