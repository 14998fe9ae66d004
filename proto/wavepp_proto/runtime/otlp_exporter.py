"""Sends spans to an OTLP gRPC collector: one attempt, one deadline, no word in the log.

Owns the channel and OpenTelemetry's environment variables for headers and compression. Does not own
retries or reports of an outage (`span_export.py`): the exporter of OpenTelemetry itself has its own
of both, sleeps between attempts, and waits for them at shutdown. Import this file on the export
thread only: it pulls in OpenTelemetry and gRPC.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

import grpc
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import TraceServiceStub
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from wavepp_proto.errors import InvalidRequest

if TYPE_CHECKING:
    from wavepp_proto.runtime.tracing import TraceSettings

_DEFAULT_PORT: Final = 4317
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_CHANNEL_OPTIONS: Final = (
    # No keepalive pings: a foreign collector answers ours with GOAWAY too_many_pings.
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),
)


class OtlpExporter(SpanExporter):
    """Exports over a channel that connects lazily. `shutdown` from another thread ends a call."""

    def __init__(self, settings: TraceSettings) -> None:
        """Raises InvalidRequest if the endpoint or a TLS file is unusable."""
        self._timeout_s = settings.export_s
        self._headers = _headers()
        self._channel = _channel(settings)
        self._stub = TraceServiceStub(self._channel)  # type: ignore[no-untyped-call]

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            self._stub.Export(encode_spans(spans), timeout=self._timeout_s, metadata=self._headers)
        except (grpc.RpcError, ValueError):  # ValueError: the channel was closed meanwhile
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self._channel.close()


def _channel(settings: TraceSettings) -> grpc.Channel:
    endpoint = settings.endpoint or ""
    url = urlsplit(endpoint if "://" in endpoint else f"//{endpoint}")
    if not url.hostname:
        raise InvalidRequest("a trace endpoint is http(s)://host:port", field="trace_endpoint", value=endpoint)
    host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
    target = f"{host}:{url.port or _DEFAULT_PORT}"
    options: list[tuple[str, str | int]] = list(_CHANNEL_OPTIONS)
    if url.hostname in _LOOPBACK:
        # A proxy named in the environment must not swallow a collector on this machine.
        options.append(("grpc.enable_http_proxy", 0))
    compression = grpc.Compression.Gzip if _variable("COMPRESSION") == "gzip" else grpc.Compression.NoCompression
    credentials = settings.security.credentials() if settings.security else None
    insecure = settings.insecure
    if insecure is None:
        insecure = url.scheme != "https" and credentials is None
    if insecure:
        return grpc.insecure_channel(target, options, compression)
    return grpc.secure_channel(target, credentials or grpc.ssl_channel_credentials(), options, compression)


def _headers() -> list[tuple[str, str]]:
    """The metadata that OTEL_EXPORTER_OTLP_HEADERS asks for, as `key=value,...` with values URL-encoded."""
    pairs = (pair.partition("=") for pair in _variable("HEADERS").split(",") if "=" in pair)
    return [(key.strip().lower(), unquote(value.strip())) for key, _, value in pairs]


def _variable(name: str) -> str:
    return os.environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}") or os.environ.get(f"OTEL_EXPORTER_OTLP_{name}", "")
