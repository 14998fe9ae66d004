"""Turns a span record into the OpenTelemetry SDK's span, ids included.

Owns the mapping and this process's resource. Builds `ReadableSpan` directly, with the ids that
`Tracer` reserved: no id generator, sampler or current context takes part. Importing this file costs
nothing, making a `SpanBuilder` imports OpenTelemetry. Called by the export thread alone.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from wavepp_proto.runtime import span_names, trace_context
from wavepp_proto.terms import TraceContext

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext

    from wavepp_proto.runtime.tracing import SpanRecord, TraceSettings


class SpanBuilder:
    """Builds SDK spans of this process from records. Imports OpenTelemetry when made."""

    def __init__(self, settings: TraceSettings) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._pid = os.getpid()
        self._resource: Resource = Resource.create(
            {
                span_names.SERVICE_NAME: settings.service,
                span_names.SERVICE_INSTANCE_ID: settings.instance,
                span_names.PROCESS_PID: self._pid,
            }
        )
        self._scope = InstrumentationScope("wavepp")

    def build(self, record: SpanRecord) -> ReadableSpan | None:
        """None if the record's own context is malformed, or it names neither itself nor a parent."""
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import Link, SpanKind
        from opentelemetry.trace.status import Status, StatusCode

        parent = None if trace_context.is_deferred(record.parent) else span_context(record.parent)
        own = self._own_context(record)
        if own is None:
            return None
        attributes = {key: value for key, value in record.attributes if value is not None}
        attributes[span_names.PROCESS_PID] = self._pid
        if record.error:
            attributes[span_names.ERROR_TYPE] = record.error
        return ReadableSpan(
            record.name,
            own,
            parent,
            self._resource,
            attributes,
            links=[Link(context) for context in map(span_context, record.links) if context is not None],
            kind=SpanKind[record.kind.upper()],
            status=Status(StatusCode.ERROR, record.error) if record.error else Status(StatusCode.UNSET),
            start_time=record.start_ns,
            end_time=max(record.start_ns, record.end_ns),
            instrumentation_scope=self._scope,
        )

    @staticmethod
    def _own_context(record: SpanRecord) -> SpanContext | None:
        if record.own.traceparent:
            return span_context(record.own)
        if not record.parent.traceparent:
            return span_context(trace_context.make(trace_context.new_trace_id(), trace_context.new_span_id(), True))
        parent = trace_context.parse(record.parent)
        if parent is None:
            return None
        span_id = trace_context.new_span_id()
        return span_context(trace_context.make(parent.trace_id, span_id, True, record.parent.tracestate))


def span_context(context: TraceContext) -> SpanContext | None:
    """OpenTelemetry's form of a context that came in a message; None if it is malformed."""
    from opentelemetry.trace import SpanContext, TraceFlags, TraceState

    identity = trace_context.parse(context)
    if identity is None:
        return None
    state = trace_context.clean_tracestate(context.tracestate)
    return SpanContext(
        int(identity.trace_id, 16),
        int(identity.span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED if identity.sampled else TraceFlags.DEFAULT),
        trace_state=TraceState.from_header([state]) if state else TraceState(),
    )
