"""Traces of a real cluster: one per request, complete, without orphans, and drawable (DESIGN.md)."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.harness.cluster import Cluster
from tests.harness.eventually import eventually
from wavepp import AsyncClient, TraceSettings, errors
from wavepp_proto.runtime import span_names as names
from wavepp_proto.runtime.timeline import CollectedSpan, check_timeline, write_timeline
from wavepp_proto.runtime.trace_sink import TraceSink
from wavepp_proto.runtime.tracing import Tracer
from wavepp_stage.core.work import WaveWork
from wavepp_stage.engine.emulated import EmulatedEngine

pytestmark = pytest.mark.engines(
    "emulated", "engine-thread", why="it reads spans from daemons, which are processes here"
)

STAGES = 3
B = 16


class Traced:
    """A cluster whose every process exports to one sink, and a client that starts traces."""

    def __init__(self, cluster: Cluster, client: AsyncClient, sink: TraceSink) -> None:
        self.cluster, self.client, self._sink = cluster, client, sink
        self._gates: list[threading.Event] = []

    async def spans(self, *traces: str) -> list[CollectedSpan]:
        """Every span, once those of `traces` are complete: of each process, the one that it records last."""
        wanted, stages = set(traces), self.cluster.stages

        def complete() -> bool:
            executed = Counter(span.trace_id for span in self._sink.spans if span.name == names.EXECUTE)
            ends = {(span.name, span.trace_id) for span in self._sink.spans}
            ended = all({(names.PREFILL, trace), (names.REQUEST, trace)} <= ends for trace in wanted)
            return ended and all(executed[trace] >= stages for trace in wanted)

        await eventually(complete, about="the spans of every process")
        return self._sink.spans

    def copies(self) -> list[CollectedSpan]:
        """Those exported so far."""
        return [span for span in self._sink.spans if span.name == names.COPY]

    def ended(self, request_id: str) -> str:
        """The trace of a request whose span the controller has exported; "" until then."""
        ends = (span for span in self._sink.spans if span.name == names.REQUEST)
        return next((span.trace_id for span in ends if span.attributes[names.REQUEST_ID] == request_id), "")

    def gate(self, stage: int) -> tuple[threading.Event, threading.Event]:
        """Stop a stage inside its engine: (it is there, let it go)."""
        entered, leave = threading.Event(), threading.Event()
        engine = self.cluster.daemons[stage].equipment.engine
        assert isinstance(engine, EmulatedEngine)

        def wait(wave: WaveWork) -> None:
            entered.set()
            assert leave.wait(60)

        engine._gate = wait
        self._gates.append(leave)
        return entered, leave

    def open_gates(self) -> None:
        """Whatever failed: a thread that stood still would speak in another test."""
        for leave in self._gates:
            leave.set()


@asynccontextmanager
async def traced(pool_blocks: tuple[int, ...] = (256,), stages: int = STAGES, **config: Any) -> AsyncIterator[Traced]:
    sink = await TraceSink.start()
    tracers: list[Tracer] = []

    def tracer(service: str) -> Tracer:
        tracers.append(Tracer(TraceSettings(service, endpoint=sink.endpoint, period_s=0.01)))
        return tracers[-1]

    try:
        async with (
            Cluster(stages=stages, pool_blocks=pool_blocks, tracers=tracer, **config) as cluster,
            AsyncClient(cluster.controller.address, tracing=tracer("wavepp-client")) as client,
        ):
            run = Traced(cluster, client, sink)
            try:
                yield run
            finally:
                run.open_gates()
    finally:
        for one in tracers:
            await asyncio.to_thread(one.close)
        await sink.close()


def prompt(tokens: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(tokens)]


def tree(spans: Iterable[CollectedSpan]) -> Counter[tuple[str, str]]:
    """How often each name occurs below each parent's name ("" for a root). KeyError for an orphan."""
    found = list(spans)
    by_key = {span.key: span.name for span in found}
    assert len(by_key) == len(found), "a span id occurs twice"
    return Counter((by_key[span.parent] if span.parent is not None else "", span.name) for span in found)


async def test_one_request_is_one_tree_from_the_client_to_every_stage() -> None:
    """A phase that took no time has no span, hint apart: `queue` and `schedule` are such phases here."""
    async with traced() as run:
        result = await run.client.prefill(prompt(50, 1))
        spans = await run.spans(result.trace_id)
    request = [span for span in spans if span.name != names.WAVE]
    assert {span.trace_id for span in request} == {result.trace_id}
    found = tree(request)
    optional = {(names.ADMISSION, names.QUEUE), (names.REQUEST, names.SCHEDULE)}
    assert {edge: count for edge, count in found.items() if edge not in optional} == {
        ("", names.PREFILL): 1,
        (names.PREFILL, names.REQUEST): 1,
        (names.REQUEST, names.ADMISSION): 1,
        (names.ADMISSION, names.HASH): 1,
        (names.ADMISSION, names.ANNOUNCE): 1,
        (names.ADMISSION, names.HINT): 1,
        (names.ADMISSION, names.PIN_RESERVE): 1,
        (names.PIN_RESERVE, names.VOTE): STAGES,
        (names.REQUEST, names.PREPARE): STAGES,
        (names.REQUEST, names.EXECUTE): STAGES,
        (names.REQUEST, names.FINISH): 1,
    }
    for name in (names.VOTE, names.PREPARE, names.EXECUTE):
        assert sorted(span.number(names.STAGE) for span in request if span.name == name) == [0, 1, 2]
    made_by = {span.name: span.service for span in request}
    assert made_by[names.PREFILL] == "wavepp-client"
    assert made_by[names.REQUEST] == made_by[names.ADMISSION] == "wavepp-controller"
    assert made_by[names.PREPARE] == made_by[names.EXECUTE] == "wavepp-stage"
    by_key = {span.key: span for span in request}
    for span in request:
        if span.service == "wavepp-controller" and span.parent is not None and span.name != names.REQUEST:
            above = by_key[span.parent]
            assert above.start_ns <= span.start_ns <= span.end_ns <= above.end_ns, f"{span.name} leaves {above.name}"
    (admission,) = [span for span in request if span.name == names.ADMISSION]
    assert (admission.attributes[names.OUTCOME], admission.number(names.ROUNDS)) == ("admitted", 1)


@pytest.mark.engines("emulated", why="others are to be admitted while a wave stands still on the engine's thread")
async def test_a_wave_is_linked_to_each_of_the_requests_it_computes() -> None:
    """While the first request computes on stage 0, the ring fills; the three behind it share one wave."""
    async with traced(stages=1) as run:
        entered, leave = run.gate(0)
        blockers = [asyncio.create_task(run.client.prefill(prompt(128, seed))) for seed in (1, 2)]
        await eventually(entered.is_set)
        await eventually(lambda: ring(run.cluster) == 2, about="a full ring")
        three = [asyncio.create_task(run.client.prefill(prompt(30, seed))) for seed in (3, 4, 5)]
        await eventually(lambda: running(run.cluster) == 5, about="all to be admitted")
        leave.set()
        results = await asyncio.gather(*blockers, *three)
        spans = await run.spans(*(result.trace_id for result in results))
    waves = sorted(
        (span for span in spans if span.name == names.WAVE), key=lambda span: span.number(names.WAVE_ORDINAL)
    )
    assert [span.number(names.ROWS) for span in waves] == [1, 1, 3]
    linked = {trace for trace, _ in waves[2].links}
    assert len(waves[2].links) == 3
    assert linked == {result.trace_id for result in results[2:]}
    requests = {span.key for span in spans if span.name == names.REQUEST}
    assert {link for span in waves for link in span.links} == requests
    assert all(span.parent is None and span.trace_id not in linked for span in waves)
    assert sum(span.name == names.SCHEDULE for span in spans) >= 3, "they waited for the ring"


def ring(cluster: Cluster) -> int:
    return cluster.controller.machine.status().pipelines[0].waves_in_flight


def running(cluster: Cluster) -> int:
    return cluster.controller.machine.status().pipelines[0].running_requests


async def test_timeline_is_sound_when_many_requests_share_a_pipeline(tmp_path: Path) -> None:
    shared = prompt(5 * B, 1)
    prompts = [shared + prompt(1 + 37 * index % 300, index) for index in range(12)]
    async with traced(pool_blocks=(120, 60, 90)) as run:
        results = [outcome.unwrap() async for outcome in run.client.prefill_many(prompts, concurrency=6)]
        spans = await run.spans(*(result.trace_id for result in results))
    assert tree(spans)[names.REQUEST, names.ADMISSION] == 12
    path = tmp_path / "timeline.json"
    write_timeline(spans, path)
    summary = check_timeline(path.read_text())
    assert summary.stages == tuple(f"pipeline default: stage {stage}" for stage in range(STAGES))
    assert (summary.admissions, summary.arrows) == (12, 12)


@pytest.mark.engines("emulated", why="others are to be admitted while a wave stands still on the engine's thread")
async def test_trace_tells_why_when_a_request_waits_for_room() -> None:
    """Stage 1 has room for one of the two; the second waits for it, released and prepared again."""
    async with traced(pool_blocks=(100, 12, 100), floor_blocks=0) as run:
        entered, leave = run.gate(1)
        first = asyncio.create_task(run.client.prefill(prompt(10 * B, 1)))
        await eventually(entered.is_set)
        second = asyncio.create_task(run.client.prefill(prompt(10 * B, 2)))
        await eventually(lambda: waits(run.cluster), about="the second to run short")
        leave.set()
        trace = (await second).trace_id
        await first
        spans = [span for span in await run.spans(trace) if span.trace_id == trace]
    found = tree(spans)
    assert found[names.REQUEST, names.ADMISSION] == 1
    assert found[names.ADMISSION, names.PIN_RESERVE] >= 2
    assert found[names.PIN_RESERVE, names.VOTE] == STAGES * found[names.ADMISSION, names.PIN_RESERVE]
    assert found[names.ADMISSION, names.CAPACITY_WAIT] >= 1
    (admission,) = [span for span in spans if span.name == names.ADMISSION]
    assert admission.attributes[names.WAIT_REASON] == "no capacity on stage 1"


def waits(cluster: Cluster) -> bool:
    return any(request.state == "waiting" for request in cluster.controller.machine.status().requests)


async def test_trace_is_whole_when_a_request_is_refused_or_cancelled() -> None:
    async with traced() as run:
        with pytest.raises(errors.TokenOutOfRange):
            await run.client.prefill([1000], request_id="bad")
        entered, leave = run.gate(0)
        task = asyncio.create_task(run.client.prefill(prompt(40, 1), request_id="gone"))
        await eventually(entered.is_set)
        assert await run.client.cancel("gone")
        with pytest.raises(errors.Cancelled):
            await task
        leave.set()
        refused = await eventually(lambda: run.ended("bad"), about="the refusal to be exported")
        cancelled = await eventually(lambda: run.ended("gone"), about="the cancellation to be exported")
        spans = await run.spans(cancelled)
    of_refused = [span for span in spans if span.trace_id == refused]
    assert tree(of_refused) == {("", names.PREFILL): 1, (names.PREFILL, names.REQUEST): 1}
    assert {span.error for span in of_refused} == {"TOKEN_OUT_OF_RANGE"}
    of_cancelled = [span for span in spans if span.trace_id == cancelled]
    found = tree(of_cancelled)
    assert found[names.PREFILL, names.REQUEST] == found[names.REQUEST, names.ADMISSION] == 1
    assert found[names.REQUEST, names.EXECUTE] == STAGES, "the wave was sent, and flowed"
    (end,) = [span for span in of_cancelled if span.name == names.REQUEST]
    assert (end.error, end.attributes[names.OUTCOME]) == ("CANCELLED", "CANCELLED")


async def test_each_attempt_has_an_admission_of_its_own_when_a_formation_ends() -> None:
    async with traced(attempts=2) as run:
        entered, leave = run.gate(0)
        task = asyncio.create_task(run.client.prefill(prompt(40, 1)))
        await eventually(entered.is_set)
        await run.cluster.reform(())
        leave.set()
        result = await task
        spans = [span for span in await run.spans(result.trace_id) if span.trace_id == result.trace_id]
    assert result.attempt == 2
    found = tree(spans)
    assert found[names.REQUEST, names.ADMISSION] == 2
    attempts = {span.number(names.ATTEMPT) for span in spans if span.name == names.ADMISSION}
    assert attempts == {1, 2}


async def test_copies_are_drawn_beside_the_waves_when_a_stage_has_a_host_tier(tmp_path: Path) -> None:
    async with traced(pool_blocks=(30,), host_pool_blocks=100, floor_blocks=0) as run:
        results = [await run.client.prefill(prompt(10 * B, seed)) for seed in range(5)]
        await eventually(run.copies, about="the copies to be exported")
        spans = await run.spans(*(result.trace_id for result in results))
    copies = [span for span in spans if span.name == names.COPY]
    assert {span.attributes[names.DIRECTION] for span in copies} == {"offload"}
    assert all(span.parent is None and span.number(names.BLOCKS) > 0 for span in copies)
    path = tmp_path / "timeline.json"
    write_timeline(spans, path)
    assert check_timeline(path.read_text()).stages == tuple(f"pipeline default: stage {s}" for s in range(STAGES))
