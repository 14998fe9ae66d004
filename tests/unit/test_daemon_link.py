"""How the controller's link to a daemon loses its streams and gets them back, against a scripted stage."""

from __future__ import annotations

import asyncio
import gc
import socket
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from tests.harness.eventually import eventually
from tests.harness.stage_core import join_plan
from wavepp_controller.core.events import BeatArrived, Event, ReportArrived, StreamLost, StreamsReopened
from wavepp_controller.runtime.daemon_link import DaemonLink
from wavepp_proto import convert
from wavepp_proto.errors import FormationEnded, StageLost, StaleMessage, WaveppError
from wavepp_proto.runtime.channels import PLAIN_CLIENT, bind_server, new_server
from wavepp_proto.terms import Heartbeat, Round, StageTimes, WaveOrdinal, WaveReport
from wavepp_proto.v1 import (
    admission_pb2_grpc,
    digest_pb2_grpc,
    execution_pb2_grpc,
)

PLAN = replace(join_plan(), heartbeat_ms=60_000, silence_ms=120_000)
"""No heartbeat but those that something else causes."""
ROUND = Round(PLAN.fence, 1000)


class Stage(
    admission_pb2_grpc.StageAdmissionServicer,
    digest_pb2_grpc.StageDigestServicer,
    execution_pb2_grpc.StageExecutionServicer,
):
    """Notes heartbeats; ends every wave stream with `refusal` if there is one, else sends `reports` and listens."""

    def __init__(self) -> None:
        self.beats: list[Heartbeat] = []
        self.refusal: WaveppError | None = None
        self.reports: list[WaveReport] = []
        self.streams = 0
        self.break_off = asyncio.Event()

    async def Inventory(self, request: Any, context: Any) -> Any:
        raise AssertionError("nobody asks")

    async def Announce(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for _ in requests:
            yield

    async def PinReserve(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for _ in requests:
            yield

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield

    async def RunWaves(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        self.streams += 1
        if self.refusal is not None:
            await convert.abort(context, self.refusal)
        reader = asyncio.create_task(self._read(requests))
        try:
            yield convert.wave_response_to_pb(Heartbeat(PLAN.fence, 1))
            for report in self.reports:
                yield convert.wave_response_to_pb(report)
            await self.break_off.wait()
            self.break_off.clear()
            await convert.abort(context, StaleMessage("a wave is missing", field="ordinal", value=9))
        finally:
            reader.cancel()

    async def _read(self, requests: AsyncIterator[Any]) -> None:
        async for message in requests:
            beat = convert.wave_request_from_pb(message)
            assert isinstance(beat, Heartbeat)
            self.beats.append(beat)


class Heard:
    """What the link posts; takes reports as the core does."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.reported = WaveOrdinal(0)

    def post(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, ReportArrived):
            self.reported = WaveOrdinal(event.report.fence.ordinal)

    def losses(self) -> list[tuple[str, bool]]:
        return [(e.error.reason, e.resumable) for e in self.events if isinstance(e, StreamLost)]


@asynccontextmanager
async def linked(stage: Stage) -> AsyncIterator[tuple[DaemonLink, Heard]]:
    server, heard = new_server(), Heard()
    admission_pb2_grpc.add_StageAdmissionServicer_to_server(stage, server)
    digest_pb2_grpc.add_StageDigestServicer_to_server(stage, server)
    execution_pb2_grpc.add_StageExecutionServicer_to_server(stage, server)
    port = bind_server(server, "127.0.0.1:0")
    await server.start()
    link = DaemonLink(PLAN, f"127.0.0.1:{port}", PLAIN_CLIENT, heard.post, lambda: heard.reported)
    try:
        link.serve()
        yield link, heard
    finally:
        await link.close()
        await server.stop(0)


def report(ordinal: int) -> WaveReport:
    return WaveReport(replace(PLAN.fence, ordinal=ordinal), True, 0, bytes(32), StageTimes())


async def test_stage_is_known_to_be_gone_when_its_address_refuses() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    heard = Heard()
    link = DaemonLink(PLAN, f"127.0.0.1:{port}", PLAIN_CLIENT, heard.post)
    try:
        link.serve()
        await eventually(lambda: heard.events)
        assert heard.losses() == [(StageLost.reason, True)]
        link.reopen(WaveOrdinal(0))
        await eventually(lambda: len(heard.events) > 1)
        assert heard.losses() == [(StageLost.reason, True), (StageLost.reason, False)]
    finally:
        await link.close()


async def test_streams_are_opened_again_when_one_of_them_missed_a_message() -> None:
    """One loss is told however many streams end with it; nothing meant for the old ones goes out on the new ones."""
    stage = Stage()
    async with linked(stage) as (link, heard):
        await eventually(lambda: heard.events)
        stage.break_off.set()
        await eventually(heard.losses)
        link.send_round(ROUND, convert.round_body(ROUND))
        assert link._rounds.empty()
        link.reopen(WaveOrdinal(7))
        await eventually(lambda: any(isinstance(event, StreamsReopened) for event in heard.events))
        assert heard.losses() == [(StaleMessage.reason, True)]
        await eventually(lambda: len(stage.beats) == 2)
        assert [beat.reported_wave for beat in stage.beats] == [0, 7]
        at = next(i for i, event in enumerate(heard.events) if isinstance(event, StreamsReopened))
        assert isinstance(heard.events[at + 1], BeatArrived)
        link.send_round(ROUND, convert.round_body(ROUND))
        assert link._rounds.qsize() == 1


async def test_nothing_is_resumed_when_the_daemon_says_that_the_formation_is_over() -> None:
    stage = Stage()
    async with linked(stage) as (link, heard):
        await eventually(lambda: heard.events)
        stage.refusal = FormationEnded("it has ended")
        stage.break_off.set()
        await eventually(heard.losses)
        link.reopen(WaveOrdinal(0))
        await eventually(lambda: len(heard.losses()) == 2)
        assert heard.losses()[1] == (FormationEnded.reason, False)
        assert not any(isinstance(event, StreamsReopened) for event in heard.events)


async def test_link_tries_again_by_itself_when_the_streams_cannot_be_opened_yet() -> None:
    stage = Stage()
    async with linked(stage) as (link, heard):
        await eventually(lambda: heard.events)
        stage.refusal = StaleMessage("not yet", field="ordinal", value=1)
        stage.break_off.set()
        await eventually(heard.losses)
        link.reopen(WaveOrdinal(0))
        await eventually(lambda: stage.streams >= 3)
        stage.refusal = None
        await eventually(lambda: any(isinstance(event, StreamsReopened) for event in heard.events))
        assert len(heard.losses()) == 1


async def test_reports_are_acknowledged_once_a_ring_and_not_only_with_the_next_heartbeat() -> None:
    stage = Stage()
    ring = 2 * PLAN.stages
    stage.reports = [report(ordinal) for ordinal in range(1, 2 * ring + 2)]
    async with linked(stage) as (_, heard):
        await eventually(lambda: len(stage.beats) == 3)
        assert heard.reported == 2 * ring + 1
        assert [beat.reported_wave for beat in stage.beats] == [0, ring, 2 * ring]
        assert [beat.count for beat in stage.beats] == [1, 2, 3]


async def test_opening_under_way_gives_way_to_a_newer_one() -> None:
    stage = Stage()
    async with linked(stage) as (link, heard):
        await eventually(lambda: heard.events)
        stage.refusal = StaleMessage("not yet", field="ordinal", value=1)
        stage.break_off.set()
        await eventually(heard.losses)
        for reported in range(20):
            link.reopen(WaveOrdinal(reported))
            for _ in range(reported):
                await asyncio.sleep(0)
        stage.refusal = None
        await eventually(lambda: any(isinstance(event, StreamsReopened) for event in heard.events))
        await eventually(lambda: stage.beats[-1].reported_wave == 19)
        assert sum(isinstance(event, StreamsReopened) for event in heard.events) == 1
        assert len(heard.losses()) == 1


async def test_link_closed_before_its_streams_took_a_step_leaves_nothing_unawaited() -> None:
    """Found by the storm of broken connections: the warning is raised where the streams are collected."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        async with linked(Stage()) as (link, _):
            await link.close()
        gc.collect()
    assert [str(warning.message) for warning in said if issubclass(warning.category, RuntimeWarning)] == []
