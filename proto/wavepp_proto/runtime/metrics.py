"""Prometheus instruments of the controller and of a stage daemon, and the endpoint that serves them.

Owns names, labels, units (seconds, blocks, tokens) and buckets. Does not own the numbers: runtimes
call the instruments. Each process makes one set on a registry of its own, so that several daemons in
one test process do not clash. Children with fixed labels are looked up once: an observation then
costs about a microsecond. Nothing listens unless `serve_metrics` is called.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Self
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from wavepp_proto.errors import InvalidRequest
from wavepp_proto.runtime.channels import Address, parse_address
from wavepp_proto.terms import Capacity, StageTimes, Timings

ADMISSION_PHASES: Final = ("queue", "hash", "hint", "announce", "rounds", "capacity_wait", "admission")
"""Field names of terms.Timings without `_ms`; "admission" is all of them."""
STAGE_STATES: Final = ("compute", "activation_wait", "admission_wait", "preparing", "idle")
"""Field names of terms.StageTimes without `_us`."""
BLOCK_STATES: Final = ("free", "cached", "held", "quarantined")
"""Their sum is the pool, always (invariant I2)."""

_LATENCY_S: Final = (5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1, 2.5, 10, 60)
_LOOP_DELAY_S: Final = (1e-4, 2.5e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 1)


@dataclass(frozen=True, slots=True)
class ControllerMetrics:
    registry: CollectorRegistry
    admission_s: Mapping[str, Histogram]
    """By phase (ADMISSION_PHASES)."""
    prefill_s: Histogram
    """From admitted to the first token."""
    ring_occupancy: Gauge
    """Label pipeline: waves in flight, 0..R."""
    queue_requests: Gauge
    queue_tokens: Gauge
    rejected: Counter
    """Label reason (errors.py): refused before admission."""
    requests: Counter
    """Label outcome: finished, or the reason of the error. Every request counts once."""
    waves: Counter
    """Label pipeline."""
    computed_tokens: Counter
    cached_tokens: Counter
    """Prompt tokens that were reused instead of computed."""
    tokens_lost: Counter
    """Label cause: agreement or snapshots; tokens some stage held and the endpoint could not use."""
    digest_age: Gauge
    """Label daemon: seconds since its last digest, computed when read."""
    loop_delay_s: Histogram

    @classmethod
    def create(cls, registry: CollectorRegistry | None = None) -> Self:
        made = _Maker("wavepp_controller", registry or CollectorRegistry())
        admission = made.histogram("admission_seconds", "Admission by phase", _LATENCY_S, "phase")
        return cls(
            registry=made.registry,
            admission_s={phase: admission.labels(phase) for phase in ADMISSION_PHASES},
            prefill_s=made.histogram("prefill_seconds", "Admitted to first token", _LATENCY_S),
            ring_occupancy=made.gauge("ring_waves", "Waves in flight", "pipeline"),
            queue_requests=made.gauge("queue_requests", "Requests queued for admission"),
            queue_tokens=made.gauge("queue_tokens", "Prompt tokens queued for admission"),
            rejected=made.counter("rejected", "Requests refused before admission", "reason"),
            requests=made.counter("requests", "Requests ended", "outcome"),
            waves=made.counter("waves", "Waves planned", "pipeline"),
            computed_tokens=made.counter("computed_tokens", "Prompt tokens computed"),
            cached_tokens=made.counter("cached_tokens", "Prompt tokens reused"),
            tokens_lost=made.counter("lost_tokens", "Prompt tokens held by a stage, yet not reused", "cause"),
            digest_age=made.gauge("digest_age_seconds", "Since the last digest", "daemon"),
            loop_delay_s=made.histogram("loop_delay_seconds", "Lateness of the event loop", _LOOP_DELAY_S),
        )

    def observe_admission(self, timings: Timings) -> None:
        """Record one admitted request, phase by phase."""
        for phase, histogram in self.admission_s.items():
            histogram.observe(getattr(timings, f"{phase}_ms") / 1_000)

    def digest_seen(self, daemon: str) -> None:
        """Restart the age of a daemon's digest (`daemon` as DaemonKey prints)."""
        seen_s = time.monotonic()
        self.digest_age.labels(daemon).set_function(lambda: time.monotonic() - seen_s)

    def daemon_gone(self, daemon: str) -> None:
        """Drop a lost daemon's series: an age that only grows says nothing."""
        with suppress(KeyError):  # older prometheus_client: never seen
            self.digest_age.remove(daemon)


@dataclass(frozen=True, slots=True)
class StageMetrics:
    registry: CollectorRegistry
    time_s: Mapping[str, Counter]
    """Where the executor's time went, by state (STAGE_STATES)."""
    waves: Counter
    """Label outcome: done or failed."""
    tokens: Counter
    """Tokens computed."""
    void_rows: Counter
    evictions: Counter
    """Blocks dropped from the device to make room."""
    offloads: Counter
    """Blocks moved to the host tier to make room."""
    leases: Gauge
    escrows: Gauge
    """Requests that hold one."""
    escrowed_blocks: Gauge
    blocks: Mapping[str, Gauge]
    """By state (BLOCK_STATES)."""
    votes: Counter
    """Label outcome (terms.VoteOutcome value)."""
    loop_delay_s: Histogram
    abandoned_links: Gauge
    """Link threads of ended formations that have not come back yet."""

    @classmethod
    def create(cls, registry: CollectorRegistry | None = None) -> Self:
        made = _Maker("wavepp_stage", registry or CollectorRegistry())
        times = made.counter("time_seconds", "Time of the executor by state", "state")
        blocks = made.gauge("blocks", "Device blocks by state", "state")
        return cls(
            registry=made.registry,
            time_s={state: times.labels(state) for state in STAGE_STATES},
            waves=made.counter("waves", "Waves executed", "outcome"),
            tokens=made.counter("computed_tokens", "Tokens computed"),
            void_rows=made.counter("void_rows", "Rows that flowed without being computed"),
            evictions=made.counter("evicted_blocks", "Blocks dropped from the device"),
            offloads=made.counter("offloaded_blocks", "Blocks moved to the host tier"),
            leases=made.gauge("leases", "Requests that hold a lease"),
            escrows=made.gauge("escrows", "Requests that hold an escrow"),
            escrowed_blocks=made.gauge("escrowed_blocks", "Blocks promised and not taken"),
            blocks={state: blocks.labels(state) for state in BLOCK_STATES},
            votes=made.counter("votes", "Entries of rounds answered", "outcome"),
            loop_delay_s=made.histogram("loop_delay_seconds", "Lateness of the event loop", _LOOP_DELAY_S),
            abandoned_links=made.gauge("abandoned_link_threads", "Link threads that outlive their formation"),
        )

    def observe_wave(self, times: StageTimes, tokens: int, *, done: bool) -> None:
        """Record one executed wave and the time since the previous one."""
        for state, counter in self.time_s.items():
            counter.inc(getattr(times, f"{state}_us") / 1_000_000)
        self.waves.labels("done" if done else "failed").inc()
        self.tokens.inc(tokens)

    def set_blocks(self, capacity: Capacity, cached: int, held: int, quarantined: int) -> None:
        """State the pool: counts of device blocks."""
        counts = {"free": capacity.free_blocks, "cached": cached, "held": held, "quarantined": quarantined}
        for state, gauge in self.blocks.items():
            gauge.set(counts[state])
        self.escrowed_blocks.set(capacity.escrowed_blocks)


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
        self._thread.join()


def serve_metrics(registry: CollectorRegistry, listen: str = "127.0.0.1:0") -> MetricsServer:
    """Serve `registry` over plain HTTP at /metrics. `listen` is host:port; no host means loopback.

    Raises InvalidRequest if the address cannot be bound.
    """
    wanted = parse_address(listen, field="metrics_listen")
    host = wanted.host or "127.0.0.1"
    try:
        server, thread = start_http_server(wanted.port, host, registry)
    except OSError as error:
        message = f"cannot serve metrics on {listen}: {error.strerror}"
        raise InvalidRequest(message, field="metrics_listen", value=listen) from error
    return MetricsServer(str(Address(host, server.server_port)), server, thread)


@dataclass(frozen=True, slots=True)
class _Maker:
    """Makes instruments of one prefix on one registry; a counter's name gets its `_total` itself."""

    prefix: str
    registry: CollectorRegistry

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"{self.prefix}_{name}", text, labels, registry=self.registry)

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"{self.prefix}_{name}", text, labels, registry=self.registry)

    def histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"{self.prefix}_{name}", text, labels, registry=self.registry, buckets=buckets)
