"""What the logs of a controller tell: formations, members, leadership, failures; never a prompt."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import random
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest

from tests.harness.cluster import EMULATED, Cluster
from tests.harness.eventually import eventually
from tests.harness.variant import expected_first_token
from wavepp import errors
from wavepp_proto import convert
from wavepp_proto.runtime import logs
from wavepp_proto.runtime.channels import open_channel
from wavepp_proto.terms import Epoch, Fence, Formation, Incarnation
from wavepp_proto.v1 import control_pb2_grpc
from wavepp_stage.core.work import WaveWork
from wavepp_stage.engine.emulated import EmulatedEngine
from wavepp_stage.runtime.daemon import StageDaemon
from wavepp_stage.runtime.settings import StageSettings

pytestmark = pytest.mark.engines(
    "emulated", "engine-thread", why="it blocks a stage from inside, which is a process here"
)


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """Where the logs of this test go; everything global is put back."""
    root = logging.getLogger()
    kept = root.handlers[:], root.level, sys.excepthook, threading.excepthook
    captured = io.StringIO()
    logs.configure("info", stream=captured)
    yield captured
    root.handlers[:], sys.excepthook, threading.excepthook = kept[0], kept[2], kept[3]
    root.setLevel(kept[1])


def lines(stream: io.StringIO, event: str, package: str = "wavepp_controller") -> list[dict[str, Any]]:
    """What one package told of one kind of event, without what every line has."""
    found = [json.loads(line) for line in stream.getvalue().splitlines()]
    told = [line for line in found if line["event"] == event and line["log"].startswith(package)]
    return [{name: line[name] for name in line if name not in ("ts", "event", "log")} for line in told]


async def test_logs_tell_the_life_of_a_pipeline_and_never_a_prompt(stream: io.StringIO) -> None:
    rng = random.Random(7)
    # numbers that nothing else in a log line can be
    secret = [rng.randrange(500_000, 524_288) for _ in range(90)]
    model = "emulated:layers=8,vocabulary=524288,window=4096"
    async with Cluster(stages=2, model=model, pool_blocks=(64, 32)) as cluster:
        epoch = cluster.controller.machine.epoch
        await cluster.client.prefill(secret)
        with pytest.raises(errors.TokenOutOfRange):
            await cluster.client.prefill([*secret, 524_289], request_id="bad-token")
        with pytest.raises(errors.NeverFits):
            await cluster.client.prefill(secret * 6, request_id="too-long")
        stranger = StageSettings(stage=1, stages=2, model=EMULATED, engine="emulated", block_tokens=16)
        await refused_member(cluster, stranger, stream)

        entered, leave = threading.Event(), threading.Event()

        def gate(wave: WaveWork) -> None:
            entered.set()
            leave.wait(60)

        engine = cluster.daemons[1].equipment.engine
        assert isinstance(engine, EmulatedEngine)
        engine._gate = gate
        request = asyncio.create_task(cluster.client.prefill(secret[::-1], request_id="unlucky"))
        await eventually(entered.is_set)
        closing = asyncio.create_task(cluster.daemons[1].close())
        with pytest.raises(errors.StageLost):
            await request
        leave.set()
        await closing
        await cluster.restart(1)
        await cluster.serving(formation=2)

    shape = {"level": "info", "pipeline": "default", "stages": 2, "link": "grpc", "wave_tokens": 128}
    assert lines(stream, "formation formed") == [{**shape, "formation": 1}, {**shape, "formation": 2}]
    ended = lines(stream, "formation ended")[0]
    assert (ended["level"], ended["pipeline"], ended["formation"]) == ("warning", "default", 1)
    assert (ended["reason"], ended["stage"]) == ("STAGE_LOST", "1")
    assert [line["epoch"] for line in lines(stream, "leading", "wavepp_proto")] == [epoch]
    assert lines(stream, "request refused") == [
        {"level": "info", "request_id": "bad-token", "reason": "TOKEN_OUT_OF_RANGE", "field": "token_ids",
         "limit": "524288"},
        {"level": "info", "request_id": "too-long", "reason": "NEVER_FITS", "field": "token_ids", "limit": "32",
         "stage": "1"},
    ]  # fmt: skip
    assert lines(stream, "request failed") == [
        {"level": "warning", "request_id": "unlucky", "reason": "STAGE_LOST", "pipeline": "default", "formation": 1,
         "stage": "1", "rank": "0"},
    ]  # fmt: skip
    numbers = {int(number) for number in re.findall(r"\d+", stream.getvalue())}
    assert numbers & {*secret, 524_289} == set()


async def refused_member(cluster: Cluster, settings: StageSettings, stream: io.StringIO) -> None:
    """A stage of another model registers for a place that is taken, and leaves again."""
    daemon = StageDaemon(settings, cluster.store)
    await daemon.start()
    await eventually(lambda: lines(stream, "member refused"), about="the refusal")
    await daemon.close()
    (line,) = lines(stream, "member refused")
    assert (line["level"], line["pipeline"], line["stage"], line["reason"]) == ("warning", "default", 1, "JOIN_REFUSED")
    assert line["address"] == daemon.record.address


async def test_stage_that_cannot_be_used_learns_why_and_serves_once_it_is_alike(stream: io.StringIO) -> None:
    """A dtype of its own: the pipeline served wrong tokens, or formed and ended for ever."""
    async with Cluster(stages=2, pipeline_wait_ms=500) as cluster:
        alike = cluster.settings[1]
        await cluster.daemons[1].close()
        cluster.settings[1] = replace(alike, dtype="float16")
        daemon = await cluster.restart(1)
        await eventually(lambda: daemon.control.refused is not None, about="the refusal to arrive")
        first, second = cluster.daemons[0].address, daemon.address
        why = f"stage 1 of default at {second}: dtype is float16, stage 0 at {first} has auto"
        (line,) = lines(stream, "refused: no pipeline forms with this stage as it is", "wavepp.stage")
        assert line == {
            "level": "warning", "reason": "JOIN_REFUSED", "error": why, "stage": 1, "rank": "0", "address": second,
            "field": "dtype", "value": "float16", "limit": "auto", "other_stage": "0", "other_address": first,
        }  # fmt: skip
        assert daemon.observer._read()[0].refused  # type: ignore[union-attr]
        with pytest.raises(errors.JoinRefused) as refused:
            await cluster.client.prefill([1, 2, 3])
        assert refused.value.message == f"pipeline default did not serve within 500 ms: {why}"
        assert (refused.value.retryable, refused.value.fields["missing_stages"]) == (False, "1")
        other = Fence(Epoch(2**60), Formation(0), Incarnation(daemon.incarnation + 1))
        async with open_channel(second) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as stale:
                await control_pb2_grpc.StageControlStub(channel).Refuse(convert.refuse_to_pb(other, None))
        assert convert.error_from_rpc(stale.value).fields["field"] == "incarnation"
        assert daemon.control.refused is not None

        await daemon.close()
        cluster.settings[1] = alike
        again = await cluster.restart(1)
        await cluster.serving(formation=2)
        assert (await cluster.client.prefill([1, 2, 3])).first_token == expected_first_token([1, 2, 3], 1000)
        assert again.control.refused is None
