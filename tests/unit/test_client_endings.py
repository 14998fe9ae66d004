"""Every way a request can end early: deadline, cancellation, closed client, a controller that misbehaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from wavepp import AsyncClient, PrefillResult, errors
from wavepp.testing import Answer, FakeController, Gate, Outcome, Step
from wavepp_proto.errors import BY_REASON
from wavepp_proto.runtime.channels import bind_server, new_server
from wavepp_proto.terms import RequestId
from wavepp_proto.v1 import prefill_pb2, prefill_pb2_grpc


@pytest.fixture
async def controller() -> AsyncIterator[FakeController]:
    async with FakeController() as controller:
        yield controller


@pytest.fixture
async def client(controller: FakeController) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(controller.address, grace=0.05) as client:
        yield client


async def _streamed(client: AsyncClient) -> PrefillResult:
    """The result of a request whose events were asked for."""
    async with client.stream([1]) as stream:
        async for _ in stream:
            pass
        return await stream.result()


@pytest.mark.parametrize("as_status", [False, True], ids=["event", "status"])
@pytest.mark.parametrize("reason", sorted(BY_REASON))
async def test_error_of_every_reason_arrives_typed_with_its_fields(
    controller: FakeController, client: AsyncClient, reason: str, as_status: bool
) -> None:
    error = BY_REASON[reason]("what happened", field="name", value=3, limit=2, retry_after_ms=70)
    controller.script(Answer(error=error, error_at=Step.ADMITTED, error_as_status=as_status))
    with pytest.raises(BY_REASON[reason]) as caught:
        # a status refuses a call, which may be tried again; after a stream's first event it ends the request
        await (_streamed(client) if as_status else client.prefill([1]))
    assert type(caught.value) is type(error)
    assert caught.value.info() == error.info()
    assert await controller.requests[0].ended() is Outcome.FAILED


@pytest.mark.parametrize("step", list(Step))
async def test_controller_sees_the_cancellation_when_the_task_is_cancelled(
    controller: FakeController, client: AsyncClient, step: Step
) -> None:
    gate = Gate()
    controller.script(Answer(gates={step: gate}))
    running = asyncio.create_task(client.prefill([1]))
    await gate.reached()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await controller.requests[0].ended() is Outcome.CANCELLED


async def test_controller_sees_the_cancellation_when_a_stream_is_left(
    controller: FakeController, client: AsyncClient
) -> None:
    controller.script(Answer(gates={Step.FINISHED: Gate()}))
    async with client.stream([1]) as stream:
        await anext(stream)
    assert await controller.requests[0].ended() is Outcome.CANCELLED
    assert [event async for event in stream] == []
    with pytest.raises(errors.Cancelled):
        await stream.result()


async def test_controller_sees_the_cancellation_when_a_stream_is_dropped(
    controller: FakeController, client: AsyncClient
) -> None:
    controller.script(Answer(gates={Step.FINISHED: Gate()}))
    async for _ in client.stream([1]):
        break
    assert await controller.requests[0].ended() is Outcome.CANCELLED


async def test_others_go_on_when_one_request_is_cancelled(controller: FakeController, client: AsyncClient) -> None:
    gate = Gate()
    controller.answer = Answer(first_token=6, gates={Step.FINISHED: gate})
    first, second = (asyncio.create_task(client.prefill([1], request_id=name)) for name in ("first", "second"))
    arrived = {(received := await controller.next_request()).request.request_id: received for _ in range(2)}
    first.cancel()
    assert await arrived[RequestId("first")].ended() is Outcome.CANCELLED
    gate.open()
    assert (await second).first_token == 6
    assert await arrived[RequestId("second")].ended() is Outcome.FINISHED


async def test_request_ends_cancelled_when_cancelled_by_id(controller: FakeController, client: AsyncClient) -> None:
    gate = Gate()
    controller.script(Answer(gates={Step.FINISHED: gate}))
    running = asyncio.create_task(client.prefill([1], request_id="mine"))
    await gate.reached()
    assert await client.cancel("mine")
    with pytest.raises(errors.Cancelled):
        await running
    assert await controller.requests[0].ended() is Outcome.CANCELLED
    assert not await client.cancel("mine")


async def test_live_duplicate_is_refused_and_a_dead_one_served(controller: FakeController, client: AsyncClient) -> None:
    gate = Gate()
    controller.script(Answer(gates={Step.FINISHED: gate}))
    first = asyncio.create_task(client.prefill([1], request_id="mine"))
    await gate.reached()
    with pytest.raises(errors.DuplicateRequest):
        await client.prefill([1], request_id="mine")
    gate.open()
    await first
    await client.prefill([1], request_id="mine")


async def test_deadline_travels_as_remaining_time(controller: FakeController, client: AsyncClient) -> None:
    await client.prefill([1], deadline=5)
    await client.prefill([1])
    named, default = (received.request.deadline_ms or 0 for received in controller.requests)
    assert 0 < named <= 5_000 < default <= 600_000


async def test_controllers_own_expiry_is_reported_when_it_answers_in_time(controller: FakeController) -> None:
    controller.script(Answer(gates={Step.FINISHED: Gate()}))
    async with AsyncClient(controller.address, grace=30) as client:
        with pytest.raises(errors.DeadlineExpired, match=r"^the deadline passed$"):
            await client.prefill([1], deadline=0.05)
    assert await controller.requests[0].ended() is Outcome.FAILED


@pytest.mark.parametrize("step", list(Step))
async def test_client_gives_up_after_its_grace_when_the_controller_is_silent(
    controller: FakeController, client: AsyncClient, step: Step
) -> None:
    controller.script(Answer(gates={step: Gate()}, heeds_deadline=False))
    await client.describe()  # connected: what is measured is the controller's silence, not the way to it
    with pytest.raises(errors.DeadlineExpired, match="no outcome by the deadline") as caught:
        await client.prefill([1], deadline=0.05, request_id="mine")
    assert caught.value.fields == {"field": "deadline_ms", "value": "50", "request_id": "mine"}
    assert await controller.requests[0].ended() is Outcome.CANCELLED


async def test_calls_end_typed_when_the_client_is_closed_under_them(controller: FakeController) -> None:
    gate = Gate()
    controller.script(Answer(gates={Step.FINISHED: gate}))
    client = AsyncClient(controller.address)
    running = asyncio.create_task(client.prefill([1]))
    await gate.reached()
    await client.close()
    await client.close()
    with pytest.raises(errors.Cancelled, match="client was closed"):
        await running
    with pytest.raises(RuntimeError, match="closed"):
        await client.prefill([1])


class _Misbehaving(prefill_pb2_grpc.PrefillServicer):
    """Ends streams in ways that the contract forbids."""

    def __init__(self, events: list[prefill_pb2.PrefillEvent], hang: bool = False) -> None:
        self._events = events
        self._hang = hang

    async def Submit(
        self, request_iterator: AsyncIterator[prefill_pb2.SubmitRequest], context: object
    ) -> AsyncIterator[prefill_pb2.SubmitResponse]:
        async for _ in request_iterator:
            pass
        for event in self._events:
            yield prefill_pb2.SubmitResponse(event=event)
        if self._hang:
            await asyncio.Event().wait()


def _event(**fields: object) -> prefill_pb2.PrefillEvent:
    return prefill_pb2.PrefillEvent(request_id="r", **fields)  # type: ignore[arg-type]


QUEUED, ADMITTED = _event(queued=prefill_pb2.Queued()), _event(admitted=prefill_pb2.Admitted(attempt=1))
FINISHED = _event(finished=prefill_pb2.Finished(attempt=1, first_token=8))


@asynccontextmanager
async def _served(events: list[prefill_pb2.PrefillEvent], hang: bool = False) -> AsyncIterator[AsyncClient]:
    """A client of a server that answers every request with `events`."""
    server = new_server()
    servicer = _Misbehaving(events, hang)  # type: ignore[abstract]  # only Submit is called
    prefill_pb2_grpc.add_PrefillServicer_to_server(servicer, server)
    port = bind_server(server, "127.0.0.1:0")
    await server.start()
    async with AsyncClient(f"127.0.0.1:{port}", grace=0.05) as client:
        yield client
    await server.stop(None)


@pytest.mark.parametrize(
    ("events", "expected", "words"),
    [
        ([], errors.InternalError, "without an outcome"),
        ([QUEUED, ADMITTED], errors.InternalError, "without an outcome"),
        ([QUEUED, FINISHED], errors.InternalError, "never admitted"),
        ([_event()], errors.InvalidRequest, "event"),
    ],
    ids=["nothing", "no-outcome", "never-admitted", "unknown-event"],
)
async def test_answer_is_an_error_when_the_contract_is_broken(
    events: list[prefill_pb2.PrefillEvent], expected: type[errors.WaveppError], words: str
) -> None:
    async with _served(events) as client:
        with pytest.raises(expected, match=words):
            await _streamed(client)


async def test_result_is_delivered_when_the_finished_stream_is_kept_open() -> None:
    async with _served([QUEUED, ADMITTED, FINISHED], hang=True) as client:
        assert (await _streamed(client)).first_token == 8
