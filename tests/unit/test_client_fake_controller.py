"""The fake controller keeps the contract itself: users' tests must not learn wrong habits from it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from grpc.aio import AioRpcError

from tests.harness.certs import make_certificates
from tests.harness.proxy import ConnectProxy
from wavepp import AsyncClient, ClientSecurity, RetryPolicy, errors
from wavepp.testing import Answer, FakeController, Gate, Outcome, Step
from wavepp_proto import convert
from wavepp_proto.runtime.channels import ServerSecurity, open_channel
from wavepp_proto.terms import Failed, Finished, PrefillRequest, RequestId
from wavepp_proto.v1 import admin_pb2, admin_pb2_grpc, prefill_pb2, prefill_pb2_grpc

REQUEST = PrefillRequest(RequestId("mine"), bytes(12))


@pytest.fixture
async def controller() -> AsyncIterator[FakeController]:
    async with FakeController(answer=Answer(first_token=3, cached_tokens=64)) as controller:
        yield controller


async def test_unary_run_answers_as_the_stream_does(controller: FakeController) -> None:
    async with open_channel(controller.address) as channel:
        stub: prefill_pb2_grpc.PrefillAsyncStub = prefill_pb2_grpc.PrefillStub(channel)
        reply = await stub.Run(convert.run_request_to_pb(REQUEST))
        pipeline, admitted, finished = convert.run_response_from_pb(REQUEST.request_id, reply)
        assert isinstance(finished, Finished)
        assert admitted is not None
        assert (finished.first_token, finished.prompt_tokens, admitted.endpoint) == (3, 3, 64)
        assert pipeline == controller.description.pipeline


async def test_unary_run_tells_a_refusal_by_its_status_and_a_later_failure_in_its_answer(
    controller: FakeController,
) -> None:
    error = errors.PipelineUnavailable("gone", field="stage", value=1)
    controller.script(Answer(error=error, error_at=Step.QUEUED), Answer(error=error, error_at=Step.ADMITTED))
    async with open_channel(controller.address) as channel:
        stub: prefill_pb2_grpc.PrefillAsyncStub = prefill_pb2_grpc.PrefillStub(channel)
        with pytest.raises(AioRpcError) as caught:
            await stub.Run(convert.run_request_to_pb(REQUEST))
        assert convert.error_from_rpc(caught.value).info() == error.info()
        reply = await stub.Run(convert.run_request_to_pb(REQUEST))
        _, admitted, failed = convert.run_response_from_pb(REQUEST.request_id, reply)
        assert (admitted, failed) == (None, Failed(REQUEST.request_id, error.info()))
    assert [received.outcome for received in controller.requests] == [Outcome.FAILED, Outcome.FAILED]


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([], "INVALID_REQUEST"),
        ([prefill_pb2.SubmitRequest(token_ids=bytes(4), last=True)], "INVALID_REQUEST"),
        ([next(convert.submit_frames(REQUEST)), next(convert.submit_frames(REQUEST))], "DONE"),
        ([prefill_pb2.SubmitRequest(header=prefill_pb2.PrefillHeader(request_id="x"), last=True)], "EMPTY_PROMPT"),
    ],
    ids=["no-frame", "no-header", "frame-after-last", "no-tokens"],
)
async def test_malformed_frames_fail_typed(
    controller: FakeController, frames: list[prefill_pb2.SubmitRequest], reason: str
) -> None:
    async with open_channel(controller.address) as channel:
        stub: prefill_pb2_grpc.PrefillAsyncStub = prefill_pb2_grpc.PrefillStub(channel)
        events = [convert.prefill_event_from_pb(answer.event) async for answer in stub.Submit(iter(frames))]
    last = events[-1]
    assert reason == ("DONE" if isinstance(last, Finished) else last.error.reason)  # type: ignore[union-attr]


async def test_method_it_does_not_serve_is_unimplemented(controller: FakeController) -> None:
    async with open_channel(controller.address) as channel:
        stub: admin_pb2_grpc.AdminAsyncStub = admin_pb2_grpc.AdminStub(channel)
        with pytest.raises(AioRpcError, match="UNIMPLEMENTED"):
            await stub.Reform(admin_pb2.ReformRequest())


async def test_scripted_answers_come_before_the_standing_one(controller: FakeController) -> None:
    controller.script(Answer(first_token=1), Answer(first_token=2))
    async with AsyncClient(controller.address) as client:
        assert [(await client.prefill([1])).first_token for _ in range(3)] == [1, 2, 3]


async def test_requests_break_and_the_port_is_kept_when_it_is_stopped_and_started(controller: FakeController) -> None:
    address, gate = controller.address, Gate()
    controller.script(*[Answer(gates={Step.FINISHED: gate})] * 2)
    async with AsyncClient(address, retry=RetryPolicy(attempts=100, first_delay=0.01)) as client:
        streamed = client.stream([1])
        await anext(streamed)
        called = asyncio.create_task(client.prefill([1]))
        for _ in range(2):
            await controller.next_request()
        await controller.stop()
        with pytest.raises(errors.ControllerUnavailable):
            await streamed.result()
        await controller.start()
        assert controller.address == address
        assert (await called).first_token == 3  # nothing came back of it: it was sent again
        assert (await client.prefill([1])).first_token == 3


def test_address_is_refused_when_it_was_not_started() -> None:
    with pytest.raises(RuntimeError, match="not been started"):
        _ = FakeController().address


async def test_client_speaks_tls_and_refuses_plain_text_when_the_controller_asks_for_certificates(
    tmp_path: Path,
) -> None:
    files = make_certificates(tmp_path)
    server = ServerSecurity(files.ca, files.server_cert, files.server_key)
    once = RetryPolicy(attempts=1)
    async with FakeController(tls=server, answer=Answer(first_token=4)) as controller:
        mine = ClientSecurity(files.ca, files.client_cert, files.client_key)
        async with AsyncClient(controller.address, tls=mine) as client:
            assert (await client.prefill([1])).first_token == 4
        for other in (None, ClientSecurity(files.ca)):
            async with AsyncClient(controller.address, tls=other, retry=once) as client:
                with pytest.raises(errors.ControllerUnavailable):
                    await client.prefill([1])
    assert len(controller.requests) == 1


@pytest.mark.parametrize("named", [True, False])
async def test_proxy_is_used_when_it_is_named_and_never_from_the_environment(
    named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with ConnectProxy() as proxy, FakeController() as controller:
        monkeypatch.setenv("http_proxy", f"http://{proxy.address}")
        given = f"http://{proxy.address}" if named else None
        async with AsyncClient(controller.address, proxy=given) as client:
            await client.prefill([1])
        assert proxy.asked == ([controller.address] if named else [])
