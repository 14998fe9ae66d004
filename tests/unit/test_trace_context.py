"""Contexts: the W3C grammar, head sampling, and processes that pass a context on without exporting."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.harness.fake_exporter import SAMPLED, SPAN, TRACE, UNSAMPLED, FakeExporter, settings, trace_id, tracer_into
from wavepp_proto.errors import InvalidRequest
from wavepp_proto.runtime import span_names, trace_context
from wavepp_proto.runtime.tracing import Tracer, TraceSettings, ambient
from wavepp_proto.terms import TraceContext

# --- contexts -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "traceparent",
    [
        "garbage",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-1",
        f" 00-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01\n",
    ],
)
def test_new_root_is_made_and_counted_when_traceparent_is_malformed(traceparent: str) -> None:
    with tracer_into(FakeExporter()) as tracer:
        child = tracer.child(TraceContext(traceparent, "vendor=1"))
        assert trace_context.parse(child) is not None
        assert trace_id(child) != TRACE
        assert child.tracestate == ""
        assert tracer.stats().malformed == 1


def test_later_version_is_read_when_it_has_more_fields() -> None:
    identity = trace_context.parse(TraceContext(f"01-{TRACE}-{SPAN}-01-more"))
    assert identity == (TRACE, SPAN, True)


def test_child_keeps_trace_flag_and_state_when_parent_is_sampled() -> None:
    with tracer_into(FakeExporter(), sample=0.0) as tracer:
        child = tracer.child(SAMPLED)
    assert trace_id(child) == TRACE
    assert child.traceparent[36:52] != SPAN
    assert child.traceparent.endswith("-01")
    assert child.tracestate == "vendor=1"


def test_no_context_is_counted_as_malformed_when_it_is_empty() -> None:
    with tracer_into(FakeExporter()) as tracer:
        assert trace_context.is_sampled(tracer.child(TraceContext()))
        assert tracer.stats().malformed == 0


@pytest.mark.parametrize("tracestate", ["no equals sign", "UPPER=1", "a=" + "b" * 600, "a=1," * 40])
def test_tracestate_is_dropped_when_it_breaks_the_grammar(tracestate: str) -> None:
    with tracer_into(FakeExporter()) as tracer:
        assert tracer.child(TraceContext(SAMPLED.traceparent, tracestate)).tracestate == ""


def test_application_span_is_continued_when_one_is_current() -> None:
    from opentelemetry import trace

    assert ambient() == TraceContext()
    current = trace.SpanContext(int(TRACE, 16), int(SPAN, 16), False, trace.TraceFlags(1))
    with trace.use_span(trace.NonRecordingSpan(current)):
        assert ambient() == TraceContext(SAMPLED.traceparent)


# --- sampling -----------------------------------------------------------------------------------


def test_nothing_is_recorded_when_the_flag_is_not_set() -> None:
    exporter = FakeExporter()
    with tracer_into(exporter) as tracer:
        assert tracer.child(UNSAMPLED) == UNSAMPLED
        tracer.record("leaf", 1, 2, parent=UNSAMPLED)
        tracer.record("inner", 1, 2, own=UNSAMPLED, parent=UNSAMPLED)
        tracer.record("wave", 1, 2, links=[UNSAMPLED, TraceContext()])
        tracer.record("nowhere", 1, 2)
    assert exporter.spans == []


def test_wave_is_recorded_when_one_of_its_requests_is_sampled() -> None:
    exporter = FakeExporter()
    with tracer_into(exporter, sample=0.0) as tracer:
        tracer.record("wave", 1, 2, links=[UNSAMPLED, SAMPLED])
    assert [(span.name, len(span.links)) for span in exporter.spans] == [("wave", 2)]


@pytest.mark.parametrize(("sample", "sampled"), [(0.0, False), (1.0, True)])
def test_root_takes_the_rate_when_nothing_is_forced(sample: float, sampled: bool) -> None:
    with tracer_into(FakeExporter(), sample=sample) as tracer:
        assert trace_context.is_sampled(tracer.root()) is sampled
        assert trace_context.is_sampled(tracer.root(sampled=not sampled)) is not sampled


@pytest.mark.parametrize("sample", [-0.1, 1.1, float("nan")])
def test_settings_are_refused_when_the_rate_is_no_share(sample: float) -> None:
    with pytest.raises(InvalidRequest):
        settings(sample=sample)


# --- processes that export nothing --------------------------------------------------------------


def test_nothing_is_imported_when_no_endpoint_is_given() -> None:
    program = (
        "import sys\n"
        "from wavepp_proto.runtime.tracing import Tracer, TraceSettings, ambient\n"
        "tracer = Tracer(TraceSettings('wavepp-test'))\n"
        "context = tracer.child(tracer.root())\n"
        "tracer.record('span', 1, 2, own=context)\n"
        "tracer.close()\n"
        "assert ambient().traceparent == ''\n"
        "sys.exit(sum(name.split('.')[0] in ('opentelemetry', 'grpc', 'google') for name in sys.modules))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", program], env=environment, timeout=60).returncode == 0


def test_context_passes_unchanged_when_the_process_exports_nothing() -> None:
    assert Tracer(settings()).child(SAMPLED) == SAMPLED


def test_first_exporting_process_makes_the_root_when_the_client_exports_nothing() -> None:
    exporter = FakeExporter()
    sent = Tracer(settings("wavepp-client")).root()
    with tracer_into(exporter) as controller:
        own = controller.child(sent)
        controller.record(span_names.REQUEST, 1, 2, own=own, parent=sent)
    (span,) = exporter.spans
    assert span.parent is None
    assert f"{span.context.trace_id:032x}" == trace_id(sent) == trace_id(own)
    assert own.tracestate == ""


@pytest.mark.parametrize(("forced", "sampled"), [(None, False), (True, True), (False, False)])
def test_deferred_root_is_sampled_when_forced_or_by_the_next_rate(forced: bool | None, sampled: bool) -> None:
    with tracer_into(FakeExporter(), sample=0.0) as controller:
        child = controller.child(Tracer(settings()).root(sampled=forced))
    assert trace_context.is_sampled(child) is sampled


def test_endpoint_is_taken_from_the_environment_when_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector:4317")
    assert TraceSettings.from_environment("wavepp-test").endpoint == "http://collector:4317"
    assert TraceSettings.from_environment("wavepp-test", "http://mine:1").endpoint == "http://mine:1"
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert TraceSettings.from_environment("wavepp-test", "http://mine:1").endpoint is None
