"""Stages whose engines load together: when all load again, when none does, and how a load without a peer ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.conformance.test_serving import B, oracle, prompt
from tests.harness.cluster import Cluster
from tests.harness.eventually import eventually
from tests.harness.load_together import TogetherEngine, install
from wavepp import errors
from wavepp_proto.errors import EngineFault
from wavepp_proto.terms import LinkKind
from wavepp_stage.engine.base import EngineFacts, EnginePlan


def together(**config: Any) -> Cluster:
    return Cluster(stages=3, link=LinkKind.GRPC, **config)


def loads(engines: dict[int, TogetherEngine]) -> list[int]:
    """Number of each load, which is the same on every stage."""
    (seen,) = {tuple(group.load for group in engine.loads) for engine in engines.values()}
    return list(seen)


async def test_stages_load_once_they_have_joined_and_know_each_others_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = install(monkeypatch)
    async with together(layers=((0, 1), (1, 5), (5, 8))) as cluster:
        tokens = prompt(50)
        assert (await cluster.client.prefill(tokens)).first_token == oracle(tokens)
        assert {engine.loads[0].bands for engine in engines.values()} == {((0, 1), (1, 5), (5, 8))}
        (load,) = loads(engines)
        await eventually(lambda: {daemon.record.engine_load for daemon in cluster.daemons} == {load})


async def test_engines_and_cache_stay_when_the_same_peers_form_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = install(monkeypatch)
    async with together() as cluster:
        tokens = prompt(3 * B + 1)
        await cluster.client.prefill(tokens)
        await cluster.reform(())
        await cluster.serving(2)
        assert (await cluster.client.prefill(tokens)).cached_tokens == 3 * B
        assert len(loads(engines)) == 1


async def test_engines_and_cache_stay_when_a_daemon_fences_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = install(monkeypatch)
    async with together() as cluster:
        tokens = prompt(3 * B + 1)
        await cluster.client.prefill(tokens)
        before = cluster.daemons[1].incarnation
        cluster.daemons[1].core.fence_if_silent(time.monotonic() + 3600)
        await eventually(lambda: cluster.daemons[1].incarnation != before)
        await cluster.serving(2)
        assert (await cluster.client.prefill(tokens)).cached_tokens == 3 * B
        assert len(loads(engines)) == 1


async def test_all_load_again_and_reuse_nothing_when_a_wave_failed_on_one(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = install(monkeypatch)
    async with together() as cluster:
        tokens = prompt(3 * B + 1)
        await cluster.client.prefill(tokens)
        before = [daemon.incarnation for daemon in cluster.daemons]
        engines[1].fails.add("wave")
        with pytest.raises(errors.WaveppError) as failed:
            await cluster.client.prefill(prompt(20, seed=1))
        assert failed.value.retryable
        await cluster.serving(2)
        await eventually(lambda: len(engines[0].loads) == 2)
        again = await cluster.client.prefill(tokens)
        assert (again.first_token, again.cached_tokens) == (oracle(tokens), 0)
        assert len(set(loads(engines))) == 2
        same = [daemon.incarnation == was for daemon, was in zip(cluster.daemons, before, strict=True)]
        assert same == [True, False, True]


async def fail(cluster: Cluster, engines: dict[int, TogetherEngine], stage: int, what: str) -> None:
    """Break a wave on stage 0, so that all load again, and then the load of `stage`."""
    engines[stage].fails.add(what)
    engines[0].fails.add("wave")
    with pytest.raises(errors.WaveppError):
        await cluster.client.prefill(prompt(20))
    await eventually(lambda: not engines[stage].fails)


async def still_exact(cluster: Cluster, formation: int) -> None:
    await cluster.serving(formation)
    tokens = prompt(30, seed=2)
    assert (await cluster.client.prefill(tokens)).first_token == oracle(tokens)


async def test_waiting_peers_are_free_at_once_when_one_fails_before_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = install(monkeypatch)
    async with together() as cluster:
        before = [daemon.incarnation for daemon in cluster.daemons]
        await fail(cluster, engines, 2, "early")
        await still_exact(cluster, 3)
        after = [daemon.incarnation for daemon in cluster.daemons]
        # Stage 0's wave failed. A load that nobody ended costs nobody its name.
        assert [one == other for one, other in zip(before, after, strict=True)] == [False, True, True]


async def test_all_load_again_when_one_fails_after_all_came(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = install(monkeypatch)
    async with together() as cluster:
        await fail(cluster, engines, 2, "late")
        await still_exact(cluster, 3)
        assert len({engine.loads[-1].load for engine in engines.values()}) == 1
        assert len({engine.loads[-1].name for engine in engines.values()}) == 1


async def test_load_ends_with_who_is_absent_when_a_peer_does_not_come_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    engines = install(monkeypatch)
    async with together(join_deadline_ms=1_000) as cluster:
        held, free = threading.Event(), threading.Event()

        def hang(plan: EnginePlan, progress: Callable[[int, int], None]) -> EngineFacts:
            held.set()
            assert free.wait(60)
            raise EngineFault("it was held up")

        with monkeypatch.context() as patch:
            patch.setattr(engines[2], "load", hang)
            engines[0].fails.add("wave")
            with pytest.raises(errors.WaveppError):
                await cluster.client.prefill(prompt(20))
            await eventually(held.is_set)

            def told() -> bool:
                fault = cluster.controller.machine.status().pipelines[0].last_fault
                return fault is not None and "place 2 did not come" in fault.message

            await eventually(told)
            free.set()
        await still_exact(cluster, 2)
