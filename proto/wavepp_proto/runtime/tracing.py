"""Tracing as every process sees it: contexts to pass on, and spans recorded by appending a tuple.

Owns the `Tracer`: ids, head sampling, and the bounded buffer between the hot paths and the export
thread. Does not own the wire form of a context (`trace_context.py`), the thread that turns records
into OpenTelemetry spans (`span_export.py`), or the vocabulary (`span_names.py`). Called by the SDK,
the controller and the stage daemon, from any thread. Without an endpoint nothing of OpenTelemetry is
imported and `record` returns at once; contexts still travel, so a traced client reaches everyone.

A span is recorded when it ends, but its children need its id before: `child` reserves the id,
`record(..., own=reserved)` redeems it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from wavepp_proto.errors import InvalidRequest
from wavepp_proto.runtime import span_names, trace_context
from wavepp_proto.terms import TraceContext

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from wavepp_proto.runtime.channels import ClientSecurity
    from wavepp_proto.runtime.span_export import SpanExport

Scalar = str | bool | int | float
Attribute = tuple[str, Scalar | Sequence[str] | Sequence[int] | None]
"""A key of span_names and its value; a None is left out, so callers need no branch for it."""

NO_CONTEXT: Final = TraceContext()
_ENDPOINT_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


@dataclass(frozen=True, slots=True)
class TraceSettings:
    service: str
    """service.name of this process: wavepp-client, wavepp-controller or wavepp-stage."""
    endpoint: str | None = None
    """OTLP gRPC collector, http(s)://host:port or host:port; None exports nothing."""
    sample: float = 1.0
    """Share of the traces STARTED here that are recorded, 0..1; traces that arrive bring their own flag."""
    instance: str = field(default_factory=lambda: str(uuid.uuid4()))
    """service.instance.id: unique for each life of a process."""
    insecure: bool | None = None
    """None: TLS if the endpoint says https or `security` names a CA."""
    security: ClientSecurity | None = None
    """PEM files for a collector behind TLS; None trusts the system's authorities."""
    buffer_spans: int = 16_384
    """Records waiting for export; one more is dropped and counted."""
    period_s: float = 0.25
    """How often the buffer is looked at; a full batch is exported then, fewer spans after a few periods."""
    export_s: float = 2.0
    """Deadline of one export."""
    close_s: float = 0.5
    """Longest that `close` waits for the collector."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.sample <= 1.0:
            raise InvalidRequest(f"trace sample {self.sample} is not in 0..1", field="sample", value=self.sample)
        if self.buffer_spans < 1:
            raise InvalidRequest(
                "a trace buffer holds at least one span", field="buffer_spans", value=self.buffer_spans
            )

    @classmethod
    def from_environment(cls, service: str, endpoint: str | None = None, sample: float = 1.0) -> Self:
        """Settings with the endpoint given, else that of OpenTelemetry's own variables."""
        if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
            return cls(service, None, sample)
        named = (os.environ.get(name, "").strip() for name in _ENDPOINT_VARIABLES)
        return cls(service, endpoint or next(filter(None, named), None), sample)


class SpanRecord(NamedTuple):
    """One ended span as the hot path leaves it. Times are wall-clock nanoseconds."""

    name: str
    start_ns: int
    end_ns: int
    own: TraceContext
    """The span's reserved context; empty: an id is made at export."""
    parent: TraceContext
    """Empty: the span is the root of its trace."""
    attributes: Sequence[Attribute]
    links: Sequence[TraceContext]
    kind: str
    error: str


@dataclass(frozen=True, slots=True)
class TracerStats:
    buffered: int
    exported: int
    dropped: int
    """Not recorded because the buffer was full."""
    failed: int
    """Recorded, and lost because the collector did not take them."""
    malformed: int
    """Contexts that broke the W3C grammar; each began a new trace."""
    connected: bool | None
    """Whether the collector took the last export; None before the first."""


class Tracer:
    """Contexts and recorded spans of one process. Thread-safe; no method waits, but `close`."""

    def __init__(self, settings: TraceSettings, exporter: Callable[[], SpanExporter] | None = None) -> None:
        """`exporter` replaces the OTLP exporter; it is called on the export thread."""
        self.settings = settings
        self.recording: Final = settings.endpoint is not None or exporter is not None
        """Whether ended spans go anywhere."""
        self._sampled_below = round(settings.sample * 2**64)
        self._records: deque[SpanRecord] = deque()
        self._counting = threading.Lock()
        self._dropped = 0
        self._malformed = 0
        self._export: SpanExport | None = None
        if self.recording:
            # Deferred: a process without tracing must not pay for OpenTelemetry (1.7 s of imports).
            from wavepp_proto.runtime.span_export import SpanExport

            self._export = SpanExport(settings, self._records, exporter)
            self._export.start()

    def root(self, sampled: bool | None = None) -> TraceContext:
        """Context of the first span of a new trace; `sampled` overrides the head-sampling rate."""
        trace_id, span_id = trace_context.new_trace_id(), trace_context.new_span_id()
        if self.recording or sampled is False:
            return trace_context.make(trace_id, span_id, self._samples(trace_id) if sampled is None else sampled)
        return trace_context.defer(trace_id, span_id, forced=sampled is True)

    def child(self, parent: TraceContext) -> TraceContext:
        """Context of a span under `parent`; of a new root if that is empty or malformed.

        Who will not record the span passes `parent` on unchanged: its descendants then hang on the
        nearest span that is really exported.
        """
        identity = trace_context.parse(parent)
        if identity is None:
            if parent.traceparent:
                with self._counting:
                    self._malformed += 1
            return self.root()
        if not self.recording:
            return parent
        deferred = trace_context.is_deferred(parent)
        sampled = identity.sampled or (deferred and self._samples(identity.trace_id))
        if not sampled and not deferred:
            return parent
        state = trace_context.clean_tracestate(parent.tracestate)
        return trace_context.make(identity.trace_id, trace_context.new_span_id(), sampled, state)

    def record(
        self,
        name: str,
        start_ns: int,
        end_ns: int,
        *,
        own: TraceContext = NO_CONTEXT,
        parent: TraceContext = NO_CONTEXT,
        attributes: Sequence[Attribute] = (),
        links: Sequence[TraceContext] = (),
        kind: str = span_names.INTERNAL,
        error: str = "",
    ) -> None:
        """Leave an ended span for the export thread, or drop it if its trace is not sampled.

        A leaf gives only `parent`; a span that had children gives `own` too, a root gives `own`
        alone. With neither, the span is a root of its own, sampled if any of its `links` is.
        `error` is a stable reason (errors.py); it sets the status and error.type.
        """
        if self._export is None:
            return
        decides = own if own.traceparent else parent
        if decides.traceparent:
            if not trace_context.is_sampled(decides):
                return
        elif not any(map(trace_context.is_sampled, links)):
            return
        if len(self._records) >= self.settings.buffer_spans:
            with self._counting:
                self._dropped += 1
            return
        self._records.append(SpanRecord(name, start_ns, end_ns, own, parent, attributes, links, kind, error))

    def stats(self) -> TracerStats:
        export = self._export
        return TracerStats(
            buffered=len(self._records),
            exported=export.exported if export else 0,
            dropped=self._dropped,
            failed=export.failed if export else 0,
            malformed=self._malformed,
            connected=export.connected if export else None,
        )

    def close(self) -> None:
        """Export what is buffered, within `close_s`. Blocking; may be called again."""
        if self._export is not None:
            self._export.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _samples(self, trace_id: str) -> bool:
        # A function of the id alone, so processes with the same rate decide alike.
        return int(trace_id[16:], 16) < self._sampled_below


def wall_ns(monotonic_ns: int) -> int:
    """Wall-clock time of an earlier reading of the monotonic clock, by today's offset."""
    return time.time_ns() - (time.monotonic_ns() - monotonic_ns)


def ambient() -> TraceContext:
    """Context of the application's current OpenTelemetry span, for the SDK to continue.

    Empty if there is none. Looks only at what the application has imported already.
    """
    # Our export thread may be in the middle of importing it: what has no function yet has no span either.
    get_current_span = getattr(sys.modules.get("opentelemetry.trace"), "get_current_span", None)
    if get_current_span is None:
        return NO_CONTEXT
    current = get_current_span().get_span_context()
    if not current.is_valid:
        return NO_CONTEXT
    state = ",".join(f"{key}={value}" for key, value in current.trace_state.items())
    return trace_context.make(f"{current.trace_id:032x}", f"{current.span_id:016x}", current.trace_flags.sampled, state)
