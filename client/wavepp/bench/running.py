"""One cell under way: its load, the statuses around its measured part, and its document at any moment.

Owns the order within a cell: preload, load with its warm-up, status and CPU meter at both ends of the window.
`run.py` starts it, and asks for the document when it has ended or was interrupted.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from math import isfinite

from wavepp import AsyncClient, ClusterStatus, Description, WaveppError
from wavepp.bench.asking import Asker
from wavepp.bench.cells import Cell, scaled, scaled_prefix
from wavepp.bench.load import Extent, LoopClock, closed_loop, open_loop
from wavepp.bench.machine import Meter, Usage, pids_here
from wavepp.bench.measure import Sample, Summary, summarise
from wavepp.bench.stages import pipeline_of, stage_splits, waves
from wavepp.bench.store import SCHEMA, Document
from wavepp.bench.window import Window
from wavepp_proto.errors import InvalidRequest
from wavepp_proto.profile import Profile
from wavepp_proto.workload import Arrival, Family, Prompt, Trace

SETTLE_S = 1.0
"""After the preload: its end is told before its digests are, and the load is to find what it left."""
FIRST_PROMPTS = 8
"""Of a family, among which every length it has occurs."""


@dataclass(frozen=True, slots=True)
class Options:
    """What all cells of a bench have in common."""

    address: str
    """Of the controller."""
    deadline_s: float
    cache_salt: str
    """Keeps the cell's prompts apart from what the caches hold already."""
    preload: bool = True
    """Send what the workload expects to be cached already, before the load."""
    expected: frozenset[str] = frozenset()
    """Reasons for which a request may fail."""
    most_under_way: int = 1024
    """In an open loop."""
    profile: Profile | None = None
    speed_up: float | None = None
    """How much faster than the profile the stages run; None: as the model's name says."""
    request_prefix: str = ""
    """Names requests by their number, for whoever looks them up in traces; empty leaves names to the client."""
    tail: bool = True
    """Whether requests under way at the end of a closed loop's measured part are answered, or given up."""


class RunningCell:
    def __init__(self, client: AsyncClient, about: Description, cell: Cell, options: Options, shared: Document) -> None:
        """`shared` is put into the document's settings beside the cell's own."""
        self._client = client
        self._about = about
        self._cell = cell
        self._options = options
        self._settings = cell.settings() | shared
        self._began = datetime.now(UTC)
        self._before: ClusterStatus | None = None
        self._after: ClusterStatus | None = None
        self._usage: Usage | None = None
        self._between_s = 0.0
        self._foreign = 0
        self.window = Window(options.expected)
        self.began_ns = 0
        """Wall clock when the load began: where the samples' seconds count from."""

    async def measure(self) -> None:
        """Raises what a preload failed with, and InvalidRequest for prompts that do not fit the pipeline's window."""
        source: Family | Trace = self._cell.source() if self._cell.concurrency is not None else self._cell.arrivals()
        if self._options.preload:
            await self._preload(map(self._prefix, source.preloaded))
        submitted = await self._submitted()
        watching = asyncio.create_task(self._watch(), name="statuses around the window")
        try:
            await self._load(source)
            if self.window.opened.is_set():
                await watching
            self._count_foreign(submitted, await self._submitted())
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _load(self, source: Family | Trace) -> None:
        cell, clock = self._cell, LoopClock()
        self.began_ns = time.time_ns()
        ask = self._asker(clock)
        if isinstance(source, Family):
            assert cell.concurrency is not None
            for number in range(FIRST_PROMPTS):
                self._check(self._prompt(source.prompt(number)))
            extent = _extent(cell, cell.concurrency, self._options.tail)
            await closed_loop(
                ask, lambda number: self._prompt(source.prompt(number)), cell.concurrency, extent, self.window, clock
            )
            return
        warmup = cell.warmup_of(len(source.arrivals) if cell.requests is None else cell.requests)
        if warmup >= len(source.arrivals):
            raise InvalidRequest("nothing is left to measure", field="warmup", value=warmup, limit=len(source.arrivals))
        arrivals = [Arrival(one.at_s, self._prompt(one.prompt)) for one in source.arrivals]
        if cell.trace is None:
            for arrival in arrivals[:FIRST_PROMPTS]:
                self._check(arrival.prompt)
        await open_loop(ask, arrivals, warmup, self._options.most_under_way, self.window, clock)

    async def _preload(self, prompts: Iterable[Prompt]) -> None:
        """One by one: there are few, and a first prompt that fails says why."""
        options, about = self._options, self._about
        prefixes = list(prompts)
        for prompt in prefixes:
            self._check(prompt)
            await self._client.prefill(
                prompt.packed(about.vocabulary),
                pipeline=about.pipeline,
                deadline=options.deadline_s,
                cache_salt=options.cache_salt,
            )
        if prefixes:
            await asyncio.sleep(SETTLE_S)

    async def _watch(self) -> None:
        await self.window.opened.wait()
        self._before = await self._status()
        clock = LoopClock()
        meter = Meter(pids_here(self._before, self._options.address) if self._before else {})
        await self.window.closed.wait()
        self._usage = meter.usage()
        self._after = await self._status()
        self._between_s = clock.now()

    async def _submitted(self) -> int | None:
        """Requests that this controller has heard of so far, whoever sent them."""
        status = await self._status()
        return None if status is None else status.counters.get("submitted", 0)

    def _count_foreign(self, before: int | None, after: int | None) -> None:
        if before is not None and after is not None:
            self._foreign = max(0, after - before - self.window.ended)

    async def _status(self) -> ClusterStatus | None:
        """None if the controller does not answer: the requests of the cell say so better."""
        try:
            return await self._client.status()
        except WaveppError:
            return None

    def document(self, *, interrupted: bool = False) -> Document:
        window = self.window
        every = [*window.warmup, *window.measured, *window.tail]
        summary = summarise(window.measured, window.seconds)
        return {
            "schema": SCHEMA,
            "name": self._cell.name,
            "row": self._cell.row,
            "settings": self._settings,
            "began": self._began.isoformat(timespec="seconds"),
            "interrupted": interrupted,
            "stopped_early": window.broken,
            "unexpected_failures": window.unexpected,
            "failed": dict(sorted(Counter(one.reason for one in every if one.reason).items())),
            "foreign_requests": self._foreign,
            "requests": {name: len(getattr(window, name)) for name in ("warmup", "measured", "tail")},
            "summary": asdict(summary),
            "bound": self._bound(summary),
            **self._seen(),
            "samples": {"columns": list(Sample._fields), "measured": [_rounded(one) for one in window.measured]},
        }

    def _bound(self, summary: Summary) -> Document | None:
        """What the slowest stage could serve, with an endless cache; and the share of what it could with this one."""
        finished = [one for one in self.window.measured if not one.reason]
        if self._options.profile is None or not finished:
            return None
        aligned = self._about.block_tokens
        ideal = [max(one.cached_tokens, one.reusable_tokens // aligned * aligned) for one in finished]
        most, as_hit = (self._most(finished, cached) for cached in (ideal, [one.cached_tokens for one in finished]))
        if not (isfinite(most) and isfinite(as_hit)):
            return None
        throughput = summary.input_tokens_per_s
        return {
            "profile": self._options.profile.name,
            "input_tokens_per_s": most,
            "fraction": throughput / most,
            "fraction_as_hit": throughput / as_hit,
        }

    def _most(self, finished: Sequence[Sample], cached: Sequence[int]) -> float:
        assert self._options.profile is not None
        prompts = [(one.prompt_tokens, tokens, 1.0) for one, tokens in zip(finished, cached, strict=True)]
        return self._options.profile.bound(prompts) * (self._options.speed_up or speed_up_of(self._about.model))

    def _seen(self) -> Document:
        """From the two statuses; None where one is missing or they cannot be compared."""
        before, after = self._before, self._after
        document: Document = {"stages": None, "waves": None, "usage": asdict(self._usage) if self._usage else None}
        if before is None or after is None:
            return document
        document["waves"] = asdict(waves(before, after, self._between_s))
        earlier, later = (pipeline_of(status, self._about.pipeline) for status in (before, after))
        splits = stage_splits(earlier, later) if earlier and later else None
        document["stages"] = None if splits is None else [asdict(split) for split in splits]
        return document

    def _asker(self, clock: LoopClock) -> Asker:
        options, about = self._options, self._about
        return Asker(
            self._client, clock, about.pipeline, about.vocabulary, options.cache_salt, options.deadline_s,
            options.request_prefix,
        )  # fmt: skip

    def _prompt(self, prompt: Prompt) -> Prompt:
        return scaled(prompt, self._cell.scale, self._about.block_tokens)

    def _prefix(self, prompt: Prompt) -> Prompt:
        return scaled_prefix(prompt, self._cell.scale, self._about.block_tokens)

    def _check(self, prompt: Prompt) -> None:
        if prompt.tokens > self._about.window:
            raise InvalidRequest(
                f"prompts of {prompt.tokens} tokens do not fit the pipeline's window of {self._about.window}: "
                "shorten them with --scale or --prompt-tokens",
                field="scale", value=prompt.tokens, limit=self._about.window,
            )  # fmt: skip


def speed_up_of(model: str) -> float:
    """What an emulated model's name says of it (`speedup=4`); 1 where it says nothing. The stages took the name."""
    kind, _, settings = model.partition(":")
    said = [part for part in settings.split(",") if part.startswith("speedup=")] if kind == "emulated" else []
    return float(said[0].removeprefix("speedup=")) if said else 1.0


def _extent(cell: Cell, concurrency: int, tail: bool) -> Extent:
    warmup = concurrency if cell.warmup is None else cell.warmup
    if cell.requests is not None:
        return Extent(warmup, cell.requests, 0.0, tail)
    return Extent(warmup, 2 * concurrency, cell.seconds, tail)


def _rounded(sample: Sample) -> list[object]:
    """To microseconds: more digits say nothing and cost a third of the file."""
    return [round(value, 6) if isinstance(value, float) else value for value in sample]
