"""A small OTLP gRPC collector that keeps what it receives in memory.

Owns the server and the newest `limit` spans; used by `wavepp up --trace-file`, the demo and tests,
on loopback. Not a backend: it stores nothing, forwards nothing and checks no credentials.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final, Self

import grpc
import grpc.aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span, Status

from wavepp_proto.runtime import span_names
from wavepp_proto.runtime.channels import advertise_address, bind_server, new_server
from wavepp_proto.runtime.timeline_layout import AttributeValue, CollectedSpan

DEFAULT_LIMIT: Final = 200_000
"""Spans kept, about 1 KiB each."""
_CLOSE_GRACE_S: Final = 0.5


class TraceSink(trace_service_pb2_grpc.TraceServiceServicer):
    """Collects spans while it runs: `sink = await TraceSink.start()`, then `sink.spans`."""

    def __init__(self, limit: int = DEFAULT_LIMIT) -> None:
        self.endpoint = ""
        """What to hand to `TraceSettings`, http://host:port; empty until started."""
        self.forgotten = 0
        """Spans that made room for newer ones."""
        self._spans: deque[CollectedSpan] = deque(maxlen=limit)
        self._server: grpc.aio.Server | None = None

    @classmethod
    async def start(cls, listen: str = "127.0.0.1:0", limit: int = DEFAULT_LIMIT) -> Self:
        """Bind and serve. Port 0 takes a free one; raises InvalidRequest if the address cannot be bound."""
        sink = cls(limit)
        server = sink._server = new_server()
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(sink, server)  # type: ignore[no-untyped-call]
        try:
            port = bind_server(server, listen)
            await server.start()
        except BaseException:
            await sink.close()
            raise
        sink.endpoint = f"http://{advertise_address(listen, None, port)}"
        return sink

    @property
    def spans(self) -> list[CollectedSpan]:
        """What was received, oldest export first."""
        return list(self._spans)

    async def close(self) -> None:
        """Stop serving; what was collected stays readable. Safe to call again."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(_CLOSE_GRACE_S)

    # The method's name is the protocol's.
    async def Export(
        self,
        request: trace_service_pb2.ExportTraceServiceRequest,
        context: grpc.aio.ServicerContext[
            trace_service_pb2.ExportTraceServiceRequest, trace_service_pb2.ExportTraceServiceResponse
        ],
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        for resource_spans in request.resource_spans:
            for span in _collected(resource_spans):
                self.forgotten += len(self._spans) == self._spans.maxlen
                self._spans.append(span)
        return trace_service_pb2.ExportTraceServiceResponse()


def _collected(resource_spans: ResourceSpans) -> Iterable[CollectedSpan]:
    resource = _attributes(resource_spans.resource.attributes)
    for scope_spans in resource_spans.scope_spans:
        for span in scope_spans.spans:
            yield _collected_span(span, resource)


def _collected_span(span: Span, resource: dict[str, AttributeValue]) -> CollectedSpan:
    return CollectedSpan(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_span_id=span.parent_span_id.hex() or None,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_attributes(span.attributes),
        links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
        kind=Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
        error=span.status.message if span.status.code == Status.STATUS_CODE_ERROR else "",
        service=str(resource.get(span_names.SERVICE_NAME, "")),
        instance=str(resource.get(span_names.SERVICE_INSTANCE_ID, "")),
    )


def _attributes(pairs: Iterable[KeyValue]) -> dict[str, AttributeValue]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> AttributeValue:
    match value.WhichOneof("value"):
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case "int_value":
            return value.int_value
        case "double_value":
            return value.double_value
        case "array_value":
            return tuple(str(_value(item)) for item in value.array_value.values)
        case _:
            return value.SerializeToString().hex()
