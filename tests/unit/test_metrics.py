"""Which series exist, what moves them, and where they are served."""

from __future__ import annotations

import urllib.error
import urllib.request

import pytest
from prometheus_client import CollectorRegistry

from wavepp_proto.errors import InvalidRequest
from wavepp_proto.runtime.metrics import (
    ControllerFigures,
    ControllerMetrics,
    Reading,
    StageFigures,
    StageMetrics,
    serve_metrics,
)
from wavepp_proto.runtime.tracing import TracerStats
from wavepp_proto.terms import Timings

SPANS = TracerStats(buffered=0, exported=7, dropped=3, failed=2, malformed=0, connected=True)


def silent() -> Reading:
    return None, SPANS


def stage_figures() -> StageFigures:
    return StageFigures(
        serving=True,
        time_s={"compute": 4.0, "idle": 0.5},
        waves={"done": 2, "failed": 1},
        computed_tokens=64,
        void_rows=1,
        votes={"committed": 5},
        blocks={"free": 5, "cached": 3, "held": 1, "quarantined": 0},
        leases=1,
        escrows=1,
        escrowed_blocks=2,
        backed_blocks={"free": 1, "offload": 1, "evict": 0},
        evicted_blocks=9,
        moved_blocks={"offload": 12, "onboard": 4},
        host_blocks={"free": 7, "cached": 1, "held": 0},
        states={"free": 2, "cached": 1, "held": 1, "quarantined": 0},
        escrowed_states=1,
        evicted_states=3,
        abandoned_links=0,
        copied_blocks={"offload": 11, "onboard": 4},
        copy_s={"offload": 0.5, "onboard": 0.25},
        failed_copies=1,
        self_fences=2,
        resumed_streams=6,
        refused=True,
    )


def controller_figures() -> ControllerFigures:
    return ControllerFigures(
        leads=True,
        ready=False,
        ring_waves={"p0": 3},
        queue_requests={"p0": 4},
        queue_tokens={"p0": 400},
        running_requests={"p0": 1},
        parked_requests={"p0": 2},
        digest_age_s={"p0/1.0": 0.25},
        requests={"finished": 6, "CANCELLED": 1},
        rejected={"QUEUE_FULL": 2},
        waves=11,
        computed_tokens=1000,
        cached_tokens=500,
        lost_tokens={"agreement": 64},
        events={"rounds": 8},
    )


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, labels)


def test_every_phase_is_observed_when_a_request_is_admitted() -> None:
    metrics = ControllerMetrics.create(silent)
    metrics.observe_admission(Timings(queue_ms=1, hash_ms=2, hint_ms=3, announce_ms=4, rounds_ms=5, admission_ms=15))
    sums = {
        phase: value(metrics.registry, "wavepp_controller_admission_seconds_sum", phase=phase)
        for phase in ("queue", "hash", "hint", "announce", "rounds", "capacity_wait", "sharing_wait", "admission")
    }
    assert sums == {
        "queue": 0.001,
        "hash": 0.002,
        "hint": 0.003,
        "announce": 0.004,
        "rounds": 0.005,
        "capacity_wait": 0.0,
        "sharing_wait": 0.0,
        "admission": 0.015,
    }


def test_figures_are_read_when_a_stage_is_scraped_and_not_before() -> None:
    asked: list[str] = []

    def read() -> Reading:
        asked.append("read")
        return stage_figures(), SPANS

    registry = StageMetrics.create(read).registry
    assert asked == []
    assert value(registry, "wavepp_stage_blocks", state="cached") == 3
    assert asked == ["read"]
    assert value(registry, "wavepp_stage_time_seconds_total", state="compute") == 4
    assert value(registry, "wavepp_stage_waves_total", outcome="failed") == 1
    assert value(registry, "wavepp_stage_evicted_blocks_total") == 9
    assert value(registry, "wavepp_stage_moved_blocks_total", direction="offload") == 12
    assert value(registry, "wavepp_stage_host_blocks", state="cached") == 1
    assert value(registry, "wavepp_stage_states", state="held") == 1
    assert value(registry, "wavepp_stage_copy_seconds_total", direction="onboard") == 0.25
    assert value(registry, "wavepp_stage_self_fences_total") == 2
    assert value(registry, "wavepp_stage_resumed_streams_total") == 6
    assert value(registry, "wavepp_stage_serving") == 1
    assert value(registry, "wavepp_stage_lost_spans_total", cause="dropped") == 3


def test_series_of_a_controller_carry_their_one_label() -> None:
    registry = ControllerMetrics.create(lambda: (controller_figures(), SPANS)).registry
    assert value(registry, "wavepp_controller_ring_waves", pipeline="p0") == 3
    assert value(registry, "wavepp_controller_queue_tokens", pipeline="p0") == 400
    assert value(registry, "wavepp_controller_parked_requests", pipeline="p0") == 2
    assert value(registry, "wavepp_controller_digest_age_seconds", daemon="p0/1.0") == 0.25
    assert value(registry, "wavepp_controller_requests_total", outcome="CANCELLED") == 1
    assert value(registry, "wavepp_controller_lost_tokens_total", cause="agreement") == 64
    assert value(registry, "wavepp_controller_events_total", event="rounds") == 8
    assert (value(registry, "wavepp_controller_leader"), value(registry, "wavepp_controller_ready")) == (1, 0)


def test_what_was_observed_is_served_when_the_process_cannot_say_more() -> None:
    metrics = ControllerMetrics.create(silent)
    metrics.loop_delay_s.observe(0.003)
    assert value(metrics.registry, "wavepp_controller_loop_delay_seconds_bucket", le="0.002") == 0
    assert value(metrics.registry, "wavepp_controller_loop_delay_seconds_bucket", le="0.005") == 1
    assert value(metrics.registry, "wavepp_controller_waves_total") is None
    assert value(metrics.registry, "wavepp_controller_exported_spans_total") == 7


def test_metrics_are_served_on_loopback_when_asked() -> None:
    metrics = ControllerMetrics.create(lambda: (controller_figures(), SPANS))
    server = serve_metrics(metrics.registry, lambda: True)
    try:
        assert server.address.startswith("127.0.0.1:")
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(f"http://{server.address}/metrics", timeout=30) as text:
            assert b'wavepp_controller_rejected_total{reason="QUEUE_FULL"} 2.0' in text.read()
        with pytest.raises(InvalidRequest, match="cannot serve metrics"):
            serve_metrics(metrics.registry, lambda: True, server.address)
    finally:
        server.close()


@pytest.mark.parametrize(
    ("path", "ready", "status"),
    [
        ("/metrics", False, 200),
        ("/healthz", True, 200),
        ("/healthz", False, 200),
        ("/healthz", None, 503),
        ("/readyz", True, 200),
        ("/readyz", False, 503),
        ("/readyz", None, 503),
        ("/", True, 404),
        ("/metricsx", True, 404),
        ("/favicon.ico", True, 404),
    ],
)
def test_probes_say_what_the_process_says_and_other_paths_are_not_there(
    path: str, ready: bool | None, status: int
) -> None:
    """`ready` None: the process's event loop does not answer."""
    server = serve_metrics(ControllerMetrics.create(silent).registry, lambda: ready)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"http://{server.address}{path}", timeout=30) as answer:
            found = answer.status
    except urllib.error.HTTPError as refused:
        found = refused.code
        refused.close()
    finally:
        server.close()
    assert found == status
