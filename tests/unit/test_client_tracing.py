"""One trace a request: its id is known to the caller, its context travels, its root span is the client's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from wavepp import AsyncClient, RetryPolicy, errors
from wavepp.testing import Answer, FakeController
from wavepp_proto.runtime import trace_context
from wavepp_proto.runtime.tracing import Tracer, TraceSettings


class Recorder:
    """A tracer whose spans can be read once it is closed."""

    def __init__(self) -> None:
        exporter = self._exporter = InMemorySpanExporter()
        self.tracer = Tracer(TraceSettings("test"), exporter=lambda: exporter)

    def spans(self) -> list[ReadableSpan]:
        self.tracer.close()
        return list(self._exporter.get_finished_spans())


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    yield recorder
    recorder.tracer.close()


async def test_context_is_made_and_sent_when_nothing_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", raising=False)
    async with FakeController() as controller, AsyncClient(controller.address) as client:
        results = [await client.prefill([1]) for _ in range(2)]
        sent = [trace_context.parse(received.request.trace) for received in controller.requests]
    assert [identity and identity.trace_id for identity in sent] == [result.trace_id for result in results]
    assert results[0].trace_id != results[1].trace_id


async def test_root_span_is_the_parent_that_travels(recorder: Recorder) -> None:
    async with FakeController(answer=Answer(cached_tokens=64)) as controller:
        async with AsyncClient(controller.address, tracing=recorder.tracer) as client:
            result = await client.prefill([1] * 70, request_id="mine")
        sent = trace_context.parse(controller.requests[0].request.trace)
    (span,) = recorder.spans()
    assert sent is not None
    assert (f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}") == (sent.trace_id, sent.span_id)
    assert (span.name, span.parent, result.trace_id) == ("prefill", None, sent.trace_id)
    assert span.attributes is not None
    assert span.attributes["wavepp.request_id"] == "mine"
    assert span.attributes["wavepp.prompt_tokens"] == 70
    assert span.attributes["gen_ai.usage.cache_read.input_tokens"] == 64
    assert span.status.is_ok


async def test_span_carries_the_reason_when_the_request_fails(recorder: Recorder) -> None:
    async with FakeController(answer=Answer(error=errors.QueueFull("full"))) as controller:
        policy = RetryPolicy(attempts=3, first_delay=0)
        async with AsyncClient(controller.address, tracing=recorder.tracer, retry=policy) as client:
            with pytest.raises(errors.QueueFull):
                await client.prefill([1])
        # All tries belong to one span and one trace.
        assert len({received.request.trace for received in controller.requests}) == 1
    (span,) = recorder.spans()
    assert span.attributes is not None
    assert span.attributes["error.type"] == "QUEUE_FULL"
    assert not span.status.is_ok


async def test_span_says_cancelled_when_a_stream_is_left(recorder: Recorder) -> None:
    async with (
        FakeController() as controller,
        AsyncClient(controller.address, tracing=recorder.tracer) as client,
        client.stream([1]) as stream,
    ):
        await anext(stream)
    (span,) = recorder.spans()
    assert span.attributes is not None
    assert span.attributes["error.type"] == "CANCELLED"


async def test_applications_own_span_is_continued_when_there_is_one(recorder: Recorder) -> None:
    identity = trace.SpanContext(0xABC, 0xDEF, is_remote=False, trace_flags=trace.TraceFlags(1))
    async with FakeController() as controller, AsyncClient(controller.address, tracing=recorder.tracer) as client:
        with trace.use_span(trace.NonRecordingSpan(identity)):
            result = await client.prefill([1])
    (span,) = recorder.spans()
    assert result.trace_id == f"{0xABC:032x}"
    assert span.parent is not None
    assert span.parent.span_id == 0xDEF


async def test_borrowed_tracer_stays_open_when_the_client_closes(recorder: Recorder) -> None:
    async with FakeController() as controller:
        for _ in range(2):
            async with AsyncClient(controller.address, tracing=recorder.tracer) as client:
                await client.prefill([1])
    assert len(recorder.spans()) == 2
