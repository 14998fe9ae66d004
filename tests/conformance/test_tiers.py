"""Host tier and recurrent states end to end over real gRPC: exact answers, and what was moved comes back."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest

from tests.conformance.test_serving import B, oracle, prompt
from tests.harness.cluster import Cluster
from tests.harness.eventually import eventually
from wavepp import Admitted, errors
from wavepp_controller.core.events import StageShape
from wavepp_proto.errors import EngineFault
from wavepp_stage.core.census import Census
from wavepp_stage.core.work import CopyLot

HYBRID = "emulated:layers=8,attention_every=4,vocabulary=1000,window=65536,token_us=5,copy_us=200"
DENSE = "emulated:layers=8,vocabulary=1000,window=65536,token_us=5,copy_us=200"


def censuses(cluster: Cluster) -> list[Census]:
    return [daemon.core.read(lambda machine: machine.census()) for daemon in cluster.daemons]


@pytest.mark.parametrize("model", [DENSE, HYBRID], ids=["dense", "hybrid"])
async def test_prefixes_come_back_from_the_host_when_the_device_is_too_small_for_them(model: str) -> None:
    """Ten conversations of ten blocks each; thirty blocks on the device, and the host holds the rest."""
    conversations = [prompt(10 * B + 1, seed) for seed in range(10)]
    async with Cluster(
        stages=2, model=model, pool_blocks=(30,), host_pool_blocks=120, state_slots=40, floor_blocks=0
    ) as cluster:
        for tokens in conversations:
            assert (await cluster.client.prefill(tokens)).first_token == oracle(tokens)
        assert all(census.offloaded > 0 for census in censuses(cluster))
        for tokens in conversations:
            again = await cluster.client.prefill(tokens)
            assert (again.first_token, again.cached_tokens) == (oracle(tokens), 10 * B)
        assert all(census.onboarded > 0 for census in censuses(cluster))
        assert all(sum(daemon.copier.counts.blocks.values()) > 0 for daemon in cluster.daemons)
        assert not any(daemon.copier.counts.failed_lots for daemon in cluster.daemons)


async def test_digests_say_nothing_when_blocks_only_move_between_tiers() -> None:
    conversations = [prompt(10 * B + 1, seed) for seed in range(6)]
    async with Cluster(stages=2, model=DENSE, pool_blocks=(30,), host_pool_blocks=120, floor_blocks=0) as cluster:
        for tokens in conversations:
            await cluster.client.prefill(tokens)
        feeds = [daemon.core.read(lambda machine: machine._feed.changes) for daemon in cluster.daemons]
        for tokens in conversations:
            assert (await cluster.client.prefill(tokens)).cached_tokens == 10 * B
        # every prefix moved twice, and was reusable all the time
        assert [daemon.core.read(lambda machine: machine._feed.changes) for daemon in cluster.daemons] == feeds


@pytest.mark.parametrize("seed", range(3))
async def test_answers_stay_exact_when_tiers_and_states_are_short_and_requests_are_cancelled(seed: int) -> None:
    rng = random.Random(seed)
    shared = [prompt(8 * B, 50 + index) for index in range(4)]
    async with Cluster(
        stages=3, model=HYBRID, pool_blocks=(40, 33, 50), host_pool_blocks=40, state_slots=9, snapshot_tokens=4 * B
    ) as cluster:

        async def one(index: int) -> None:
            tokens = rng.choice(shared)[: rng.randrange(1, 8 * B)] + prompt(rng.randrange(1, 120), 1000 * seed + index)
            task = asyncio.create_task(cluster.client.prefill(tokens, request_id=f"r{index}", priority=index % 3))
            if rng.random() < 0.25:
                for _ in range(rng.randrange(60)):
                    await asyncio.sleep(0)
                task.cancel()
            outcome = (await asyncio.gather(task, return_exceptions=True))[0]
            if not isinstance(outcome, asyncio.CancelledError):
                assert not isinstance(outcome, BaseException), outcome
                assert outcome.first_token == oracle(tokens)

        await asyncio.gather(*(one(index) for index in range(40)))
        assert cluster.formation == 1


async def test_stage_without_attention_serves_beside_one_without_recurrence() -> None:
    """Layers 0-2 are recurrent, layer 3 attends: each stage has another cache group, the endpoint is one number."""
    tokens = prompt(9 * B + 3, 3)
    async with Cluster(
        stages=2, model="emulated:layers=4,attention_every=4,vocabulary=1000,window=65536", layers=[(0, 3), (3, 4)]
    ) as cluster:
        status = cluster.controller.machine.status().pipelines[0]
        assert [[group.value for group in daemon.groups] for daemon in status.daemons] == [["recurrent"], ["attention"]]
        assert [daemon.state_slots for daemon in status.daemons] == [64, 0]
        assert (await cluster.client.prefill(tokens)).first_token == oracle(tokens)
        again = await cluster.client.prefill(tokens)
        assert (again.first_token, again.cached_tokens) == (oracle(tokens), 9 * B)


async def test_stage_that_began_without_recurrent_layers_keeps_states_when_a_reform_brings_it_some() -> None:
    bands = ((0, 2), (2, 4), (4, 8))
    async with Cluster(stages=3, model=HYBRID, layers=((0, 3), (3, 4), (4, 8)), state_slots=4) as cluster:
        tokens = prompt(10 * B + 1, 1)
        assert (await cluster.client.prefill(tokens)).first_token == oracle(tokens)
        assert [daemon.core.read(lambda machine: machine.inventory()).state_slots for daemon in cluster.daemons] == [
            4, 0, 4,
        ]  # fmt: skip
        await cluster.reform(tuple(StageShape(stage, first, last) for stage, (first, last) in enumerate(bands)))
        await cluster.serving(formation=2)
        for cached in (0, 10 * B):
            again = await cluster.client.prefill(tokens)
            assert (again.first_token, again.cached_tokens) == (oracle(tokens), cached)
        assert [daemon.core.read(lambda machine: machine.inventory()).state_slots for daemon in cluster.daemons] == [
            4, 4, 4,
        ]  # fmt: skip


class CopyGate:
    """Holds the copies of one daemon back until it is opened."""

    def __init__(self, cluster: Cluster, stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.leave = threading.Event(), threading.Event()
        engine = cluster.daemons[stage].equipment.engine
        copy = engine.copy

        def gated(lot: CopyLot) -> None:
            self.entered.set()
            assert self.leave.wait(60)
            copy(lot)

        monkeypatch.setattr(engine, "copy", gated)


@pytest.mark.engines("emulated", "engine-thread", why="TensorRT-LLM copies blocks by itself")
async def test_no_stage_runs_ahead_when_the_prefix_is_still_on_its_way_back_on_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its copies are agreed upon, and waited for before the wave is prepared; the wait is no idle time."""
    first, *others = (prompt(10 * B + 1, seed) for seed in range(5))
    async with Cluster(stages=2, model=DENSE, pool_blocks=(100, 30), host_pool_blocks=120, floor_blocks=0) as cluster:
        for tokens in (first, *others):
            await cluster.client.prefill(tokens)
        gate = CopyGate(cluster, 1, monkeypatch)
        async with cluster.client.stream(first) as stream:
            async for event in stream:
                if isinstance(event, Admitted):
                    # admission does not wait for copies, and the whole prefix counts
                    assert event.endpoint == 10 * B
                    await eventually(gate.entered.is_set)
                    (live,) = cluster.controller.machine.status().requests
                    assert (live.state, live.computed_tokens) == ("running", 10 * B)
                    gate.leave.set()
            assert (await stream.result()).first_token == oracle(first)


@pytest.mark.engines("emulated", "engine-thread", why="TensorRT-LLM copies blocks by itself")
async def test_blocks_stay_in_quarantine_and_no_formation_begins_until_a_copy_under_way_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    conversations = [prompt(10 * B + 1, seed) for seed in range(3)]
    async with Cluster(stages=1, model=DENSE, pool_blocks=(24,), host_pool_blocks=60, floor_blocks=0) as cluster:
        for tokens in conversations[:2]:
            await cluster.client.prefill(tokens)
        core, gate = cluster.daemons[0].core, CopyGate(cluster, 0, monkeypatch)
        running = asyncio.create_task(cluster.client.prefill(conversations[2]))
        await eventually(gate.entered.is_set)
        await cluster.reform(())
        with pytest.raises(errors.FormationEnded):
            await running
        await eventually(lambda: cluster.daemons[0].control.plan is None)
        assert core.read(lambda machine: machine.census()).quarantined > 0
        assert cluster.formation == 0
        gate.leave.set()
        await cluster.serving(formation=2)
        assert core.read(lambda machine: machine.census()).quarantined == 0
        for tokens in conversations:
            assert (await cluster.client.prefill(tokens)).first_token == oracle(tokens)


@pytest.mark.engines("emulated", "engine-thread", why="TensorRT-LLM copies blocks by itself")
async def test_request_fails_alone_when_its_prefix_cannot_be_brought_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed copy voids the rows that need it; what it should have moved is dropped, and computed again."""
    first, *others = (prompt(10 * B + 1, seed) for seed in range(5))
    async with Cluster(stages=2, model=DENSE, pool_blocks=(100, 30), host_pool_blocks=120, floor_blocks=0) as cluster:
        for tokens in (first, *others):
            await cluster.client.prefill(tokens)
        engine = cluster.daemons[1].equipment.engine
        with monkeypatch.context() as broken:

            def fails(lot: CopyLot) -> None:
                raise EngineFault("the copy engine is gone", lot=lot.number)

            broken.setattr(engine, "copy", fails)
            with pytest.raises(errors.RowVoided):
                await cluster.client.prefill(first)
        assert cluster.daemons[1].copier.counts.failed_lots >= 1
        assert (await cluster.client.prefill(first)).first_token == oracle(first)
        assert cluster.formation == 1
