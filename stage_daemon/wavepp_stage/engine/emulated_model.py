"""The model that the emulated engine pretends to run: its preset string and its numbers.

Owns the arithmetic of positions and the unsplit oracle that tests compare a whole pipeline with.
Pure numpy; no cache and no clock, and no file but a profile's. Called by `emulated.py`, the daemon's
start-up and tests.

    state[p] = sum over q <= p of mix(token[q], q)   mod 2^64

so a token's state depends on its whole prefix and on every position in it: a chunk computed on the
wrong cache, in the wrong order or twice ends in another first token.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from wavepp_proto.errors import EngineFault
from wavepp_proto.preset import values_of
from wavepp_proto.profile import Profile, StageCosts
from wavepp_proto.terms import ModelFacts, Sampling, TokenLogprob
from wavepp_stage.engine.base import EngineTraits
from wavepp_stage.engine.emulated_device import Pace

Words = npt.NDArray[np.uint64]

NAME = "emulated"
MASK = (1 << 64) - 1
LOGIT_SPAN = 8.0
"""Random logits lie in [0, LOGIT_SPAN); the greedy token stands LOGIT_LEAD above them."""
LOGIT_LEAD = 1.0

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_TOKEN = 0xD1342543DE82EF95
_U64 = np.uint64


@dataclass(frozen=True, slots=True)
class Preset:
    """What `emulated:key=value,...` says; every key is optional. `profile=FILE` says layers, window and times, so
    that beside it only `vocabulary` and `speedup` may stand. A comma ends a value: FILE has none."""

    layers: int = 32
    attention_every: int = 1
    """Every n-th layer attends (n - 1, 2n - 1, ...), the others are recurrent; 1: all attend, 0: none does."""
    vocabulary: int = 32_000
    window: int = 1_048_576
    token_us: float = 0.0
    """Modelled time of one computed token on one stage (microseconds)."""
    wave_us: float = 0.0
    """Modelled time of one wave on one stage, besides its tokens (microseconds)."""
    copy_us: float = 0.0
    """Modelled time of copying one block between device and host (microseconds)."""
    cache_thread: str = "any"
    """`engine` imitates an engine whose cache is its own: it is asked on the executor's thread alone, and every stage
    is told the tokens."""
    nan_token: int | None = None
    """A planted fault: whatever holds this token computes NaN from `nan_layer` on, so that its row is void there."""
    nan_layer: int = 0
    speedup: float = 1.0
    """Everything modelled is this many times faster; what the control plane takes stays."""
    hang: str = ""
    """For tests: a file; stage I takes away FILE.I when it is there, and does not return from the wave at hand."""
    profile: Profile | None = None

    def pace(self, stage: int, stages: int) -> Pace:
        """What work takes on one stage. Raises EngineFault when the profile has another number of stages."""
        if self.profile is None:
            return Pace(StageCosts(self.wave_us, self.token_us), self.copy_us, speedup=self.speedup)
        if stages != len(self.profile.stages):
            message = f"profile {self.profile.name} has {len(self.profile.stages)} stages, the pipeline {stages}"
            raise EngineFault(message, field="stages", value=stages, limit=len(self.profile.stages))
        own = self.profile.stages[stage]
        link = (self.profile.link_us, self.profile.link_us_per_token)
        return Pace(own.costs, own.copy_us, *link, self.speedup)

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        every = self.attention_every
        return tuple(layer for layer in range(self.layers) if not every or (layer + 1) % every)

    def nan_token_of(self, first_layer: int, last_layer: int) -> int | None:
        """The token at which the band [first_layer, last_layer) computes NaN."""
        return self.nan_token if first_layer <= self.nan_layer < last_layer else None

    def fingerprint(self) -> str:
        """Equal on stages of unequal speed, or of which one is to fail: neither is a part of the model."""
        text = (
            f"wavepp-emulated-2 layers={self.layers} attention_every={self.attention_every} "
            f"vocabulary={self.vocabulary} window={self.window}"
        )
        return hashlib.sha256(text.encode()).hexdigest()


def parse_preset(text: str) -> Preset:
    """`emulated` or `emulated:key=value,...`. Raises EngineFault naming the key, its value and the limit, and
    InvalidRequest for a profile that is none."""
    name, colon, settings = text.partition(":")
    if name != NAME or (colon and not settings):
        raise EngineFault(f"not an emulated model: {text!r}", field="model", value=text)
    values: dict[str, Any] = values_of(settings, EngineFault)
    file = values.pop("profile", None)
    return Preset(**values) if file is None else _with_profile(file, values)


def _with_profile(file: str, values: dict[str, Any]) -> Preset:
    try:
        profile = Profile.from_json(Path(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        hint = "" if os.sep in file else f"; a stage wants a file: `wavepp profile path {file}` names a shipped one's"
        raise EngineFault(f"cannot read the profile {file!r}{hint}: {error}", field="profile", value=file) from error
    sizes: dict[str, Any] = {
        "layers": profile.layers,
        "attention_every": profile.attention_every,
        "window": profile.window,
    }
    return Preset(**sizes, **values, profile=profile)


def emulated_traits(preset: str) -> EngineTraits:
    """What a daemon must know of a preset before it is loaded. Raises as `parse_preset` does."""
    thread = parse_preset(preset).cache_thread
    return EngineTraits(cache_thread=thread, needs_tokens=thread == "engine")


def emulated_model_facts(preset: str) -> ModelFacts:
    """What a controller must know of a preset. Raises as `parse_preset` does."""
    model = parse_preset(preset)
    return ModelFacts(
        name=preset,
        fingerprint=model.fingerprint(),
        layers=model.layers,
        vocabulary=model.vocabulary,
        window=model.window,
        recurrent_layers=model.recurrent_layers,
    )


def splitmix(words: Words) -> Words:
    """The splitmix64 finaliser, elementwise."""
    words = words + _U64(_GOLDEN)
    words = (words ^ (words >> _U64(30))) * _U64(_FIRST)
    words = (words ^ (words >> _U64(27))) * _U64(_SECOND)
    return words ^ (words >> _U64(31))


def splitmix_one(word: int) -> int:
    return int(splitmix(np.array([word & MASK], dtype=np.uint64))[0])


def mix(tokens: npt.NDArray[np.int32], start: int) -> Words:
    """What each token adds to the state at its position; shape [n]. `start` is the first one's position."""
    positions = np.arange(start, start + len(tokens), dtype=np.uint64)
    return splitmix(tokens.astype(np.uint64) * _U64(_TOKEN) + positions * _U64(_GOLDEN))


def continue_state(before: int, mixed: Words) -> Words:
    """States of consecutive positions after a position whose state is `before`; shape [n]."""
    return np.add.accumulate(mixed) + _U64(before)


def logits(state: int, vocabulary: int) -> npt.NDArray[np.float32]:
    """The last position's row, float32 [vocabulary]; its argmax is the greedy first token."""
    words = splitmix(np.arange(vocabulary, dtype=np.uint64) * _U64(_TOKEN) + _U64(state))
    row = ((words >> _U64(40)).astype(np.float32) * np.float32(LOGIT_SPAN / (1 << 24))).astype(np.float32)
    row[_greedy(state, vocabulary)] = np.float32(LOGIT_SPAN + LOGIT_LEAD)
    return row


def choose(state: int, vocabulary: int, sampling: Sampling) -> int:
    """The first token: greedy, or drawn from softmax(logits / temperature) by the request's seed."""
    if sampling.temperature == 0.0:
        return _greedy(state, vocabulary)
    # Shifted by the maximum before the division: a tiny temperature must not overflow.
    row = logits(state, vocabulary).astype(np.float64)
    with np.errstate(over="ignore"):  # a token that cannot be drawn: exp(-inf)
        scaled = (row - row.max()) / sampling.temperature
    weights = np.cumsum(np.exp(scaled))
    draw = splitmix_one(state ^ splitmix_one(sampling.seed)) / 2**64
    return min(int(np.searchsorted(weights, draw * weights[-1], side="right")), vocabulary - 1)


def top_logprobs(row: npt.NDArray[np.float32], count: int) -> tuple[TokenLogprob, ...]:
    """The `count` most likely tokens of a logits row, most likely first, ties by token id."""
    wide = row.astype(np.float64)
    total = float(np.log(np.sum(np.exp(wide - wide.max()))) + wide.max())
    order = np.lexsort((np.arange(len(row)), -wide))[:count]
    return tuple(TokenLogprob(int(token), float(wide[token] - total)) for token in order)


def final_state(tokens: Sequence[int] | npt.NDArray[np.int32]) -> int:
    """State of a prompt's last token, computed in one piece."""
    ids = np.asarray(tokens, dtype=np.int32)
    if not len(ids):
        raise ValueError("a prompt has at least one token")
    return int(continue_state(0, mix(ids, 0))[-1])


def expected_first_token(
    tokens: Sequence[int] | npt.NDArray[np.int32], vocabulary: int, sampling: Sampling = Sampling()
) -> int:
    """The unsplit oracle: what a pipeline of any shape must answer for this prompt."""
    return choose(final_state(tokens), vocabulary, sampling)


def _greedy(state: int, vocabulary: int) -> int:
    return splitmix_one(state) % vocabulary
