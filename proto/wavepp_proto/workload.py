"""What a pipeline is asked: the paper's families and recorded traces, as prompts of named token streams.

Owns which prompts there are: their streams, lengths, what of them may be cached, and when they arrive. Equal
streams hold equal tokens everywhere, so prompts that begin with the same parts share a prefix. The real bench
(through `packed`) and virtual time (which needs no token) are given the same workload. Pure: one seed, one
workload. Does not own who sends it, how fast it is served, or files.

Lengths and families: WavePP paper, arXiv 2609.35263v1, tables 1 and 4 (GLM 5.2 and MiniMax M2.7 over four
stages) and the Kimi K3 tables (eight stages). Reuse means that 90 % of a prompt is a prefix that was seen before.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from wavepp_proto.errors import InvalidRequest

ALIGN_TOKENS = 64
"""Shared prefixes end on multiples of this, so that a block size that divides it reuses all of them."""
REUSED_PERCENT = 90
SUFFIX_TOKENS = 4_096
SHARED_TOKENS = 125_000 // ALIGN_TOKENS * ALIGN_TOKENS
"""Before the suffix of `suffix4k`; the paper says about 125,000."""
TRACE_BLOCK_TOKENS = 512
"""A hash id of a Mooncake trace names a prefix up to the end of this many more tokens."""
MAX_TRACE_MS = 366 * 24 * 3600 * 1000
"""Latest moment in a trace: one that counts from 1970 would be waited for, not replayed."""
MAX_ARRIVALS = 1 << 22
"""Of one Poisson load, on average: they are drawn ahead."""
GOOD_HIT = 0.9
"""A hit is good if it reuses at least this share of what an endless cache would have."""
PAPER_GOOD_HIT = 0.8
"""The WavePP paper's threshold, told beside ours."""
MOMENT_S = 0.03
"""Requests of a closed loop that end within so long of each other ended at once: they shared a wave."""
LENGTHS = {"glm": (128_000, 260_000), "minimax": (129_000, 195_000), "k3": (131_072, 262_144)}
"""(short, long) prompts in tokens by model."""
TABLED = ("short_cold", "long_cold", "short_reuse", "long_reuse", "mixed", "suffix4k")
"""Of the paper's tables."""
FAMILIES = (*TABLED, "behind")
BEHIND_TOKENS, EACH = 2_048, 8
"""`behind`: prompts of so many tokens, but the first of each eight is as long as the model takes."""
_PP4 = (8, 16, 32)
_K3 = (1, 4, 8, 16, 32)


class Part(NamedTuple):
    stream: str
    """Tokens of one name are equal everywhere, whatever stands before them."""
    tokens: int
    """The stream's first so many."""


@dataclass(frozen=True, slots=True)
class Prompt:
    parts: tuple[Part, ...]
    reusable_tokens: int = 0
    """Leading tokens that an endless cache would have when it arrives."""
    kind: str = ""
    """`warm` or `cold`, where a workload holds both; latencies are told apart by it."""

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts)

    def packed(self, vocabulary: int) -> bytes:
        """Token ids as the wire carries them: little-endian int32, each below `vocabulary` (at least 1)."""
        return b"".join(stream_tokens(part.stream, part.tokens, vocabulary) for part in self.parts)

    def good_hit(self, cached_tokens: int, share: float = GOOD_HIT) -> bool | None:
        """Whether `cached_tokens` were a good hit; None if there was nothing to hit."""
        return cached_tokens >= share * self.reusable_tokens if self.reusable_tokens else None


@dataclass(frozen=True, slots=True)
class Arrival:
    at_s: float
    """After the start."""
    prompt: Prompt


@dataclass(frozen=True, slots=True)
class Family:
    """A closed loop: `concurrency` slots, each of which sends its next prompt when the last one has finished."""

    name: str
    model: str
    concurrency: int
    seed: int
    short: int
    long: int
    """Prompt lengths (tokens)."""

    @property
    def preloaded(self) -> tuple[Prompt, ...]:
        """Prefixes that caches hold before the first prompt; sent once, if they cannot be put there."""
        shared = {prompt.parts[0]: None for prompt in map(self.prompt, range(4)) if prompt.reusable_tokens}
        return tuple(Prompt((part,)) for part in shared)

    def prompt(self, number: int) -> Prompt:
        """Prompt `number` from 0, in the order in which slots ask for them; there is no last one."""
        match self.name:
            case "short_cold":
                return self._cold(number, self.short)
            case "long_cold":
                return self._cold(number, self.long)
            case "short_reuse":
                return self._warm(number, self.short)
            case "long_reuse":
                return self._warm(number, self.long)
            case "suffix4k":
                return self._behind(number, SHARED_TOKENS, SHARED_TOKENS + SUFFIX_TOKENS)
            case "behind":
                long = number % EACH == 0
                return replace(
                    self._cold(number, self.long if long else BEHIND_TOKENS), kind="long" if long else "short"
                )
            case _:
                cold = _draw(f"{self.seed}/{number // 4}") % 4 == number % 4  # one in each four
                return self._cold(number, self.long) if cold else self._warm(number, self.short)

    def _cold(self, number: int, tokens: int) -> Prompt:
        return Prompt((Part(f"{self._scope}/{number}", tokens),), 0, "cold")

    def _warm(self, number: int, tokens: int) -> Prompt:
        return self._behind(number, tokens * REUSED_PERCENT // 100 // ALIGN_TOKENS * ALIGN_TOKENS, tokens)

    def _behind(self, number: int, shared: int, tokens: int) -> Prompt:
        own = Part(f"{self._scope}/{number}", tokens - shared)
        return Prompt((Part(f"{self._scope}/shared", shared), own), shared, "warm")

    @property
    def _scope(self) -> str:
        return f"{self.model}/{self.name}/{self.seed}"


@dataclass(frozen=True, slots=True)
class Trace:
    """An open loop: prompts arrive when they arrive."""

    name: str
    arrivals: tuple[Arrival, ...]
    """In order of time."""
    preloaded: tuple[Prompt, ...] = ()

    def first(self, seconds: float) -> Trace:
        """What arrives within that much time."""
        return replace(self, arrivals=tuple(one for one in self.arrivals if one.at_s < seconds))

    def faster(self, speed: float) -> Trace:
        """The same prompts in 1/speed of the time; speed > 0."""
        return replace(self, arrivals=tuple(Arrival(one.at_s / speed, one.prompt) for one in self.arrivals))


Workload = Family | Trace


class Cell(NamedTuple):
    """One cell of the paper's tables."""

    family: str
    tokens: int | None
    """Prompt length where the table names one; None for the model's own."""
    concurrency: int


def family(name: str, model: str, concurrency: int, seed: int = 0, tokens: int | None = None) -> Family:
    """The closed loop of a family. `tokens` replaces the length of a family of one length.

    Raises InvalidRequest naming the setting that is unknown or out of range, as the commands call it."""
    if name not in FAMILIES:
        raise InvalidRequest(f"no family {name}; known: {' '.join(FAMILIES)}", field="family", value=name)
    if model not in LENGTHS:
        raise InvalidRequest(f"no model {model}; known: {' '.join(LENGTHS)}", field="lengths", value=model)
    if concurrency < 1:
        raise InvalidRequest("nobody asks", field="concurrency", value=concurrency, limit=1)
    if tokens is not None and (tokens < 1 or name in ("mixed", "suffix4k")):
        raise InvalidRequest(f"{name} has no length of {tokens} tokens", field="prompt_tokens", value=tokens)
    short, long = LENGTHS[model]
    if tokens is not None:
        short, long = (tokens, long) if name.startswith("short") else (short, tokens)
    return Family(name, model, concurrency, seed, short, long)


def cells(model: str) -> tuple[Cell, ...]:
    """The paper's cells of a model: 20 of GLM, 20 of MiniMax, 28 of K3. KeyError for another model."""
    if model != "k3":
        LENGTHS[model]
        usual = tuple(Cell(name, None, c) for name in TABLED[:-1] for c in _PP4)
        return usual + tuple(Cell("suffix4k", None, c) for c in (*_PP4, 64, 128))
    cold = tuple(Cell("short_cold", tokens, c) for tokens in (65_536, 131_072) for c in _K3)
    cold += tuple(Cell("long_cold", 262_144, c) for c in _K3)
    reuse = tuple(Cell(name, None, c) for name in ("short_reuse", "long_reuse") for c in _K3)
    return cold + reuse + tuple(Cell("mixed", None, c) for c in _PP4)


def poisson(source: Family, per_second: float, seconds: float) -> Trace:
    """A family's prompts, arriving at random at that mean rate; the same for the same family.

    Raises InvalidRequest where they would never end."""
    if not (per_second > 0 and seconds < math.inf and per_second * seconds <= MAX_ARRIVALS):
        raise InvalidRequest(
            f"{per_second:g} requests/s for {seconds:g} s are no load",
            field="rate",
            value=per_second,
            limit=MAX_ARRIVALS,
        )
    arrivals: list[Arrival] = []
    at = 0.0
    while True:
        chance = (_draw(f"{source.seed}/arrival/{len(arrivals)}") + 1) / (1 << 64)
        at -= math.log(chance) / per_second
        if at >= seconds:
            return Trace(source.name, tuple(arrivals), source.preloaded)
        arrivals.append(Arrival(at, source.prompt(len(arrivals))))


def first_arrivals(source: Family, per_second: float, count: int) -> Trace:
    """The first `count` of those that `poisson` draws. Raises as it does."""
    seconds = count / per_second
    while True:
        found = poisson(source, per_second, seconds)
        if len(found.arrivals) >= count:
            return replace(found, arrivals=found.arrivals[:count])
        seconds *= 2


def mooncake(name: str, lines: Iterable[str]) -> Trace:
    """A trace in Mooncake's format: a JSON object a line with `timestamp` (ms), `input_length` (tokens) and
    `hash_ids` (one for each 512 tokens begun). Raises InvalidRequest naming the line that is none."""
    arrivals: list[Arrival] = []
    seen: set[int] = set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            told = json.loads(line)
            at_ms, tokens, ids = float(told["timestamp"]), int(told["input_length"]), [int(i) for i in told["hash_ids"]]
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise InvalidRequest(
                f"line {number} is no request of a trace: {error}", field="line", value=number
            ) from error
        if not 0 <= at_ms <= MAX_TRACE_MS:
            raise InvalidRequest(
                f"line {number}: timestamp {at_ms:g} is not from 0 to {MAX_TRACE_MS} ms",
                field="line", value=number, limit=MAX_TRACE_MS,
            )  # fmt: skip
        if tokens < 1 or len(ids) != -(-tokens // TRACE_BLOCK_TOKENS):
            raise InvalidRequest(f"line {number}: {len(ids)} hash ids for {tokens} tokens", field="line", value=number)
        known = next((at for at, one in enumerate(ids) if one not in seen), len(ids)) * TRACE_BLOCK_TOKENS
        seen.update(ids)
        parts = [Part(f"{name}/{one}", TRACE_BLOCK_TOKENS) for one in ids]
        parts[-1] = Part(parts[-1].stream, tokens - TRACE_BLOCK_TOKENS * (len(ids) - 1))
        arrivals.append(
            Arrival(at_ms / 1e3, Prompt(tuple(parts), min(known, (tokens - 1) // ALIGN_TOKENS * ALIGN_TOKENS)))
        )
    return Trace(name, tuple(sorted(arrivals, key=lambda one: one.at_s)))


@lru_cache(maxsize=16)
def stream_tokens(stream: str, tokens: int, vocabulary: int) -> bytes:
    """The first tokens of a stream, packed. They lie below the largest power of two <= vocabulary and 65,536.

    The cache is for the prefixes that prompts share; with more entries, prompts asked once would fill it (1 MiB each).
    """
    bits = min(16, vocabulary.bit_length() - 1)
    low, high = (_masks(min(8, bits)), _masks(max(0, bits - 8)))
    noise = hashlib.shake_256(stream.encode(errors="surrogatepass"))  # a file's name may be any bytes
    packed = bytearray(4 * tokens)
    drawn = noise.digest(2 * tokens)  # of each token its low byte, then its high byte: a prefix is a prefix
    packed[0::4] = drawn[0::2].translate(low)
    packed[1::4] = drawn[1::2].translate(high)
    return bytes(packed)


def _masks(bits: int) -> bytes:
    return bytes(byte & ((1 << bits) - 1) for byte in range(256))


def _draw(name: str) -> int:
    """64 bits of chance that a name fixes."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
