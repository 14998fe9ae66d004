"""Connections between controller and stages that break, stall and come back, over real gRPC.

A formation outlives its streams: within the silence that either side allows, nothing is lost and nothing
is done twice. Beyond it both sides end the formation by themselves, and the daemon is somebody new.
"""

from __future__ import annotations

import asyncio
import random
import time

import numpy as np
import pytest

from tests.conformance.test_serving import B, oracle, prompt
from tests.harness.cluster import Cluster
from tests.harness.eventually import eventually
from wavepp import PrefillResult, errors
from wavepp_controller.core.events import DigestArrived, Event
from wavepp_proto import convert
from wavepp_proto.runtime.channels import open_channel
from wavepp_proto.terms import Attempt, HoldKey, PipelineId, RequestId
from wavepp_proto.v1 import control_pb2_grpc
from wavepp_stage.core.block_hashes import BlockHashes

SLOW = "emulated:layers=8,vocabulary=1000,window=65536,token_us=100"
REQUESTS = 30


def counters(cluster: Cluster, name: str) -> int:
    return cluster.controller.machine.status().counters.get(name, 0)


def heartbeat_age_ms(cluster: Cluster) -> int:
    """How long the controller has not heard stage 0."""
    (pipeline,) = cluster.controller.machine.status().pipelines
    return next((d.heartbeat_age_ms or 0 for d in pipeline.daemons if d.key.stage == 0), 0)


async def answered(cluster: Cluster, tokens: list[int]) -> PrefillResult:
    result = await cluster.client.prefill(tokens)
    assert result.first_token == oracle(tokens)
    return result


@pytest.mark.parametrize("seed", range(3))
async def test_every_request_is_answered_right_when_the_connection_is_cut_in_mid_traffic(seed: int) -> None:
    """Rounds, waves, reports and announcements are cut wherever they are; each is said again, none is done twice."""
    shared = prompt(4 * B, 1)
    prompts = [
        shared[: 7 * index % 64] + prompt(20 + 31 * index % 300, 100 * seed + index) for index in range(REQUESTS)
    ]
    async with Cluster(stages=2, model=SLOW, proxied=True) as cluster:
        incarnations = [daemon.incarnation for daemon in cluster.daemons]
        done = 0
        async for outcome in cluster.client.prefill_many(prompts, concurrency=8):
            assert outcome.result is not None, outcome
            assert outcome.result.first_token == oracle(prompts[outcome.index])
            done += 1
            if done % 5 == seed:
                cluster.proxy.cut()
        assert done == REQUESTS
        assert cluster.formation == 1
        assert counters(cluster, "streams_reopened") >= 1
        assert [daemon.incarnation for daemon in cluster.daemons] == incarnations


async def test_requests_go_on_when_a_connection_is_away_for_less_than_the_silence() -> None:
    async with Cluster(stages=2, model=SLOW, proxied=True) as cluster:
        running = [asyncio.create_task(answered(cluster, prompt(600, seed))) for seed in range(4)]
        await eventually(lambda: counters(cluster, "waves") >= 2)
        cluster.proxy.go_down()
        await eventually(lambda: cluster.proxy.accepted >= 3, about="the controller to try again")
        cluster.proxy.heal()
        await asyncio.gather(*running)
        assert cluster.formation == 1


async def test_requests_go_on_when_a_connection_stalls_for_less_than_the_silence() -> None:
    async with Cluster(stages=2, model=SLOW, proxied=True) as cluster:
        running = [asyncio.create_task(answered(cluster, prompt(600, seed))) for seed in range(4)]
        await eventually(lambda: counters(cluster, "waves") >= 2)
        cluster.proxy.hold()
        await eventually(lambda: heartbeat_age_ms(cluster) > 700, about="heartbeats to be missed")
        cluster.proxy.heal()
        await asyncio.gather(*running)
        assert cluster.formation == 1


@pytest.mark.engines("emulated", "engine-thread", why="it looks into a daemon, which is a process here")
@pytest.mark.parametrize("how", ["reset", "stalled"])
async def test_both_sides_end_the_formation_when_a_connection_is_away_for_too_long(how: str) -> None:
    """What a stalled connection delivers afterwards was meant for an incarnation that is no more."""
    async with Cluster(stages=2, model=SLOW, proxied=True, silence_ms=1250) as cluster:
        known = prompt(6 * B + 1, 77)
        await answered(cluster, known)
        daemon, before = cluster.daemons[0], cluster.daemons[0].incarnation
        running = [asyncio.create_task(cluster.client.prefill(prompt(900, seed))) for seed in range(4)]
        # whoever is not admitted by then waits for the next formation instead of failing with this one
        await eventually(lambda: counters(cluster, "admitted") >= 5, about="all four to be admitted")
        if how == "reset":
            cluster.proxy.go_down()
        else:
            cluster.proxy.hold()
        outcomes = await asyncio.gather(*running, return_exceptions=True)
        lost = [outcome for outcome in outcomes if not isinstance(outcome, PrefillResult)]  # the first may have ended
        assert len(lost) >= 1
        assert all(isinstance(outcome, errors.StageLost | errors.FormationEnded) for outcome in lost), lost
        await eventually(lambda: daemon.incarnation != before, about="the daemon to fence itself")
        cluster.proxy.heal()
        await cluster.serving(formation=2)
        assert (await answered(cluster, known)).cached_tokens == 6 * B  # what was published stays
        await answered(cluster, prompt(900, 0))


@pytest.mark.engines("emulated", "engine-thread", why="it looks into a daemon, which is a process here")
async def test_daemon_is_somebody_new_when_the_end_of_its_formation_comes_after_the_silence() -> None:
    """A thawed process finds it in its sockets, perhaps before its own timer fires: its controller has given up on
    this incarnation, and takes only another one at once."""
    async with Cluster(stages=2, proxied=True, silence_ms=1250) as cluster:
        daemon, before, plan = cluster.daemons[0], cluster.daemons[0].incarnation, cluster.daemons[0].control.plan
        assert plan is not None
        assert daemon.execution._timer is not None
        daemon.execution._timer.cancel()
        cluster.proxy.hold()

        def lapsed() -> bool:
            deadline = daemon.core.read(lambda machine: machine.fence_deadline())
            return deadline is not None and time.monotonic() > deadline

        await eventually(lapsed)
        async with open_channel(cluster.proxy.target) as channel:
            cause = errors.StageLost("it was silent").info()
            await control_pb2_grpc.StageControlStub(channel).EndFormation(
                convert.end_formation_to_pb(plan.fence, cause), timeout=30
            )
        await eventually(lambda: daemon.incarnation != before)
        cluster.proxy.heal()
        await cluster.serving(formation=2)
        await answered(cluster, prompt(40, 1))


@pytest.mark.engines("emulated", "engine-thread", why="it looks into a daemon, which is a process here")
async def test_stages_let_go_at_once_when_the_controller_closes_in_order() -> None:
    async with Cluster(stages=2) as cluster:
        incarnations = [daemon.incarnation for daemon in cluster.daemons]
        await cluster.controller.close()
        await eventually(lambda: all(daemon.control.plan is None for daemon in cluster.daemons))
        # told, not left to find out: nobody had to fence itself
        assert [daemon.incarnation for daemon in cluster.daemons] == incarnations


@pytest.mark.engines("emulated", why="it puts a hold into a daemon from the test's thread")
async def test_hold_is_released_and_counted_when_nobody_owns_it() -> None:
    async with Cluster(stages=2, inventory_ms=100) as cluster:
        tokens = prompt(3 * B + 1, 5)
        await answered(cluster, tokens)
        hashes = BlockHashes.unpack(np.random.default_rng(1).bytes(32 * 3))
        orphan, core = HoldKey(RequestId("nobody"), Attempt(1)), cluster.daemons[1].core

        def plant() -> bool:
            cache = core.read(lambda machine: machine._cache)
            assert cache is not None
            return not core.read(lambda machine: cache.lease(orphan, 3 * B + 1, hashes, 0).shortfall)

        assert plant()
        assert core.read(lambda machine: machine.inventory()).holds
        await eventually(lambda: not core.read(lambda machine: machine.inventory()).holds)
        assert counters(cluster, "orphan_holds") == 1
        assert cluster.formation == 1
        await answered(cluster, tokens)


async def test_all_stages_execute_the_same_rows_when_half_of_a_burst_is_cancelled_over_a_slow_connection() -> None:
    """Field bug 1: stages that hear of a cancel at different times must not decide by themselves what to run."""
    rng = random.Random(1)
    async with Cluster(stages=4, model=SLOW, proxied=True) as cluster:
        cluster.proxy.delay(0.02)

        async def one(index: int) -> None:
            tokens = prompt(rng.randrange(1, 200), index)
            task = asyncio.create_task(cluster.client.prefill(tokens))
            if index % 2:
                await asyncio.wait({task}, timeout=rng.uniform(0.0, 0.1))
                task.cancel()
            outcome = (await asyncio.gather(task, return_exceptions=True))[0]
            if isinstance(outcome, PrefillResult):
                assert outcome.first_token == oracle(tokens)
            else:
                assert index % 2
                assert isinstance(outcome, asyncio.CancelledError)

        await asyncio.gather(*(one(index) for index in range(64)))
        cluster.proxy.heal()
        await cluster.check()  # one running hash over all stages, and nothing held
        assert cluster.formation == 1


async def test_answers_stay_right_and_reuse_returns_when_one_digest_is_frozen() -> None:
    """Field bug 49: a hint is only a hint. Its age is shown, the lease decides, one snapshot repairs it."""
    async with Cluster(stages=2) as cluster:
        shell, frozen = cluster.controller.shell, True
        post = shell.post

        def freezing(event: Event) -> None:
            if not (frozen and isinstance(event, DigestArrived) and event.key.stage == 1):
                post(event)

        for link in shell.links(PipelineId("default")).values():
            link._post = freezing
        prompts = [prompt(5 * B + 1, seed) for seed in range(4)]
        for tokens in prompts:
            await answered(cluster, tokens)
        for tokens in prompts:
            await answered(cluster, tokens)

        def older() -> bool:
            (pipeline,) = cluster.controller.machine.status().pipelines
            fresh, old = (daemon.digest_age_ms or 0 for daemon in pipeline.daemons)
            return old > fresh

        await eventually(older, about="the frozen digest to be seen growing old")
        frozen = False
        for seed in range(2):  # something to tell: the gap is seen, and one snapshot asked for
            await answered(cluster, prompt(5 * B + 1, 100 + seed))
        await eventually(lambda: counters(cluster, "digest_resyncs") >= 1)
        await eventually(
            lambda: all(d.digest_in_sync for d in cluster.controller.machine.status().pipelines[0].daemons)
        )
        for tokens in prompts:
            assert (await answered(cluster, tokens)).cached_tokens == 5 * B
