"""The background thread that turns span records into OpenTelemetry spans and exports them.

Owns the failure rule and the moment of importing OpenTelemetry (1.7 s, on this thread). Does not
own the buffer's bound (`tracing.py`), the form of a span (`span_builder.py`) or the wire
(`otlp_exporter.py`).

A collector that is down costs one empty request per hold-off (1 s doubling to 30 s): no span is
built until that probe passes, and nothing waits for it at shutdown.

    unknown --probe passes--> up --export fails (batch counted as failed)--> down
       |                      ^                                               |
       +--probe fails--> down +------- probe passes after the hold-off -------+
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from wavepp_proto.runtime.span_builder import SpanBuilder

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

    from wavepp_proto.runtime.tracing import SpanRecord, TraceSettings

BATCH_SPANS: Final = 256
"""A wave links up to 128 requests (6 KiB): a batch of them stays below the 4 MiB of a gRPC message."""
PATIENCE_PERIODS: Final = 4
"""Fewer records than a batch wait so many periods: an export costs a process 1.5 ms, however few spans it takes."""
FIRST_HOLD_OFF_S: Final = 1.0
LONGEST_HOLD_OFF_S: Final = 30.0
START_LIMIT_S: Final = 15.0
"""Longest that `close` waits for the imports, if spans wait for them: a short command still exports."""

log = logging.getLogger(__name__)


class SpanExport:
    """Empties a deque of records into an exporter. One thread, started once, closed once."""

    def __init__(
        self, settings: TraceSettings, records: deque[SpanRecord], exporter: Callable[[], SpanExporter] | None
    ) -> None:
        self.exported = 0
        self.failed = 0
        self.connected: bool | None = None
        self._settings = settings
        self._records = records
        self._make_exporter = exporter or (lambda: _otlp_exporter(settings))
        self._exporter: SpanExporter | None = None
        self._builder: SpanBuilder | None = None
        self._ready = threading.Event()
        self._stop = threading.Event()
        self._give_up_s = float("inf")
        self._hold_off_s = FIRST_HOLD_OFF_S
        self._next_probe_s = 0.0
        self._thread = threading.Thread(target=self._run, name="wavepp-trace-export", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Return within the close limit once the imports are done; safe to call again."""
        if self._stop.is_set():
            return
        if self._records:
            self._ready.wait(START_LIMIT_S)
        limit_s = 0.0 if self.connected is False else self._settings.close_s
        self._give_up_s = time.monotonic() + limit_s
        self._stop.set()
        self._thread.join(limit_s)
        if self._thread.is_alive() and self._exporter is not None:
            # An exporter stuck in a call ends it when told to shut down, which may itself take
            # seconds with the collector down: nobody waits for that.
            threading.Thread(target=self._exporter.shutdown, name="wavepp-trace-abort", daemon=True).start()

    def _run(self) -> None:
        try:
            self._exporter, self._builder = self._make_exporter(), SpanBuilder(self._settings)
        except Exception as error:  # a bad certificate path or endpoint must not end the process
            log.error("tracing is off: cannot set up the exporter", extra={"error": str(error)})
            self.connected = False
            return
        finally:
            self._ready.set()
        self._drain()
        waited = 0
        while not self._stop.wait(self._settings.period_s):
            waited += 1
            if waited >= PATIENCE_PERIODS or len(self._records) >= BATCH_SPANS:
                waited = 0
                self._drain()
        self._drain()
        if self.connected:
            self._exporter.shutdown()

    def _drain(self) -> None:
        if not self.connected and not self._probe():
            return
        while self._records and self.connected and time.monotonic() < self._give_up_s:
            # Popped singly, because hot paths append meanwhile; only this thread removes.
            batch = [self._records.popleft() for _ in range(min(len(self._records), BATCH_SPANS))]
            self._export_batch(batch)

    def _probe(self) -> bool:
        """Whether the collector takes an empty request; asks only when the hold-off is over."""
        if time.monotonic() < self._next_probe_s or (self._stop.is_set() and self.connected is False):
            return False
        self._settle(self._send([]))
        return bool(self.connected)

    def _export_batch(self, batch: list[SpanRecord]) -> None:
        spans = [span for span in map(self._build, batch) if span is not None]
        sent = self._send(spans)
        self.exported += len(spans) if sent else 0
        self.failed += len(batch) - (len(spans) if sent else 0)
        self._settle(sent)

    def _build(self, record: SpanRecord) -> ReadableSpan | None:
        assert self._builder is not None
        try:
            return self._builder.build(record)
        except Exception as error:  # one bad record must not take the thread, and all later spans, with it
            log.error("a span cannot be built", extra={"span": record.name, "error": repr(error)})
            return None

    def _send(self, spans: list[ReadableSpan]) -> bool:
        assert self._exporter is not None
        try:
            return self._exporter.export(spans).name == "SUCCESS"
        except Exception as error:  # any exporter may be plugged in; tracing never ends a process
            log.debug("span exporter raised", extra={"error": str(error)})
            return False

    def _settle(self, sent: bool) -> None:
        if sent:
            if self.connected is False:
                log.info("traces are exported again", extra={"endpoint": self._settings.endpoint})
            self.connected, self._hold_off_s = True, FIRST_HOLD_OFF_S
            return
        if self.connected is not False and not self._stop.is_set():
            log.warning("traces cannot be exported; will try again", extra={"endpoint": self._settings.endpoint})
        self.connected = False
        self._next_probe_s = time.monotonic() + self._hold_off_s
        self._hold_off_s = min(2 * self._hold_off_s, LONGEST_HOLD_OFF_S)


def _otlp_exporter(settings: TraceSettings) -> SpanExporter:
    from wavepp_proto.runtime.otlp_exporter import OtlpExporter

    return OtlpExporter(settings)
