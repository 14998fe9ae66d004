"""Turns the core's Span actions into recorded spans (DESIGN.md section 12).

Owns the span ids of live requests: a phase is recorded when it ends, but its children and the stages
need its id before. Times of the core are monotonic; spans are wall clock, so one offset is kept.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from wavepp_controller.core.events import Span
from wavepp_proto.runtime import span_names
from wavepp_proto.runtime.tracing import Tracer
from wavepp_proto.terms import Failed, Finished, RequestId, TraceContext


@dataclass(slots=True)
class _Live:
    parent: TraceContext
    """What the client sent."""
    own: TraceContext
    """Of `prefill.request`: announced to every stage."""
    start_ns: int
    prompt_tokens: int
    phases: dict[str, TraceContext] = field(default_factory=dict)
    """Reserved contexts of phases that have children."""


class RequestSpans:
    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self._live: dict[RequestId, _Live] = {}
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def began(self, request_id: RequestId, trace: TraceContext, prompt_tokens: int) -> TraceContext:
        """Reserve the request's own span; call before Submit."""
        own = self.tracer.child(trace)
        self._live[request_id] = _Live(trace, own, time.time_ns(), prompt_tokens)
        return own

    def context_of(self, request_id: RequestId) -> TraceContext:
        """Context to announce: stage spans hang below it."""
        live = self._live.get(request_id)
        return live.own if live is not None else TraceContext()

    def record(self, span: Span) -> None:
        """Record one phase under its enclosing phase, or under the request."""
        live = self._live.get(RequestId(span.request_id))
        if live is None or not self.tracer.recording:
            return
        parent = self._phase(live, span.parent) if span.parent else live.own
        own = self._phase(live, span.name) if span.name in (span_names.ADMISSION, span_names.PIN_RESERVE) else None
        attributes = tuple((_key(name), value) for name, value in span.attributes)
        self.tracer.record(
            span.name, self._wall(span.start), self._wall(span.end), parent=parent, attributes=attributes,
            own=own or TraceContext(),
        )  # fmt: skip
        if span.name == span_names.PIN_RESERVE:
            live.phases.pop(span.name, None)

    def ended(self, event: Finished | Failed) -> None:
        """Record the request's own span."""
        live = self._live.pop(event.request_id, None)
        if live is None:
            return
        failed = isinstance(event, Failed)
        outcome = event.error.reason if isinstance(event, Failed) else "finished"
        attributes: list[tuple[str, str | int]] = [
            (span_names.REQUEST_ID, event.request_id),
            (span_names.GEN_AI_OPERATION_NAME, span_names.GEN_AI_OPERATION_TEXT_COMPLETION),
            (span_names.GEN_AI_USAGE_INPUT_TOKENS, live.prompt_tokens),
            (span_names.OUTCOME, outcome),
        ]
        if isinstance(event, Finished):
            attributes.append((span_names.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS, event.cached_tokens))
        self.tracer.record(
            span_names.REQUEST, live.start_ns, time.time_ns(), own=live.own, parent=live.parent,
            attributes=attributes, kind=span_names.SERVER, error=outcome if failed else "",
        )  # fmt: skip

    def _phase(self, live: _Live, name: str) -> TraceContext:
        """The reserved context of an enclosing phase; phases inside `admission` hang below it."""
        context = live.phases.get(name)
        if context is None:
            above = live.own if name == span_names.ADMISSION else self._phase(live, span_names.ADMISSION)
            context = live.phases[name] = self.tracer.child(above)
        return context

    def _wall(self, monotonic_s: float) -> int:
        return round(monotonic_s * 1e9) + self._offset_ns


def _key(name: str) -> str:
    return name if "." in name else f"wavepp.{name}"
