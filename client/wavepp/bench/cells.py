"""What is measured: one cell for each family and concurrency or rate, or for a trace.

Owns the cells' names, the workload of each, and shrinking prompts for small pipelines. Knows no client.
`commands/bench.py` draws them up, `run.py` measures them, `store.py` tells by their settings whether it was done.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from wavepp_proto import workload
from wavepp_proto.errors import InvalidRequest
from wavepp_proto.workload import Family, Part, Prompt, Trace

MOST_SLOTS = 128
LEAST_RATE = 1e-6
"""Requests per second; slower ones would never come."""
POISSON_WARMUP = 10
"""One in so many Poisson arrivals comes before the measured part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Exactly one of `concurrency`, `rate` and `trace` is set."""

    family: str = ""
    """Empty for a trace."""
    lengths: str = ""
    """Model whose prompt lengths the family has; empty for a trace."""
    prompt_tokens: int | None = None
    """Instead of the family's own length."""
    seed: int = 0
    scale: float = 1.0
    """Prompts are so much of their length, in (0, 1]."""
    concurrency: int | None = None
    """Slots of a closed loop."""
    rate: float | None = None
    """Requests per second of Poisson arrivals."""
    trace: str | None = None
    """File in Mooncake's format."""
    trace_sha256: str | None = None
    """Of the file's bytes, so that a changed file of the same name is not taken for the one that was measured; None
    without a trace, or where it cannot be read."""
    speed: float = 1.0
    """Of the trace: 2 sends it in half its time."""
    minutes: float | None = None
    """Of the trace's own time; None replays all of it."""
    requests: int | None = None
    """Measured requests, whatever time they take; None: for `seconds`, but at least two rounds of a closed loop."""
    seconds: float = 30.0
    warmup: int | None = None
    """Requests before the measured part; None: one round of a closed loop, a tenth of Poisson arrivals, none of a
    trace."""

    @property
    def name(self) -> str:
        """Unique within one command, fit for a file."""
        if self.trace is not None:
            return f"{Path(self.trace).stem}-x{self.speed:g}"
        length = "" if self.prompt_tokens is None else f"-{self.prompt_tokens}"
        load = f"c{self.concurrency}" if self.concurrency is not None else f"r{self.rate:g}"
        return f"{self.family}{length}-{load}"

    @property
    def row(self) -> str:
        """What cells of other load but the same prompts share."""
        return self.name.rpartition("-")[0]

    def settings(self) -> dict[str, Any]:
        return asdict(self)

    def check(self) -> None:
        """Raises InvalidRequest naming the setting that is out of range, unknown or no readable file."""
        _at_least("seconds", self.seconds, 0)
        _at_least("warmup", self.warmup, 0)
        _at_least("requests", self.requests, 1)
        _at_least("concurrency", self.concurrency, 1)
        if self.concurrency is not None and self.concurrency > MOST_SLOTS:
            raise InvalidRequest(
                f"at most {MOST_SLOTS} slots, got {self.concurrency}",
                field="concurrency", value=self.concurrency, limit=MOST_SLOTS,
            )  # fmt: skip
        for name, value in (("rate", self.rate), ("speed", self.speed), ("minutes", self.minutes)):
            if value is not None and not LEAST_RATE <= value < float("inf"):
                message = f"{name} must be at least {LEAST_RATE:g}, got {value}"
                raise InvalidRequest(message, field=name, value=value, limit=LEAST_RATE)
        if not 0 < self.scale <= 1:
            raise InvalidRequest(f"scale must be in (0, 1], got {self.scale}", field="scale", value=self.scale, limit=1)
        if self.trace is None:
            self.source()
        elif not _is_file(Path(self.trace)):
            raise InvalidRequest(f"no trace file {self.trace}", field="trace", value=self.trace)

    def source(self) -> Family:
        """The family; not of a trace."""
        return workload.family(self.family, self.lengths, self.concurrency or 1, self.seed, self.prompt_tokens)

    def arrivals(self) -> Trace:
        """What comes when, in an open loop: the trace, or the family at the rate. Prompts have their full length."""
        if self.trace is not None:
            read = read_trace(Path(self.trace))
            read = read if self.minutes is None else read.first(60 * self.minutes)
            read = replace(read, arrivals=read.arrivals[: self.requests])
            return read.faster(self.speed)
        assert self.rate is not None
        if self.requests is None:
            return workload.poisson(self.source(), self.rate, self.seconds)
        return workload.first_arrivals(self.source(), self.rate, self.requests + self.warmup_of(self.requests))

    def warmup_of(self, arrivals: int) -> int:
        """Requests before the measured part, of so many in an open loop."""
        if self.warmup is not None:
            return self.warmup
        return 0 if self.trace is not None else arrivals // POISSON_WARMUP


def closed(families: Iterable[str], concurrencies: Sequence[int], like: Cell) -> list[Cell]:
    """Each once: a cell that is named twice would be measured once and counted twice."""
    return [
        replace(like, family=name, concurrency=count)
        for name in dict.fromkeys(families)
        for count in dict.fromkeys(concurrencies)
    ]


def arriving(families: Iterable[str], rates: Sequence[float], like: Cell) -> list[Cell]:
    """Each once, as in `closed`."""
    return [replace(like, family=name, rate=rate) for name in dict.fromkeys(families) for rate in dict.fromkeys(rates)]


def replayed(trace: Path, like: Cell) -> Cell:
    try:
        digest = hashlib.sha256(trace.read_bytes()).hexdigest()
    except (OSError, ValueError):  # `check` says that it is no file, `arrivals` why it cannot be read
        digest = None
    return replace(like, trace=str(trace), trace_sha256=digest, lengths="", prompt_tokens=None)


def scaled(prompt: Prompt, scale: float, block_tokens: int) -> Prompt:
    """The prompt shortened: parts that others may share to whole blocks (at least one), its last part to a token.

    What could be reused stays as many parts, and never the whole prompt.
    """
    if scale == 1:
        return prompt
    *shared, last = prompt.parts
    parts = [Part(part.stream, _blocks(part.tokens * scale, block_tokens)) for part in shared]
    parts.append(Part(last.stream, max(1, round(last.tokens * scale))))
    reusable, left = 0, prompt.reusable_tokens
    for whole, short in zip(prompt.parts, parts, strict=True):
        if left < whole.tokens:
            reusable += int(left * short.tokens / whole.tokens)
            break
        reusable, left = reusable + short.tokens, left - whole.tokens
    total = sum(part.tokens for part in parts)
    reusable = min(reusable, total - 1) // block_tokens * block_tokens
    return replace(prompt, parts=tuple(parts), reusable_tokens=reusable)


def scaled_prefix(prompt: Prompt, scale: float, block_tokens: int) -> Prompt:
    """A preloaded prefix shortened as the prompts that begin with it are."""
    if scale == 1:
        return prompt
    parts = tuple(Part(part.stream, _blocks(part.tokens * scale, block_tokens)) for part in prompt.parts)
    return replace(prompt, parts=parts)


def _blocks(tokens: float, block_tokens: int) -> int:
    return max(1, int(tokens / block_tokens)) * block_tokens


def read_trace(path: Path) -> Trace:
    """A file in Mooncake's format. Raises InvalidRequest where it cannot be read or holds no request."""
    try:
        with path.open(encoding="utf-8") as lines:
            read = workload.mooncake(path.stem, lines)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read {path}: {error}", field="trace", value=str(path)) from error
    if not read.arrivals:
        raise InvalidRequest(f"no request in {path}", field="trace", value=str(path))
    return read


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name longer than any file's
        return False


def _at_least(name: str, value: float | None, least: float) -> None:
    if value is not None and not least <= value < float("inf"):
        raise InvalidRequest(f"{name} must be at least {least}, got {value}", field=name, value=value, limit=least)
