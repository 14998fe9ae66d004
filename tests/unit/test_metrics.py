"""Which series exist, what moves them, and where they are served."""

from __future__ import annotations

import urllib.request

import pytest
from prometheus_client import generate_latest

from wavepp_proto.errors import InvalidRequest
from wavepp_proto.runtime.metrics import ControllerMetrics, StageMetrics, serve_metrics
from wavepp_proto.terms import Capacity, StageTimes, Timings


def test_every_phase_is_observed_when_a_request_is_admitted() -> None:
    metrics = ControllerMetrics.create()
    metrics.observe_admission(Timings(queue_ms=1, hash_ms=2, hint_ms=3, announce_ms=4, rounds_ms=5, admission_ms=15))
    sums = {
        phase: metrics.registry.get_sample_value("wavepp_controller_admission_seconds_sum", {"phase": phase})
        for phase in ("queue", "hash", "hint", "announce", "rounds", "capacity_wait", "admission")
    }
    assert sums == {
        "queue": 0.001,
        "hash": 0.002,
        "hint": 0.003,
        "announce": 0.004,
        "rounds": 0.005,
        "capacity_wait": 0.0,
        "admission": 0.015,
    }


def test_time_is_split_when_a_wave_is_observed() -> None:
    metrics = StageMetrics.create()
    metrics.observe_wave(StageTimes(4_000_000, 3_000_000, 2_000_000, 1_000_000, 500_000), tokens=64, done=True)
    split = {
        state: metrics.registry.get_sample_value("wavepp_stage_time_seconds_total", {"state": state})
        for state in ("compute", "activation_wait", "admission_wait", "preparing", "idle")
    }
    assert split == {"compute": 4, "activation_wait": 3, "admission_wait": 2, "preparing": 1, "idle": 0.5}
    assert metrics.registry.get_sample_value("wavepp_stage_waves_total", {"outcome": "done"}) == 1
    assert metrics.registry.get_sample_value("wavepp_stage_computed_tokens_total") == 64


def test_pool_is_stated_when_blocks_are_set() -> None:
    metrics = StageMetrics.create()
    metrics.set_blocks(
        Capacity(1, free_blocks=5, evictable_blocks=3, escrowed_blocks=2), cached=3, held=1, quarantined=0
    )
    value = metrics.registry.get_sample_value
    states = ("free", "cached", "held", "quarantined")
    assert [value("wavepp_stage_blocks", {"state": state}) for state in states] == [5, 3, 1, 0]
    assert value("wavepp_stage_escrowed_blocks") == 2


def test_digest_age_is_dropped_when_the_daemon_is_gone() -> None:
    metrics = ControllerMetrics.create()
    metrics.digest_seen("p0/1.0")
    age = metrics.registry.get_sample_value("wavepp_controller_digest_age_seconds", {"daemon": "p0/1.0"})
    assert age is not None
    assert age >= 0
    metrics.daemon_gone("p0/1.0")
    metrics.daemon_gone("p0/2.0")
    assert b"p0/1.0" not in generate_latest(metrics.registry)


def test_two_daemons_of_one_process_do_not_share_series() -> None:
    first, second = StageMetrics.create(), StageMetrics.create()
    first.evictions.inc(3)
    assert second.registry.get_sample_value("wavepp_stage_evicted_blocks_total") == 0


def test_metrics_are_served_on_loopback_when_asked() -> None:
    metrics = ControllerMetrics.create()
    metrics.rejected.labels("QUEUE_FULL").inc()
    server = serve_metrics(metrics.registry)
    try:
        assert server.address.startswith("127.0.0.1:")
        text = urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            f"http://{server.address}/metrics", timeout=30
        )
        assert b'wavepp_controller_rejected_total{reason="QUEUE_FULL"} 1.0' in text.read()
        with pytest.raises(InvalidRequest, match="cannot serve metrics"):
            serve_metrics(metrics.registry, server.address)
    finally:
        server.close()
