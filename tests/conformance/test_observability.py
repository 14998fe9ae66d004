"""What a scrape of a real cluster shows: exact counts of a scripted run (DESIGN.md)."""

from __future__ import annotations

import asyncio
import random
import threading
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.harness.cluster import Cluster
from tests.harness.eventually import eventually
from wavepp import errors
from wavepp_stage.core.work import WaveWork
from wavepp_stage.engine.emulated import EmulatedEngine

pytestmark = pytest.mark.engines("emulated", "engine-thread", why="it looks into daemons, which are processes here")

B = 16
LOOPBACK = "127.0.0.1:0"

Series = dict[tuple[str, str], float]
"""By (name without its prefix, value of the one label or "")."""


def prompt(tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(tokens)]


async def scrape(address: str | None, prefix: str) -> Series:
    assert address is not None
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def get() -> str:
        with opener.open(f"http://{address}/metrics", timeout=30) as answer:
            return str(answer.read(), "utf-8")

    found: Series = {}
    for family in text_string_to_metric_families(await asyncio.to_thread(get)):
        for sample in family.samples:
            if sample.name.startswith(prefix) and "le" not in sample.labels:
                found[sample.name.removeprefix(prefix), next(iter(sample.labels.values()), "")] = sample.value
    return found


async def controller_series(cluster: Cluster) -> Series:
    return await scrape(cluster.controller.observer.metrics_address, "wavepp_controller_")


async def stage_series(cluster: Cluster, stage: int) -> Series:
    return await scrape(cluster.daemons[stage].observer.metrics_address, "wavepp_stage_")


def only(series: Series, *names: str) -> Series:
    return {key: value for key, value in series.items() if key[0] in names}


async def test_counts_are_exact_when_a_scripted_run_is_scraped() -> None:
    """Two prompts of 100 tokens that share 64, one of them twice; then a refusal of each of two kinds."""
    shared = prompt(64, 1)
    first, second = shared + prompt(36, 2), shared + prompt(36, 3)
    async with Cluster(stages=2, metrics=LOOPBACK) as cluster:
        for tokens in (first, second, first):
            await cluster.client.prefill(tokens)
        with pytest.raises(errors.TokenOutOfRange):
            await cluster.client.prefill([1000])
        with pytest.raises(errors.UnknownPipeline):
            await cluster.client.prefill([1], pipeline="nowhere")
        await cluster.check()
        series = await controller_series(cluster)
        computed = 100 + 36 + (100 - 96)
        assert only(series, "requests_total", "rejected_total") == {
            ("requests_total", "finished"): 3,
            ("requests_total", "TOKEN_OUT_OF_RANGE"): 1,
            ("requests_total", "UNKNOWN_PIPELINE"): 1,
            ("rejected_total", "TOKEN_OUT_OF_RANGE"): 1,
            ("rejected_total", "UNKNOWN_PIPELINE"): 1,
        }
        assert series["waves_total", ""] == 3
        assert series["computed_tokens_total", ""] == computed
        assert series["cached_tokens_total", ""] == 300 - computed
        assert series["lost_tokens_total", "agreement"] == 0
        assert series["events_total", "submitted"] == 5
        assert series["events_total", "admitted"] == 3
        gauges = ("ring_waves", "queue_requests", "queue_tokens", "running_requests", "leader", "ready")
        idle = dict.fromkeys([(name, "default") for name in gauges[:4]], 0.0)
        assert only(series, *gauges) == {**idle, ("leader", ""): 1, ("ready", ""): 1}
        phases = {label: count for (name, label), count in series.items() if name == "admission_seconds_count"}
        parts = {"queue", "hash", "hint", "announce", "rounds", "capacity_wait", "sharing_wait"}
        assert set(phases) == {*parts, "admission"}
        assert set(phases.values()) == {3}
        assert series["prefill_seconds_count", ""] == 3
        assert series["admission_seconds_sum", "admission"] >= series["admission_seconds_sum", "rounds"] > 0
        assert {label for name, label in series if name == "digest_age_seconds"} == {"default/0.0", "default/1.0"}

        for stage in range(2):
            series = await stage_series(cluster, stage)
            assert series["waves_total", "done"] == 3
            assert series["waves_total", "failed"] == 0
            assert series["computed_tokens_total", ""] == computed
            assert series["void_rows_total", ""] == 0
            assert series["votes_total", "committed"] == 3
            # 6 full blocks of the first prompt, 2 more of the second; the seventh of each is never full
            assert only(series, "blocks") == {
                ("blocks", "free"): 248, ("blocks", "cached"): 8, ("blocks", "held"): 0, ("blocks", "quarantined"): 0,
            }  # fmt: skip
            idle = dict.fromkeys([(name, "") for name in ("leases", "escrows", "escrowed_blocks")], 0.0)
            assert only(series, "leases", "escrows", "escrowed_blocks") == idle
            assert series["evicted_blocks_total", ""] == 0
            assert series["abandoned_link_threads", ""] == 0
            assert series["serving", ""] == 1
            assert series["time_seconds_total", "compute"] > 0
            states = {label for name, label in series if name == "time_seconds_total"}
            assert states == {"compute", "activation_wait", "admission_wait", "preparing", "idle"}


async def test_evictions_and_lost_tokens_are_counted_when_one_pool_is_small() -> None:
    """Stage 1 holds 12 blocks: the second prompt (10 blocks) takes 8 of the first one's 10 cached."""
    async with Cluster(stages=2, pool_blocks=(100, 12), metrics=LOOPBACK) as cluster:
        for seed in (1, 2):
            await cluster.client.prefill(prompt(10 * B, seed))
        again = await cluster.client.prefill(prompt(10 * B, 1))
        assert (again.best_stage_hit, again.endpoint) == (9 * B, 2 * B)
        assert (await controller_series(cluster))["lost_tokens_total", "agreement"] == 7 * B
        assert (await stage_series(cluster, 0))["evicted_blocks_total", ""] == 0
        assert (await stage_series(cluster, 1))["evicted_blocks_total", ""] == 8 + 8


async def test_holds_are_seen_when_a_wave_computes() -> None:
    entered, leave = threading.Event(), threading.Event()

    def gate(wave: WaveWork) -> None:
        entered.set()
        assert leave.wait(60)

    async with Cluster(stages=2, metrics=LOOPBACK) as cluster:
        engine = cluster.daemons[1].equipment.engine
        assert isinstance(engine, EmulatedEngine)
        engine._gate = gate
        running = asyncio.create_task(cluster.client.prefill(prompt(3 * B, 1)))
        await eventually(entered.is_set)
        stage, controller = await stage_series(cluster, 1), await controller_series(cluster)
        leave.set()
        await running
        assert stage["blocks", "held"] == 3
        assert controller["ring_waves", "default"] == 1
        assert controller["running_requests", "default"] == 1


async def test_metrics_end_with_their_process_and_are_off_by_default() -> None:
    async with Cluster(stages=1) as cluster:
        assert cluster.controller.observer.metrics_address is None
        assert cluster.daemons[0].observer.metrics_address is None
    async with Cluster(stages=1, metrics=LOOPBACK) as cluster:
        addresses = [cluster.controller.observer.metrics_address, cluster.daemons[0].observer.metrics_address]
    for address in addresses:
        with pytest.raises(urllib.error.URLError):
            await scrape(address, "")
