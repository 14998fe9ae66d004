"""Turns the core's Span actions into recorded spans (DESIGN.md).

Owns the span ids of live requests: a phase is recorded when it ends, but its children and the stages
need its id before, so the id of an enclosing phase is reserved by its first child and redeemed when the
phase itself arrives. Times of the core are monotonic; spans are wall clock by each request's own offset.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from wavepp_controller.core.events import Span
from wavepp_proto.runtime import span_names
from wavepp_proto.runtime.trace_context import is_sampled
from wavepp_proto.runtime.tracing import NO_CONTEXT, Attribute, Tracer
from wavepp_proto.terms import Failed, Finished, RequestId, TraceContext

ENCLOSING = frozenset({span_names.ADMISSION, span_names.PIN_RESERVE})
"""Phases that have children; the children come first."""


@dataclass(slots=True)
class _Live:
    parent: TraceContext
    """What the client sent."""
    own: TraceContext
    """Of `prefill.request`: announced to every stage."""
    start_ns: int
    offset_ns: int
    """From monotonic to wall clock, so that the spans of one request fit each other."""
    prompt_tokens: int
    reserved: dict[str, TraceContext] = field(default_factory=dict)
    """Contexts of enclosing phases whose own span is still to come."""

    def wall(self, monotonic_s: float) -> int:
        return round(monotonic_s * 1e9) + self.offset_ns


class RequestSpans:
    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self._live: dict[RequestId, _Live] = {}

    def began(self, request_id: RequestId, trace: TraceContext, prompt_tokens: int) -> TraceContext:
        """Reserve the request's own span; call before Submit."""
        own, now_ns = self.tracer.child(trace), time.time_ns()
        self._live[request_id] = _Live(trace, own, now_ns, now_ns - time.monotonic_ns(), prompt_tokens)
        return own

    def context_of(self, request_id: RequestId) -> TraceContext:
        """Context to announce: stage spans hang below it."""
        live = self._live.get(request_id)
        return live.own if live is not None else NO_CONTEXT

    def record(self, span: Span) -> None:
        """Record one phase under its enclosing phase, or under the request."""
        live = self._live.get(span.request_id)
        if live is None or not self._wanted(live):
            return
        parent = self._reserved(live, span.parent) if span.parent else live.own
        own = NO_CONTEXT
        if span.name in ENCLOSING:
            own = self._reserved(live, span.name)
            del live.reserved[span.name]  # the next round, or the next attempt, has a span of its own
        self.tracer.record(
            span.name, live.wall(span.start), live.wall(span.end), own=own, parent=parent, attributes=span.attributes
        )

    def ended(self, event: Finished | Failed) -> None:
        """Record the request's own span."""
        live = self._live.pop(event.request_id, None)
        if live is None or not self._wanted(live):
            return
        error = event.error.reason if isinstance(event, Failed) else ""
        cached = event.cached_tokens if isinstance(event, Finished) else None
        attributes: tuple[Attribute, ...] = (
            (span_names.REQUEST_ID, event.request_id),
            (span_names.GEN_AI_OPERATION_NAME, span_names.GEN_AI_OPERATION_TEXT_COMPLETION),
            (span_names.GEN_AI_USAGE_INPUT_TOKENS, live.prompt_tokens),
            (span_names.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS, cached),
            (span_names.OUTCOME, error or "finished"),
        )
        self.tracer.record(
            span_names.REQUEST, live.start_ns, time.time_ns(), own=live.own, parent=live.parent,
            attributes=attributes, kind=span_names.SERVER, error=error,
        )  # fmt: skip

    def _wanted(self, live: _Live) -> bool:
        """A span that nobody will see is not described either."""
        return self.tracer.recording and is_sampled(live.own)

    def _reserved(self, live: _Live, name: str) -> TraceContext:
        """The context of an enclosing phase, whose parent is the phase around it."""
        context = live.reserved.get(name)
        if context is None:
            above = live.own if name == span_names.ADMISSION else self._reserved(live, span_names.ADMISSION)
            context = live.reserved[name] = self.tracer.child(above)
        return context
