"""One trace for each request, made by the processes that did the work (DESIGN.md)."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from tests.harness.eventually import eventually
from tests.harness.processes import QUICK, Processes, random_prompt
from wavepp import AsyncClient, TraceSettings
from wavepp_proto.runtime import span_names as names
from wavepp_proto.runtime.timeline import CollectedSpan, check_timeline, write_timeline
from wavepp_proto.runtime.trace_sink import TraceSink

pytestmark = pytest.mark.processes

STAGES = 3
PHASES = {names.ADMISSION, names.HASH, names.HINT, names.ANNOUNCE, names.PIN_RESERVE, names.VOTE, names.FINISH}


async def test_each_request_is_one_trace_from_the_client_through_every_stage(tmp_path: Path) -> None:
    """Wave spans are roots of their own, linked to the requests whose rows they computed."""
    sink = await TraceSink.start()
    try:
        async with Processes(tmp_path, f"{QUICK},token_us=20", stages=STAGES, otlp=sink.endpoint) as cluster:
            pids = cluster.pids()
            tracing = TraceSettings("wavepp-client", endpoint=sink.endpoint)
            async with AsyncClient(cluster.address, tracing=tracing) as client:
                prompts = [random_prompt(seed, 900) for seed in range(6)]
                results = [outcome.unwrap() async for outcome in client.prefill_many(prompts, concurrency=6)]
            traces = {result.trace_id for result in results}
            assert len(traces) == len(prompts)
            await eventually(lambda: _complete(sink.spans, traces), about="every span to be exported")
        spans = sink.spans
    finally:
        await sink.close()

    by_trace: dict[str, list[CollectedSpan]] = defaultdict(list)
    for span in spans:
        by_trace[span.trace_id].append(span)
    known = {span.key for span in spans}
    assert [span.name for span in spans if span.parent is not None and span.parent not in known] == []
    for trace in traces:
        _check_trace(by_trace[trace], pids)
    # only a request that meets a full ring waits to be scheduled
    assert names.SCHEDULE in {span.name for span in spans}
    waves = [span for span in spans if span.name == names.WAVE]
    assert {link[0] for span in waves for link in span.links} == traces
    assert {(span.number(names.STAGE), span.number(names.PROCESS_PID)) for span in waves} == _stage_pids(pids)

    path = tmp_path / "timeline.json"
    write_timeline(spans, path)
    summary = check_timeline(path.read_text())
    assert summary.stages == tuple(f"pipeline default: stage {stage}" for stage in range(STAGES))
    assert (summary.admissions, summary.arrows) == (len(prompts), len(prompts))


def _complete(spans: list[CollectedSpan], traces: set[str]) -> bool:
    """Roots come last: the client's, and the waves that its requests ran in."""
    roots = {span.trace_id for span in spans if span.name == names.PREFILL}
    requests = {span.trace_id for span in spans if span.name == names.REQUEST}
    executed = defaultdict(set)
    for span in spans:
        if span.name == names.EXECUTE:
            executed[span.trace_id].add(span.number(names.STAGE))
    return traces <= roots and traces <= requests and all(len(executed[trace]) == STAGES for trace in traces)


def _check_trace(spans: list[CollectedSpan], pids: dict[str, int]) -> None:
    made_by = defaultdict(set)
    for span in spans:
        made_by[span.name].add((span.number(names.STAGE), span.number(names.PROCESS_PID)))
    (root,) = [span for span in spans if span.parent is None]
    assert (root.name, root.service) == (names.PREFILL, "wavepp-client")
    (request,) = [span for span in spans if span.name == names.REQUEST]
    assert request.parent == root.key
    assert {pid for _, pid in made_by[names.REQUEST]} == {pids["controller"]}
    assert made_by[names.PREPARE] == made_by[names.EXECUTE] == _stage_pids(pids)
    assert made_by.keys() >= PHASES
    assert {span.parent for span in spans if span.name in (names.PREPARE, names.EXECUTE)} == {request.key}


def _stage_pids(pids: dict[str, int]) -> set[tuple[int, int]]:
    return {(stage, pids[f"stage-{stage}"]) for stage in range(STAGES)}
