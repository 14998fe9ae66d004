"""How a client's runs share a stream: what rides on it, what ends it, and what then becomes of its runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest

from wavepp import AsyncClient, RetryPolicy, Sampling, errors
from wavepp._runs import Runs
from wavepp.testing import Answer, FakeController, Gate, Outcome, Step
from wavepp_proto import convert, limits
from wavepp_proto.runtime.channels import bind_server, new_server, open_channel
from wavepp_proto.terms import PrefillRequest, RequestId
from wavepp_proto.v1 import prefill_pb2 as pb

NEVER = RetryPolicy(attempts=1)


class Counted(grpc.GenericRpcHandler):
    """Counts calls by method, answers none."""

    def __init__(self) -> None:
        self.methods: list[str] = []

    def service(self, details: grpc.HandlerCallDetails) -> None:
        self.methods.append(details.method.rpartition("/")[2])


@pytest.fixture
async def controller() -> AsyncIterator[FakeController]:
    async with FakeController(answer=Answer(first_token=5)) as controller:
        yield controller


@pytest.fixture
async def client(controller: FakeController) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(controller.address, retry=NEVER) as client:
        yield client


async def test_stream_is_opened_once_when_many_runs_follow_and_meet(client: AsyncClient) -> None:
    await client.prefill([1])
    assert client._wire is not None
    stream = client._wire._runs._stream
    assert stream is not None
    results = await asyncio.gather(*(client.prefill([1]) for _ in range(100)))
    assert [result.first_token for result in results] == [5] * 100
    assert client._wire._runs._stream is stream
    assert not stream._waiting
    assert not stream._unsent


async def test_runs_share_messages_within_their_bounds_when_begun_at_once() -> None:
    async with FakeController() as controller, open_channel(controller.address) as channel:
        runs = Runs(channel)
        await runs.run(PrefillRequest(RequestId("first"), bytes(4)))
        stream = runs._stream
        assert stream is not None
        small = [asyncio.create_task(runs.run(PrefillRequest(RequestId(f"s{i}"), bytes(4)))) for i in range(40)]
        large = [asyncio.create_task(runs.run(PrefillRequest(RequestId(f"l{i}"), bytes(60_000)))) for i in range(9)]
        await asyncio.sleep(0)
        sizes = []
        while stream._unsent:
            message = pb.RunManyRequest.FromString(stream._message())
            sizes.append(len(message.runs))
        assert sizes == [limits.MAX_MESSAGE_RUNS, 40 - limits.MAX_MESSAGE_RUNS + 4, 4, 1]
        await runs.close()
        outcomes = await asyncio.gather(*small, *large, return_exceptions=True)
        assert {type(outcome) for outcome in outcomes} == {errors.Cancelled}


@pytest.mark.parametrize(
    ("tokens", "sampling"),
    [(limits.MAX_STREAM_RUN_BYTES // 4 + 1, Sampling()), (1, Sampling(full_logits=True))],
    ids=["long", "logits"],
)
async def test_run_has_a_call_of_its_own_when_others_would_wait_behind_it(
    client: AsyncClient, tokens: int, sampling: Sampling
) -> None:
    assert (await client.prefill([1] * tokens, sampling=sampling)).first_token == 5
    assert client._wire is not None
    assert client._wire._runs._stream is None


async def test_runs_beyond_the_limit_have_calls_of_their_own(
    controller: FakeController, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_STREAM_RUNS", 2)
    gate = Gate()
    controller.answer = Answer(gates={Step.FINISHED: gate})
    runs = [asyncio.create_task(client.prefill([1])) for _ in range(5)]
    for _ in runs:
        await controller.next_request()
    assert client._wire is not None
    assert client._wire._runs._stream is not None
    assert len(client._wire._runs._stream._waiting) == 2
    gate.open()
    await asyncio.gather(*runs)


async def test_one_run_is_cancelled_when_its_caller_leaves_and_the_others_go_on(
    controller: FakeController, client: AsyncClient
) -> None:
    gate = Gate()
    controller.answer = Answer(first_token=7, gates={Step.FINISHED: gate})
    runs = [asyncio.create_task(client.prefill([index], request_id=f"r{index}")) for index in range(3)]
    received = [await controller.next_request() for _ in runs]
    runs[1].cancel()
    assert await received[1].ended() is Outcome.CANCELLED
    gate.open()
    assert [(await run).first_token for run in (runs[0], runs[2])] == [7, 7]
    # its id is free again, and a late answer cannot be mistaken for this run's
    assert (await client.prefill([1], request_id="r1")).first_token == 7


async def test_run_is_never_sent_when_its_caller_leaves_before(client: AsyncClient) -> None:
    await client.prefill([1])
    assert client._wire is not None
    stream = client._wire._runs._stream
    assert stream is not None
    stream._writer.cancel()
    run = asyncio.create_task(client.prefill([2]))
    await asyncio.sleep(0)
    assert len(stream._unsent) == 1
    run.cancel()
    await asyncio.wait([run])
    assert (stream._unsent, stream._cancels, stream._waiting) == ({}, [], {})


async def test_deadline_ends_one_run_when_the_controller_hangs(controller: FakeController) -> None:
    silent = Answer(gates={Step.QUEUED: Gate()}, heeds_deadline=False)
    controller.script(silent, Answer(first_token=1))
    async with AsyncClient(controller.address, retry=NEVER, grace=0.01) as client:
        hanging = asyncio.create_task(client.prefill([1], deadline=0.05))
        received = await controller.next_request()
        assert (await client.prefill([2])).first_token == 1
        with pytest.raises(errors.DeadlineExpired):
            await hanging
        assert await received.ended() is Outcome.CANCELLED


async def test_every_run_ends_unavailable_when_the_stream_breaks(
    controller: FakeController, client: AsyncClient
) -> None:
    controller.answer = Answer(gates={Step.FINISHED: Gate()})
    runs = [asyncio.create_task(client.prefill([1])) for _ in range(10)]
    for _ in runs:
        await controller.next_request()
    await controller.stop()
    outcomes = await asyncio.gather(*runs, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {errors.ControllerUnavailable}
    assert len({id(outcome) for outcome in outcomes}) == 10
    controller.answer = Answer(first_token=9)
    await controller.start()
    async with AsyncClient(controller.address) as patient:
        assert (await patient.prefill([1])).first_token == 9


async def test_runs_are_sent_again_on_a_new_stream_when_the_controller_comes_back(controller: FakeController) -> None:
    policy = RetryPolicy(attempts=1000, first_delay=0.01, longest_delay=0.05, budget=10_000)
    async with AsyncClient(controller.address, retry=policy) as client:
        controller.answer = Answer(gates={Step.FINISHED: Gate()})
        runs = [asyncio.create_task(client.prefill([1])) for _ in range(10)]
        for _ in runs:
            await controller.next_request()
        await controller.stop()
        controller.answer = Answer(first_token=9)
        await controller.start()
        assert [(await run).first_token for run in runs] == [9] * 10


async def test_runs_end_cancelled_when_the_client_is_closed(controller: FakeController, client: AsyncClient) -> None:
    controller.answer = Answer(gates={Step.FINISHED: Gate()})
    runs = [asyncio.create_task(client.prefill([1])) for _ in range(3)]
    received = [await controller.next_request() for _ in runs]
    await client.close()
    outcomes = await asyncio.gather(*runs, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {errors.Cancelled}
    assert {await each.ended() for each in received} == {Outcome.CANCELLED}


async def test_runs_have_calls_of_their_own_when_the_controller_does_not_know_the_stream() -> None:
    """An older controller: the method is asked for once."""
    counted, server = Counted(), new_server()

    async def run(request: pb.RunRequest, context: object) -> pb.RunResponse:
        return pb.RunResponse(pipeline="p", admitted=pb.Admitted(attempt=1), finished=pb.Finished(first_token=3))

    handler = grpc.unary_unary_rpc_method_handler(
        run, request_deserializer=pb.RunRequest.FromString, response_serializer=pb.RunResponse.SerializeToString
    )
    server.add_generic_rpc_handlers(
        (counted, grpc.method_handlers_generic_handler("wavepp.v1.Prefill", {"Run": handler}))
    )
    port = bind_server(server, "127.0.0.1:0")
    await server.start()
    async with AsyncClient(f"127.0.0.1:{port}", retry=NEVER) as client:
        results = await asyncio.gather(*(client.prefill([1]) for _ in range(5)))
        assert [result.first_token for result in results] == [3] * 5
        await client.prefill([1])
    await server.stop(None)
    assert sorted(counted.methods) == ["Run"] * 6 + ["RunMany"]


def test_shared_run_is_refused_when_it_is_too_long_or_wants_logits() -> None:
    long = PrefillRequest(RequestId("r"), bytes(limits.MAX_STREAM_RUN_BYTES + 4))
    with pytest.raises(errors.MessageTooLarge) as refused:
        convert.shared_run_from_pb(convert.run_request_to_pb(long))
    assert refused.value.fields["limit"] == str(limits.MAX_STREAM_RUN_BYTES)
    logits = PrefillRequest(RequestId("r"), bytes(4), sampling=Sampling(full_logits=True))
    with pytest.raises(errors.InvalidRequest) as wrong:
        convert.shared_run_from_pb(convert.run_request_to_pb(logits))
    assert wrong.value.fields["field"] == "full_logits"
    assert [convert.may_share_stream(request) for request in (long, logits)] == [False, False]
