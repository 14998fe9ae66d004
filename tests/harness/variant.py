"""Which engine a run of the suite is about: `pytest --engine emulated | engine-thread | trtllm`.

Owns what that changes: the model that a test's `emulated:` preset stands for, how daemons are started, and the
unsplit oracle. Tests keep saying `emulated:layers=8,...`; what cannot be said of another engine is marked
`engines` with a reason (tests/conftest.py).

    emulated       the default
    engine-thread  the emulated engine as if it owned its cache: admission runs on its thread
    trtllm         the adapter on tests/fake_trtllm, a tiny Llama of the preset's layers, vocabulary and window;
                   TensorRT-LLM's state is its process's, so every stage is a process
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pytest

from wavepp_proto.terms import Sampling
from wavepp_stage.engine import emulated
from wavepp_stage.engine.emulated_model import parse_preset

ENGINES: Final = ("emulated", "engine-thread", "trtllm")
SETTING: Final = "WAVEPP_TEST_ENGINE"
"""Where conftest.py leaves the choice, also for the processes of xdist."""
FAKE: Final = Path(__file__).parents[1] / "fake_trtllm"
_served: Final[list[Path]] = []
"""Models that clusters of this process were started with."""


def chosen_engine() -> str:
    return os.environ.get(SETTING, ENGINES[0])


def in_processes() -> bool:
    """Stages are processes; their controller may be an object of the test all the same."""
    return chosen_engine() == "trtllm"


@dataclass(frozen=True)
class Chosen:
    """How daemons are to be started for a preset."""

    engine: str
    model: str
    device: str | None = None
    environment: dict[str, str] = field(default_factory=dict)
    """Of the daemons' processes."""


def choose(engine_name: str, model: str, wave_tokens: int) -> Chosen:
    """What stands for `model` in this run: a preset's likeness, or a torch engine's folder itself. Skips the test if
    nothing can."""
    stand_in = {"PYTHONPATH": os.pathsep.join(filter(None, (str(FAKE), os.environ.get("PYTHONPATH"))))}
    if engine_name == "torch" and in_processes():
        return Chosen("trtllm", model, "cpu", stand_in)
    if engine_name != "emulated" or chosen_engine() == "emulated":
        return Chosen(engine_name, model)
    if chosen_engine() == "engine-thread":
        return Chosen(engine_name, model + ("," if ":" in model else ":") + "cache_thread=engine")
    preset = parse_preset(model)
    if preset.recurrent_layers:
        pytest.skip("the trtllm engine serves no recurrent layers")
    # The stand-in takes one time for every wave: that of a full one.
    wave_ms = round((preset.wave_us + preset.token_us * wave_tokens) / 1000)
    environment = stand_in | ({"FAKE_TRTLLM_FORWARD_MS": str(wave_ms)} if wave_ms else {})
    _served.append(model_folder(preset.layers, preset.vocabulary, preset.window))
    return Chosen("trtllm", str(_served[-1]), "cpu", environment)


def servable(preset: str) -> str:
    """`preset`, without recurrent layers where this run's engine serves none: for tests that are not about them."""
    if not in_processes():
        return preset
    name, _, settings = preset.partition(":")
    return name + ":" + ",".join(one for one in settings.split(",") if not one.startswith("attention_every="))


@contextmanager
def environment(chosen: Chosen) -> Iterator[None]:
    """Every process that is started meanwhile has it."""
    before = {name: os.environ.get(name) for name in chosen.environment}
    os.environ.update(chosen.environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@functools.cache
def model_folder(layers: int, vocabulary: int, window: int) -> Path:
    """A tiny random Llama, made once for all runs of this user."""
    from transformers import LlamaConfig

    from tests.harness.tiny_models import save_random

    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
        num_hidden_layers=layers, vocab_size=vocabulary, max_position_embeddings=window,
        # Wide enough that logits of different prompts differ visibly.
        initializer_range=0.2, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    root = Path(tempfile.gettempdir()) / f"wavepp-trtllm-models-{os.getuid()}"
    root.mkdir(exist_ok=True)
    return save_random(config, root / f"llama-{layers}-{vocabulary}-{window}")


def expected_first_token(
    tokens: Sequence[int] | npt.NDArray[np.int32], vocabulary: int, sampling: Sampling = Sampling()
) -> int:
    """The unsplit oracle of this run's engine; in processes that of the model that was chosen last, for greedy
    sampling alone."""
    if not in_processes():
        return emulated.expected_first_token(tokens, vocabulary, sampling)
    from tests.harness.tiny_models import unsplit_logits

    assert sampling == Sampling(), "the oracle is greedy"
    assert _served, "no cluster was started"
    logits = unsplit_logits(_served[-1], np.asarray(tokens, np.int32).tolist())
    assert len(logits) == vocabulary, "the cluster that was started last serves another model"
    return int(logits.argmax())
