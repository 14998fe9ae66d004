"""A span exporter that answers as a test says, and tracers that export into it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Final

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from wavepp_proto.runtime import trace_context
from wavepp_proto.runtime.tracing import Tracer, TraceSettings
from wavepp_proto.terms import TraceContext

TRACE: Final = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN: Final = "00f067aa0ba902b7"
SAMPLED: Final = TraceContext(f"00-{TRACE}-{SPAN}-01", "vendor=1")
UNSAMPLED: Final = TraceContext(f"00-{TRACE}-{SPAN}-00")
GENEROUS_S: Final = 30.0


class FakeExporter(SpanExporter):
    """Answers `result`; holds every call until `gate` opens; notes the size of each batch."""

    def __init__(self, result: SpanExportResult = SpanExportResult.SUCCESS, *, gate_open: bool = True) -> None:
        self.result = result
        self.batches: list[int] = []
        self.spans: list[ReadableSpan] = []
        self.called = threading.Event()
        self.shut = threading.Event()
        self.gate = threading.Event()
        if gate_open:
            self.gate.set()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.batches.append(len(spans))
        self.called.set()
        self.gate.wait(GENEROUS_S)
        if self.result is SpanExportResult.SUCCESS:
            self.spans.extend(spans)
        return self.result

    def shutdown(self) -> None:
        self.shut.set()
        self.gate.set()


def settings(service: str = "wavepp-test", **changed: Any) -> TraceSettings:
    # A slow machine must not lose spans at close; the short limit has tests of its own.
    return TraceSettings(service, **{"close_s": GENEROUS_S, "period_s": 0.01, **changed})


def tracer_into(exporter: FakeExporter, **changed: Any) -> Tracer:
    return Tracer(settings(**changed), lambda: exporter)


def trace_id(context: TraceContext) -> str:
    identity = trace_context.parse(context)
    assert identity is not None
    return identity.trace_id
