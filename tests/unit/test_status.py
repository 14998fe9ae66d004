"""Typed errors as gRPC statuses: every class crosses a real server with its reason and fields."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from wavepp_proto import convert, errors, limits
from wavepp_proto.v1 import prefill_pb2, prefill_pb2_grpc

Answer = Callable[[grpc.aio.ServicerContext[Any, Any]], Awaitable[prefill_pb2.CancelResponse]]


class Answering(prefill_pb2_grpc.PrefillServicer):
    """Ends `Cancel` as the test says."""

    answer: Answer

    async def Cancel(
        self, request: prefill_pb2.CancelRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> prefill_pb2.CancelResponse:
        return await self.answer(context)


@pytest.fixture
async def answering() -> AsyncIterator[tuple[Answering, prefill_pb2_grpc.PrefillAsyncStub]]:
    # Calls that the test does not make stay unimplemented.
    servicer = Answering()  # type: ignore[abstract]
    server = grpc.aio.server(options=limits.SERVER_OPTIONS)
    prefill_pb2_grpc.add_PrefillServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=limits.CHANNEL_OPTIONS) as channel:
        yield servicer, prefill_pb2_grpc.PrefillStub(channel)
    await server.stop(0)


async def failure(stub: prefill_pb2_grpc.PrefillAsyncStub, within: float = 30.0, size: int = 1) -> errors.WaveppError:
    with pytest.raises(grpc.RpcError) as caught:
        await stub.Cancel(prefill_pb2.CancelRequest(request_id="r" * size), timeout=within)
    return convert.error_from_rpc(caught.value)


async def test_every_error_crosses_typed_when_a_handler_aborts(
    answering: tuple[Answering, prefill_pb2_grpc.PrefillAsyncStub],
) -> None:
    servicer, stub = answering
    for reason, cls in sorted(errors.BY_REASON.items()):
        sent = cls(f"about {reason} é", field="x", value=3, limit=2, retry_after_ms=1500 if cls.retryable else None)

        async def answer(context: Any, sent: errors.WaveppError = sent) -> prefill_pb2.CancelResponse:
            await convert.abort(context, sent)

        servicer.answer = answer
        came = await failure(stub)
        assert type(came) is cls
        assert came.info() == sent.info()


async def test_long_texts_are_cut_when_an_error_crosses(
    answering: tuple[Answering, prefill_pb2_grpc.PrefillAsyncStub],
) -> None:
    """Trailers are bounded by peers: an over-long message must not turn into another error."""
    servicer, stub = answering

    async def answer(context: Any) -> prefill_pb2.CancelResponse:
        await convert.abort(context, errors.InternalError("m" * 100_000, cause="\ud800" + "f" * 100_000))

    servicer.answer = answer
    came = await failure(stub)
    assert type(came) is errors.InternalError
    assert came.message == "m" * 1024
    assert came.fields == {"cause": "\\ud800" + "f" * 250}  # escaped, so that it can be sent and printed


@pytest.mark.parametrize(
    ("code", "cls"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.ControllerUnavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExpired),
        (grpc.StatusCode.CANCELLED, errors.ControllerUnavailable),
        (grpc.StatusCode.UNAUTHENTICATED, errors.Unauthenticated),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.InternalError),
        (grpc.StatusCode.UNIMPLEMENTED, errors.InternalError),
    ],
)
async def test_code_decides_when_a_status_has_no_details(
    answering: tuple[Answering, prefill_pb2_grpc.PrefillAsyncStub],
    code: grpc.StatusCode,
    cls: type[errors.WaveppError],
) -> None:
    servicer, stub = answering

    async def answer(context: Any) -> prefill_pb2.CancelResponse:
        await context.abort(code, "from elsewhere")
        raise AssertionError

    servicer.answer = answer
    came = await failure(stub)
    assert type(came) is cls
    assert "from elsewhere" in came.message


async def test_message_too_large_is_typed_when_grpc_itself_refuses(
    answering: tuple[Answering, prefill_pb2_grpc.PrefillAsyncStub],
) -> None:
    _, stub = answering
    assert type(await failure(stub, size=limits.MAX_MESSAGE_BYTES + 1)) is errors.MessageTooLarge


async def test_deadline_is_typed_when_the_peer_never_answers(
    answering: tuple[Answering, prefill_pb2_grpc.PrefillAsyncStub],
) -> None:
    servicer, stub = answering

    async def answer(context: Any) -> prefill_pb2.CancelResponse:
        await asyncio.Event().wait()
        raise AssertionError

    servicer.answer = answer
    assert type(await failure(stub, within=0.05)) is errors.DeadlineExpired


async def test_peer_class_is_the_callers_when_nobody_listens() -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        with pytest.raises(grpc.RpcError) as caught:
            await prefill_pb2_grpc.PrefillStub(channel).Cancel(prefill_pb2.CancelRequest(), timeout=30)
    assert type(convert.error_from_rpc(caught.value)) is errors.ControllerUnavailable
    assert type(convert.error_from_rpc(caught.value, unavailable=errors.StageLost)) is errors.StageLost


def test_foreign_or_damaged_details_are_ignored_when_read() -> None:
    def failed(*trailers: tuple[str, bytes]) -> grpc.aio.AioRpcError:
        return grpc.aio.AioRpcError(grpc.StatusCode.CANCELLED, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), "x")

    for trailer in (("grpc-status-details-bin", b"\xff\xff"), ("other-bin", b"")):
        assert type(convert.error_from_rpc(failed(trailer))) is errors.ControllerUnavailable
    assert type(convert.error_from_rpc(grpc.RpcError("bare"))) is errors.InternalError
