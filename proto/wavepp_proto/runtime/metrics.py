"""Prometheus series of the controller and of a stage daemon, and the endpoint that serves them, with liveness and
readiness for probes that speak HTTP.

Owns names, labels, units (seconds, blocks, tokens) and buckets. Does not own the numbers: what a
runtime counts anyway is read when somebody scrapes (`ControllerFigures`, `StageFigures`), only
distributions are observed as they happen, about a microsecond each. Every process makes one set on a
registry of its own. Imported, and listening, only where an operator asked for metrics.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Self, TypeVar
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, make_wsgi_app, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from wavepp_proto import limits
from wavepp_proto.errors import InvalidRequest
from wavepp_proto.runtime.channels import Address, parse_address
from wavepp_proto.runtime.logs import get_log
from wavepp_proto.runtime.tracing import TracerStats
from wavepp_proto.terms import Timings

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

log = get_log(__name__)
T = TypeVar("T")
ADMISSION_PHASES: Final = ("queue", "hash", "hint", "announce", "rounds", "capacity_wait", "sharing_wait", "admission")
"""Field names of terms.Timings without `_ms`; "admission" is all of them."""

_LATENCY_S: Final = (5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1, 2.5, 10, 60)
_LOOP_DELAY_S: Final = (1e-4, 2.5e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 1)

ASK_S: Final = 2.0
"""How long a scrape or a probe waits for the event loop."""
TEXT: Final = [("Content-Type", "text/plain; charset=utf-8")]

Values = Mapping[str, float]
"""By the value of the one label."""


@dataclass(frozen=True, slots=True)
class ControllerFigures:
    """What a controller knows at a scrape. Counts are since it started."""

    leads: bool
    ready: bool
    ring_waves: Values
    """By pipeline: waves in flight, 0..R."""
    queue_requests: Values
    queue_tokens: Values
    """By pipeline: prompts not admitted yet."""
    running_requests: Values
    parked_requests: Values
    """By pipeline: waiting behind a request that computes the same prefix."""
    digest_age_s: Values
    """By daemon of a formation, as DaemonKey prints."""
    requests: Values
    """By outcome: finished, or the reason of the error. Every request that ended counts once."""
    rejected: Values
    """By reason: refused before it was queued."""
    waves: int
    computed_tokens: int
    """Prompt tokens sent to be computed."""
    cached_tokens: int
    """Prompt tokens that were reused instead."""
    lost_tokens: Values
    """By cause: tokens that some stage held and the endpoint could not use."""
    events: Values
    """Whatever else the core counts, by its own name."""

    def families(self, prefix: str) -> Iterator[Metric]:
        made = _Families(prefix)
        yield made.gauge("leader", "1 while this controller leads", self.leads)
        yield made.gauge("ready", "1 while it leads, takes requests, and some pipeline is ready", self.ready)
        yield made.gauges("ring_waves", "Waves in flight", "pipeline", self.ring_waves)
        yield made.gauges("queue_requests", "Requests queued for admission", "pipeline", self.queue_requests)
        yield made.gauges("queue_tokens", "Prompt tokens queued for admission", "pipeline", self.queue_tokens)
        yield made.gauges("running_requests", "Requests admitted and not ended", "pipeline", self.running_requests)
        yield made.gauges(
            "parked_requests", "Requests waiting for a prefix that another computes", "pipeline", self.parked_requests
        )
        yield made.gauges("digest_age_seconds", "Since the last digest", "daemon", self.digest_age_s)
        yield made.counters("requests", "Requests ended", "outcome", self.requests)
        yield made.counters("rejected", "Requests refused before they were queued", "reason", self.rejected)
        yield made.counter("waves", "Waves planned", self.waves)
        yield made.counter("computed_tokens", "Prompt tokens sent to be computed", self.computed_tokens)
        yield made.counter("cached_tokens", "Prompt tokens reused", self.cached_tokens)
        yield made.counters("lost_tokens", "Prompt tokens held by a stage, yet not reused", "cause", self.lost_tokens)
        yield made.counters("events", "What else was counted, by name", "event", self.events)


@dataclass(frozen=True, slots=True)
class StageFigures:
    """What a stage daemon knows at a scrape. Counts are since it started."""

    serving: bool
    time_s: Values
    """By state: where the executor's time went."""
    waves: Values
    """By outcome: done or failed."""
    computed_tokens: int
    void_rows: int
    votes: Values
    """Entries of rounds answered, by outcome (terms.VoteOutcome value)."""
    blocks: Values
    """Device blocks by state: free, cached, held, quarantined. The sum is the pool (invariant I2)."""
    leases: int
    escrows: int
    """Requests that hold one."""
    escrowed_blocks: int
    backed_blocks: Values
    """By what backs the escrows: free blocks, blocks to off-load, blocks to evict."""
    evicted_blocks: int
    """Since the pool was made: cached blocks that are gone from both tiers."""
    moved_blocks: Values
    """Since the pool was made, by direction: off-loaded to the host tier, onboarded from it."""
    host_blocks: Values
    """Host blocks by state: free, cached, held."""
    states: Values
    """Slots for recurrent states by state: free, cached, held, quarantined. The sum is `--state-slots`."""
    escrowed_states: int
    evicted_states: int
    """Since the slots were made: snapshots dropped to make room."""
    abandoned_links: int
    """Link threads of ended formations that have not come back yet, of this process."""
    copied_blocks: Values
    """By direction: copies complete between device and host, since the daemon started."""
    copy_s: Values
    """By direction: time of the copy thread."""
    failed_copies: int
    """Lots that did not become complete: what they should have moved was dropped."""
    self_fences: int
    resumed_streams: int
    """Wave streams that the controller opened again within a formation."""
    refused: bool
    """The controller says that no pipeline can use this daemon."""

    def families(self, prefix: str) -> Iterator[Metric]:
        made = _Families(prefix)
        yield made.gauge("serving", "1 while a formation is served", self.serving)
        yield made.counters("time_seconds", "Time of the executor by state", "state", self.time_s)
        yield made.counters("waves", "Waves executed", "outcome", self.waves)
        yield made.counter("computed_tokens", "Tokens computed", self.computed_tokens)
        yield made.counter("void_rows", "Rows that flowed without being computed", self.void_rows)
        yield made.counters("votes", "Entries of rounds answered", "outcome", self.votes)
        yield made.gauges("blocks", "Device blocks by state", "state", self.blocks)
        yield made.gauge("leases", "Requests that hold a lease", self.leases)
        yield made.gauge("escrows", "Requests that hold an escrow", self.escrows)
        yield made.gauge("escrowed_blocks", "Blocks promised and not taken", self.escrowed_blocks)
        yield made.gauges("escrow_backing_blocks", "What backs the escrows", "by", self.backed_blocks)
        yield made.counter("evicted_blocks", "Cached blocks dropped to make room", self.evicted_blocks)
        yield made.counters("moved_blocks", "Blocks moved between device and host", "direction", self.moved_blocks)
        yield made.gauges("host_blocks", "Blocks of the host tier by state", "state", self.host_blocks)
        yield made.gauges("states", "Slots for recurrent states by state", "state", self.states)
        yield made.gauge("escrowed_states", "Slots promised and not taken", self.escrowed_states)
        yield made.counter("evicted_states", "Snapshots dropped to make room", self.evicted_states)
        yield made.gauge("abandoned_link_threads", "Link threads that outlive their formation", self.abandoned_links)
        yield made.counters("copied_blocks", "Blocks copied between device and host", "direction", self.copied_blocks)
        yield made.counters("copy_seconds", "Time of copies between device and host", "direction", self.copy_s)
        yield made.counter("failed_copies", "Lots of copies that failed", self.failed_copies)
        yield made.counter("self_fences", "Times the controller was silent for too long", self.self_fences)
        yield made.counter("resumed_streams", "Wave streams opened again in a formation", self.resumed_streams)
        yield made.gauge("refused", "1 while the controller refuses this daemon; its log says why", self.refused)


Figures = ControllerFigures | StageFigures
Reading = tuple[Figures | None, TracerStats]
"""None while the process cannot say; what is observed is served all the same."""


@dataclass(frozen=True, slots=True)
class ControllerMetrics:
    registry: CollectorRegistry
    admission_s: Mapping[str, Histogram]
    """By phase (ADMISSION_PHASES)."""
    prefill_s: Histogram
    """From admitted to the first token."""
    loop_delay_s: Histogram

    @classmethod
    def create(cls, read: Callable[[], Reading]) -> Self:
        """`read` is called on the scrape's thread."""
        made = _Registry("wavepp_controller", read)
        admission = made.histogram("admission_seconds", "Admission by phase", _LATENCY_S, "phase")
        return cls(
            registry=made.registry,
            admission_s={phase: admission.labels(phase) for phase in ADMISSION_PHASES},
            prefill_s=made.histogram("prefill_seconds", "Admitted to first token", _LATENCY_S),
            loop_delay_s=made.histogram("loop_delay_seconds", "Lateness of the event loop", _LOOP_DELAY_S),
        )

    def observe_admission(self, timings: Timings) -> None:
        """Record one admitted request, phase by phase."""
        for phase, histogram in self.admission_s.items():
            histogram.observe(getattr(timings, f"{phase}_ms") / 1_000)


@dataclass(frozen=True, slots=True)
class StageMetrics:
    registry: CollectorRegistry
    loop_delay_s: Histogram

    @classmethod
    def create(cls, read: Callable[[], Reading]) -> Self:
        """`read` is called on the scrape's thread."""
        made = _Registry("wavepp_stage", read)
        return cls(made.registry, made.histogram("loop_delay_seconds", "Lateness of the event loop", _LOOP_DELAY_S))


@dataclass(frozen=True, slots=True)
class MetricsServer:
    address: str
    """host:port that is really bound."""
    _server: WSGIServer = field(repr=False)
    _thread: threading.Thread = field(repr=False)

    def close(self) -> None:
        """Stop serving and free the port. Blocking, up to half a second."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(limits.CLOSE_S)


def serve_metrics(
    registry: CollectorRegistry, ready: Callable[[], bool | None], listen: str = "127.0.0.1:0"
) -> MetricsServer:
    """Serve `registry` over plain HTTP at /metrics. `listen` is host:port; no host means loopback.

    `ready` is asked on the request's thread: /readyz is 200 while it says True, else 503, /healthz 503 only when it
    says None, for a process that does not answer. Every other path is 404.

    Raises InvalidRequest if the address cannot be bound.
    """
    wanted = parse_address(listen, field="metrics")
    host = wanted.host or "127.0.0.1"
    try:
        server, thread = start_http_server(wanted.port, host, registry)
        server.set_app(_routed(make_wsgi_app(registry), ready))
    except OSError as error:
        message = f"cannot serve metrics on {listen}: {error.strerror}"
        raise InvalidRequest(message, field="metrics", value=listen) from error
    return MetricsServer(str(Address(host, server.server_port)), server, thread)


def asked_on(loop: asyncio.AbstractEventLoop, ask: Callable[[], T]) -> T | None:
    """What `ask` answers on an event loop; None, logged, if that does not take it up in time. For other threads."""

    async def answer() -> T:
        return ask()

    asked = asyncio.run_coroutine_threadsafe(answer(), loop)
    try:
        return asked.result(ASK_S)
    except TimeoutError:
        asked.cancel()
        log.warning("the event loop did not answer a scrape", limit=ASK_S)
        return None


def _routed(metrics: WSGIApplication, ready: Callable[[], bool | None]) -> WSGIApplication:
    def probe(start: StartResponse, good: bool) -> Iterable[bytes]:
        start("200 OK" if good else "503 Service Unavailable", TEXT)
        return [b"ok\n" if good else b"not ready\n"]

    def application(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        match environ["PATH_INFO"]:
            case "/metrics":
                return metrics(environ, start)
            case "/healthz":
                return probe(start, ready() is not None)
            case "/readyz":
                return probe(start, ready() is True)
        start("404 Not Found", TEXT)
        return [b"there are /metrics, /healthz and /readyz\n"]

    return application


class _Registry(Collector):
    """A registry of one process: its histograms, its own process, and `read` at every scrape."""

    def __init__(self, prefix: str, read: Callable[[], Reading]) -> None:
        self.registry = CollectorRegistry()
        self._prefix = prefix
        self._read = read
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def collect(self) -> Iterator[Metric]:
        figures, spans = self._read()
        if figures is not None:
            yield from figures.families(self._prefix)
        lost = {"dropped": spans.dropped, "failed": spans.failed}
        made = _Families(self._prefix)
        yield made.counter("exported_spans", "Trace spans that the collector took", spans.exported)
        yield made.counters("lost_spans", "Trace spans lost: buffer full, or export failed", "cause", lost)

    def histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"{self._prefix}_{name}", text, labels, registry=self.registry, buckets=buckets)


@dataclass(frozen=True, slots=True)
class _Families:
    """Families of one prefix; a counter's samples get their `_total` themselves."""

    prefix: str

    def gauge(self, name: str, text: str, value: float) -> Metric:
        return GaugeMetricFamily(f"{self.prefix}_{name}", text, value)

    def counter(self, name: str, text: str, value: float) -> Metric:
        return CounterMetricFamily(f"{self.prefix}_{name}", text, value)

    def gauges(self, name: str, text: str, label: str, values: Values) -> Metric:
        return _filled(GaugeMetricFamily(f"{self.prefix}_{name}", text, labels=[label]), values)

    def counters(self, name: str, text: str, label: str, values: Values) -> Metric:
        return _filled(CounterMetricFamily(f"{self.prefix}_{name}", text, labels=[label]), values)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Values) -> Metric:
    for label, value in values.items():
        family.add_metric([label], value)
    return family
