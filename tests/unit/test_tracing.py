"""What reaches a collector: ids, parents, links; and what is lost, counted, when it does not."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from types import ModuleType

import pytest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from tests.harness.eventually import eventually_sync
from tests.harness.fake_exporter import GENEROUS_S, SAMPLED, SPAN, TRACE, FakeExporter, settings, trace_id, tracer_into
from wavepp_proto.runtime import span_names
from wavepp_proto.runtime.timeline import CollectedSpan
from wavepp_proto.runtime.trace_sink import TraceSink
from wavepp_proto.runtime.tracing import NO_CONTEXT, Tracer, ambient


@pytest.fixture
async def sink() -> AsyncIterator[TraceSink]:
    sink = await TraceSink.start()
    yield sink
    await sink.close()


async def close_all(*tracers: Tracer) -> None:
    """Off the event loop, which has to serve the sink meanwhile."""
    for tracer in tracers:
        await asyncio.to_thread(tracer.close)


# --- one trace over several processes -----------------------------------------------------------


async def test_one_trace_and_no_orphan_when_client_controller_and_stages_export(sink: TraceSink) -> None:
    client, controller, *stages = (
        Tracer(settings(service, endpoint=sink.endpoint))
        for service in ("wavepp-client", "wavepp-controller", "wavepp-stage", "wavepp-stage")
    )
    sent = client.root()
    announced = controller.child(sent)
    admission = controller.child(announced)
    pin_reserve = controller.child(admission)
    for index, stage in enumerate(stages):
        stage.record(span_names.PREPARE, 30, 31, parent=announced, attributes=[(span_names.STAGE, index)])
        stage.record(span_names.EXECUTE, 40, 50, parent=announced, attributes=[(span_names.STAGE, index)])
        controller.record(span_names.VOTE, 30, 32, parent=pin_reserve, attributes=[(span_names.STAGE, index)])
    controller.record(span_names.PIN_RESERVE, 30, 33, own=pin_reserve, parent=admission)
    controller.record(span_names.ADMISSION, 20, 35, own=admission, parent=announced)
    controller.record(span_names.REQUEST, 11, 60, own=announced, parent=sent, kind=span_names.SERVER)
    client.record(span_names.PREFILL, 10, 61, own=sent, kind=span_names.CLIENT)
    await close_all(client, controller, *stages)

    assert len(sink.spans) == 10
    assert {span.trace_id for span in sink.spans} == {trace_id(sent)}
    ids = {span.span_id for span in sink.spans}
    assert [span.name for span in sink.spans if span.parent_span_id not in ids] == [span_names.PREFILL]
    assert parent_name(sink.spans, span_names.ADMISSION) == span_names.REQUEST
    assert parent_name(sink.spans, span_names.VOTE) == span_names.PIN_RESERVE
    assert parent_name(sink.spans, span_names.EXECUTE) == span_names.REQUEST
    assert len({span.instance for span in sink.spans}) == 4
    assert {span.attributes[span_names.PROCESS_PID] for span in sink.spans} == {os.getpid()}


async def test_wave_links_every_request_when_it_carries_three(sink: TraceSink) -> None:
    with_tracer = Tracer(settings("wavepp-stage", endpoint=sink.endpoint))
    contexts = [with_tracer.root() for _ in range(3)]
    with_tracer.record(span_names.WAVE, 1_000, 2_000, links=contexts, attributes=[(span_names.ROWS, 3)])
    await close_all(with_tracer)

    (wave,) = sink.spans
    assert wave.parent_span_id is None
    assert wave.trace_id not in {trace_id(context) for context in contexts}
    assert [trace for trace, _ in wave.links] == [trace_id(context) for context in contexts]
    assert (wave.start_ns, wave.end_ns, wave.attributes[span_names.ROWS]) == (1_000, 2_000, 3)


async def test_error_sets_status_and_type_when_a_span_failed(sink: TraceSink) -> None:
    tracer = Tracer(settings(endpoint=sink.endpoint))
    attributes = [(span_names.LIMITING_STAGE, None), (span_names.REQUEST_ID, "r1")]
    tracer.record(span_names.FINISH, 1, 2, parent=SAMPLED, attributes=attributes, error="STAGE_LOST")
    await close_all(tracer)

    (span,) = sink.spans
    assert span.error == "STAGE_LOST"
    assert (span.trace_id, span.parent_span_id) == (TRACE, SPAN)
    assert dict(span.attributes) == {
        span_names.REQUEST_ID: "r1",
        span_names.ERROR_TYPE: "STAGE_LOST",
        span_names.PROCESS_PID: os.getpid(),
    }


async def test_sink_keeps_the_newest_when_it_is_full() -> None:
    sink = await TraceSink.start(limit=2)
    tracer = Tracer(settings(endpoint=sink.endpoint))
    for index in range(3):
        tracer.record(f"span {index}", index, index, parent=SAMPLED)
    await close_all(tracer)
    await sink.close()
    assert ([span.name for span in sink.spans], sink.forgotten) == (["span 1", "span 2"], 1)


# --- a full buffer, and a collector that is down ------------------------------------------------


def test_overflow_is_counted_when_the_buffer_is_full() -> None:
    exporter = FakeExporter(gate_open=False)
    tracer = tracer_into(exporter, buffer_spans=2)
    for index in range(5):
        tracer.record(f"span {index}", index, index, parent=SAMPLED)
    assert (tracer.stats().buffered, tracer.stats().dropped) == (2, 3)
    exporter.gate.set()
    tracer.close()
    assert [span.name for span in exporter.spans] == ["span 0", "span 1"]
    assert (tracer.stats().exported, tracer.stats().buffered) == (2, 0)


def test_no_span_is_built_when_the_collector_is_down() -> None:
    exporter = FakeExporter(SpanExportResult.FAILURE)
    tracer = tracer_into(exporter)
    assert exporter.called.wait(GENEROUS_S)
    for index in range(100):
        tracer.record("span", index, index, parent=SAMPLED)
    tracer.close()
    assert exporter.batches == [0]
    assert (tracer.stats().connected, tracer.stats().exported, tracer.stats().buffered) == (False, 0, 100)


def test_close_does_not_wait_when_the_collector_hangs() -> None:
    exporter = FakeExporter(gate_open=False)
    tracer = tracer_into(exporter, close_s=0.01)
    assert exporter.called.wait(GENEROUS_S)
    tracer.record("span", 1, 2, parent=SAMPLED)
    tracer.close()
    # The call that hung ends only because close told the exporter to shut down.
    assert exporter.shut.wait(GENEROUS_S)
    tracer.close()


def test_lost_batch_is_counted_when_the_collector_goes_down() -> None:
    exporter = FakeExporter()
    tracer = tracer_into(exporter)
    assert exporter.called.wait(GENEROUS_S)
    exporter.result = SpanExportResult.FAILURE
    tracer.record("span", 1, 2, parent=SAMPLED)
    tracer.close()
    assert (tracer.stats().failed, tracer.stats().exported, tracer.stats().connected) == (1, 0, False)


def test_later_spans_are_exported_when_one_cannot_be_built() -> None:
    exporter = FakeExporter()
    tracer = tracer_into(exporter)
    tracer.record("bad", 1, 2, parent=SAMPLED, kind="no such kind")
    tracer.record("good", 1, 2, parent=SAMPLED)
    tracer.close()
    assert [span.name for span in exporter.spans] == ["good"]
    assert (tracer.stats().failed, tracer.stats().exported) == (1, 1)


def test_process_goes_on_when_the_exporter_cannot_be_made() -> None:
    def broken() -> SpanExporter:
        raise OSError("no such certificate")

    tracer = Tracer(settings(), broken)
    tracer.record("span", 1, 2, parent=SAMPLED)
    tracer.close()
    assert tracer.stats().connected is False


def test_outage_is_told_once_when_nothing_listens(caplog: pytest.LogCaptureFixture) -> None:
    tracer = Tracer(settings(endpoint="127.0.0.1:9", export_s=0.2))
    eventually_sync(lambda: tracer.stats().connected is False)
    tracer.close()
    told = [record for record in caplog.records if record.name.startswith(("opentelemetry", "wavepp"))]
    assert [record.getMessage() for record in told] == ["traces cannot be exported; will try again"]


def parent_name(spans: Sequence[CollectedSpan], name: str) -> str:
    (parent,) = {span.parent_span_id for span in spans if span.name == name}
    return next(span.name for span in spans if span.span_id == parent)


# --- the application's own span ------------------------------------------------------------------


def test_ambient_context_is_empty_when_opentelemetry_is_still_being_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", ModuleType("opentelemetry.trace"))
    assert ambient() == NO_CONTEXT
