"""What TensorRT-LLM has reported in public, as far as it takes a pipeline: the whole system on the stand-in.

Controller, three stage daemons with the trtllm engine on bands of three, two and one layers, real etcd.
Its last stage is slow and its pool small, so that there is always something in flight and something
that waits. Rows that one stage alone can meet are in unit/test_trtllm_reports.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import grpc.aio
import pytest
import pytest_asyncio

from tests.harness import variant
from tests.harness.eventually import eventually
from tests.harness.processes import BLOCK_TOKENS, QUICK, Processes, random_prompt
from wavepp import PrefillResult, WaveppError
from wavepp.errors import NeverFits
from wavepp_proto.runtime.channels import open_channel
from wavepp_proto.v1 import handoff_pb2, handoff_pb2_grpc

pytestmark = [pytest.mark.processes, pytest.mark.asyncio(loop_scope="module")]
POOL = 96
"""Blocks."""
BANDS = ("0:3", "3:5", "5:6")
SLOW_MS = "250"


@pytest.fixture(scope="module")
def on_the_stand_in() -> Iterator[pytest.MonkeyPatch]:
    """The environment of every process that is started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(variant.SETTING, "trtllm")
        yield patch


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pipeline(
    tmp_path_factory: pytest.TempPathFactory, on_the_stand_in: pytest.MonkeyPatch
) -> AsyncIterator[Processes]:
    on_the_stand_in.setenv("FAKE_TRTLLM_FORWARD_MS_RANK_2", SLOW_MS)
    folder = tmp_path_factory.mktemp("pipeline")
    async with Processes(folder, QUICK, layers=BANDS, pool_blocks=(4 * POOL, POOL, 2 * POOL)) as cluster:
        on_the_stand_in.delenv("FAKE_TRTLLM_FORWARD_MS_RANK_2")
        yield cluster


async def test_answers_are_the_unsplit_model_s_when_bands_are_uneven(pipeline: Processes) -> None:
    """TensorRT-LLM#7117: layers that do not divide by the stages."""
    prompt = random_prompt(1, 300)
    first = await pipeline.run(prompt).succeeds()
    again = await pipeline.run(prompt).succeeds()
    assert (first.cached_tokens, again.cached_tokens) == (0, 288)
    longer = await pipeline.run([*prompt[:200], *random_prompt(2, 60)]).succeeds()
    assert longer.cached_tokens == 192


async def test_pool_is_the_smallest_on_every_stage_when_they_differ(pipeline: Processes) -> None:
    """TensorRT-LLM agrees on the least capacity at start-up; what its manager got is what is planned with."""
    found = await pipeline.pipeline()
    assert found is not None
    assert len({daemon.capacity.free_blocks + daemon.capacity.evictable_blocks for daemon in found.daemons}) == 1


async def test_prompt_is_refused_typed_when_it_never_fits_and_others_go_on(pipeline: Processes) -> None:
    """TensorRT-LLM#9659: capacity is one stage's to refuse, with a reason, and no scheduler hangs on it."""
    outcome = await pipeline.run(random_prompt(3, (POOL + 10) * BLOCK_TOKENS)).outcome()
    assert isinstance(outcome, NeverFits), outcome
    await pipeline.run(random_prompt(4, 100)).succeeds()


async def test_all_are_served_when_more_is_asked_for_than_fits_at_once(pipeline: Processes) -> None:
    """TensorRT-LLM#9659: what finds no room is asked again when there is some; nothing is taken meanwhile."""
    runs = [pipeline.run(random_prompt(10 + seed, 500)) for seed in range(6)]
    for run in runs:
        await run.succeeds()
    await pipeline.nothing_held()


async def test_chunks_of_one_prompt_are_in_flight_together_when_it_is_long(pipeline: Processes) -> None:
    """TensorRT-LLM#9308: chunk k + 1 enters the first stage while k is further on; order is kept."""
    run = pipeline.run(random_prompt(20, 1000))

    async def several() -> bool:
        found = await pipeline.pipeline()
        return found is not None and found.running_requests == 1 and found.waves_in_flight > 1

    await eventually(several, about="two waves of one prompt")
    assert not run.task.done()
    await run.succeeds()


async def test_later_prompts_are_admitted_when_the_last_stage_is_slow(pipeline: Processes) -> None:
    """TensorRT-LLM#10349: the way in does not wait for the way out."""
    runs = await pipeline.running(3, tokens=350, seed=30)
    assert not any(run.task.done() for run in runs)
    for run in runs:
        await run.succeeds()


async def test_holds_end_on_every_stage_when_prompts_are_cancelled_between_chunks(pipeline: Processes) -> None:
    """TensorRT-LLM#10111, #7354, #7455: every stage lets go behind the last wave it was sent, the slow one later."""
    for attempt in range(2):
        runs = await pipeline.running(3, tokens=350, seed=40 + 3 * attempt)
        for run in runs:
            run.task.cancel()
        for run in runs:
            with suppress(asyncio.CancelledError):
                await run.task
        await pipeline.nothing_held()
    await pipeline.run(runs[0].prompt).succeeds()


async def test_export_is_refused_typed_when_there_is_none(pipeline: Processes) -> None:
    """TensorRT-LLM#12540, #12542, #15727, #15655, #11247 and the export half of #7117: a finished cache cannot be
    handed off yet. A decode worker hears so, typed and on every stage; nothing is pinned, and a release is final."""
    result = await pipeline.run(random_prompt(50, 100)).succeeds()
    assert isinstance(result, PrefillResult)
    found = await pipeline.pipeline()
    assert found is not None
    for daemon in found.daemons:
        async with open_channel(daemon.address) as channel:
            stub = handoff_pb2_grpc.KvHandoffStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.ReadBlocks(handoff_pb2.ReadBlocksRequest(), timeout=10).read()
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Acknowledge(handoff_pb2.AcknowledgeRequest(), timeout=10)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    await pipeline.nothing_held()


async def test_join_is_refused_by_name_when_a_stage_s_blocks_have_another_size(
    tmp_path: Path, on_the_stand_in: pytest.MonkeyPatch
) -> None:
    """TensorRT-LLM#13320: effective block sizes are compared before anything is served."""
    on_the_stand_in.setenv("FAKE_TRTLLM_FORCE_TOKENS_PER_BLOCK_RANK_1", "32")
    cluster = Processes(tmp_path, QUICK, stages=2)
    starting = asyncio.create_task(cluster.__aenter__())

    try:
        await eventually(lambda: _said(cluster, "block_tokens = 32"), within=90, about="the join to be refused")
        assert not starting.done()
    finally:
        on_the_stand_in.delenv("FAKE_TRTLLM_FORCE_TOKENS_PER_BLOCK_RANK_1")
        starting.cancel()
        with suppress(asyncio.CancelledError, WaveppError):
            await starting
        await cluster.local.close()


def _said(cluster: Processes, words: str) -> bool:
    child = cluster.local.children.get("stage-1")
    return child is not None and child.log.exists() and words in child.log.read_text(errors="replace")


async def test_answers_are_the_unsplit_model_s_when_stages_have_two_ranks(
    tmp_path: Path, on_the_stand_in: pytest.MonkeyPatch
) -> None:
    """Heads split over two ranks of each of two stages: agreement and waves over four daemons. The third request
    fails on one rank alone. The other rank of its stage waits for it inside a collective, so that all can load
    again only when that has timed out."""
    on_the_stand_in.setenv("FAKE_TRTLLM_TIMEOUT_S", "10")
    on_the_stand_in.setenv("FAKE_TRTLLM_FAIL_FORWARD_RANK_3", "4")
    async with Processes(tmp_path, QUICK, stages=2, ranks=2) as cluster:
        for name in ("FAKE_TRTLLM_FAIL_FORWARD_RANK_3", "FAKE_TRTLLM_TIMEOUT_S"):
            on_the_stand_in.delenv(name)
        prompt = random_prompt(70, 100)
        assert (await cluster.run(prompt).succeeds()).cached_tokens == 0
        assert (await cluster.run(prompt).succeeds()).cached_tokens == 96
        outcome = await cluster.run(random_prompt(71, 100)).outcome()
        assert isinstance(outcome, WaveppError), outcome
        assert outcome.retryable
        await cluster.serving(cluster.first + 1)
        await cluster.run(prompt).succeeds()


async def test_all_stages_load_again_when_a_forward_fails_on_one(
    tmp_path: Path, on_the_stand_in: pytest.MonkeyPatch
) -> None:
    """Neighbours of a failed forward may wait for ever: the whole group is fenced and loads again."""
    # The first forward is the warm-up's, the second and third are waves.
    on_the_stand_in.setenv("FAKE_TRTLLM_FAIL_FORWARD_RANK_1", "3")
    async with Processes(tmp_path, QUICK, stages=2) as cluster:
        on_the_stand_in.delenv("FAKE_TRTLLM_FAIL_FORWARD_RANK_1")
        prompt = random_prompt(60, 100)
        await cluster.run(prompt).succeeds()
        outcome = await cluster.run(random_prompt(61, 100)).outcome()
        assert isinstance(outcome, WaveppError), outcome
        assert outcome.retryable
        await cluster.serving(cluster.first + 1)
        again = await cluster.run(prompt).succeeds()
        assert again.cached_tokens == 0
