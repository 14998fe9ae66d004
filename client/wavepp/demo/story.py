"""The demo from beginning to end: model, cluster, prompts, shutdown, timeline, unsplit model, verdict.

Owns the order of things and the settings they run with. `tell` is one coroutine to be read from top to
bottom; cancelling it at any point ends every process that it started. Called by `__main__`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wavepp import AsyncClient, TraceSettings
from wavepp._paths import log_folder
from wavepp.demo import processes, report
from wavepp.demo.asking import ask
from wavepp.demo.pools import plan_pools
from wavepp.demo.prompts import build_passes
from wavepp.demo.reference import unsplit_logits
from wavepp.demo.screen import Screen
from wavepp.demo.smollm2 import ensure_model
from wavepp.demo.tokens import ModelText
from wavepp.demo.verdict import Row, compare, failures
from wavepp.local_cluster import LocalCluster, LocalPlan
from wavepp_proto.errors import InternalError, InvalidRequest
from wavepp_proto.runtime.timeline import TimelineSummary, check_timeline, write_timeline
from wavepp_proto.runtime.trace_sink import TraceSink

BLOCK_TOKENS = 32
WAVE_TOKENS = 512
"""A prompt of the demo takes up to three waves: enough of them in flight to keep four stages busy."""
SILENCE_MS = 10_000
"""A machine with fewer cores than stages must not look like a lost stage; the demo is about answers, not faults."""
REQUEST_DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True)
class Options:
    model: Path | None
    """A Hugging Face folder; None takes the demo's own model."""
    stages: int
    concurrency: int
    dtype: str
    """float32 or bfloat16, of the stages and of the unsplit model alike."""
    trace_file: Path
    json_file: Path | None

    @property
    def judges_exactness(self) -> bool:
        """bfloat16 rounds differently for every shape of a wave: its differences are reported only."""
        return self.dtype == "float32"


async def tell(options: Options, screen: Screen) -> bool:
    """Run the demo; whether everything it claims holds. Raises WaveppError if it could not be run."""
    _check_writable(options)
    log_dir = log_folder("demo-", screen.say)
    screen.say(f"logs in {log_dir}")

    with screen.phase("model"):
        model = options.model or await ensure_model(screen.say, log_dir)
        text = ModelText.of(model)
        passes = build_passes(text)
        pools = plan_pools(passes, BLOCK_TOKENS, options.stages, options.concurrency)

    async with AsyncExitStack() as stack:
        sink = await TraceSink.start()
        stack.push_async_callback(sink.close)
        cluster = LocalCluster(_plan(options, model, pools.blocks, sink.endpoint), log_dir)
        stack.push_async_callback(cluster.close)
        with screen.phase("cluster"):
            running = processes.processes(cluster, await cluster.start())
            screen.show(processes.table(running))
        with screen.phase("prefill"):
            tracing = TraceSettings("wavepp-client", endpoint=sink.endpoint)
            async with AsyncClient(cluster.address, tracing=tracing, deadline=REQUEST_DEADLINE_S) as client:
                answers, seconds = await ask(client, passes, options.concurrency, text, screen)
        with screen.phase("shutdown"):
            # Every process sends its last spans before it ends, so the sink is the last to go.
            await cluster.close()
            await sink.close()

    with screen.phase("timeline"):
        timeline = _timeline(sink, options.trace_file, screen)
    with screen.phase("unsplit model"):
        prompts = [answer.prompt.token_ids for answer in answers]
        with screen.progress("tokens", sum(map(len, set(prompts)))) as done:
            unsplit = await unsplit_logits(model, options.dtype, prompts, log_dir / "unsplit.log", done)

    rows = compare(answers, unsplit)
    failed = failures(rows, timeline, options.stages, options.judges_exactness)
    _tell_outcome(rows, report.Totals.of(rows, seconds), failed, options, screen)
    if options.json_file is not None:
        context = _context(options, model, running, timeline, screen)
        found = report.as_json(rows, report.Totals.of(rows, seconds), failed, context)
        options.json_file.write_text(json.dumps(found, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return not failed


def _check_writable(options: Options) -> None:
    """Before the work, not after it. Raises InvalidRequest."""
    for field, path in (("trace_file", options.trace_file), ("json", options.json_file)):
        if path is not None and not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
            raise InvalidRequest(f"cannot write into {path.parent}", field=field, value=str(path))


def _plan(options: Options, model: Path, pool_blocks: Sequence[int], otlp: str) -> LocalPlan:
    return LocalPlan(
        model=str(model),
        stages=options.stages,
        pool_blocks=pool_blocks,
        block_tokens=BLOCK_TOKENS,
        wave_tokens=WAVE_TOKENS,
        dtype=options.dtype,
        threads=max(1, (os.cpu_count() or 1) // options.stages),
        listen="127.0.0.1:0",
        cluster="demo",
        otlp=otlp,
        silence_ms=SILENCE_MS,
    )


def _timeline(sink: TraceSink, path: Path, screen: Screen) -> TimelineSummary:
    """Write the timeline, read it back and check it. Raises InternalError if it breaks a rule."""
    spans = sink.spans
    if not spans:
        raise InternalError("no process sent a span", field="trace_file", value=str(path))
    write_timeline(spans, path)
    summary = check_timeline(path.read_text(encoding="utf-8"))
    waves = max(summary.waves.values(), default=0)
    screen.say(f"{len(spans)} spans: {len(summary.stages)} stages, {waves} waves, {summary.admissions} admissions")
    screen.say(f"timeline in {path.resolve()}: open it at https://ui.perfetto.dev (it is not uploaded)")
    return summary


def _tell_outcome(
    rows: Sequence[Row], totals: report.Totals, failed: Sequence[str], options: Options, screen: Screen
) -> None:
    screen.show(report.table(rows))
    for line in report.summary(rows, totals, BLOCK_TOKENS, options.judges_exactness):
        screen.say(line)
    for line in failed:
        screen.say(f"FAILED: {line}")
    screen.say("not everything holds" if failed else "everything holds")


def _context(
    options: Options,
    model: Path,
    running: Sequence[processes.ProcessFacts],
    timeline: TimelineSummary,
    screen: Screen,
) -> dict[str, Any]:
    return {
        "model": str(model),
        "dtype": options.dtype,
        "stages": options.stages,
        "concurrency": options.concurrency,
        "block_tokens": BLOCK_TOKENS,
        "wave_tokens": WAVE_TOKENS,
        "processes": [asdict(process) for process in running],
        "phases_s": dict(screen.phases),
        "timeline": {"file": str(options.trace_file.resolve()), **asdict(timeline)},
    }
