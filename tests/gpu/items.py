"""What a check of a GPU host is made of: items with a verdict each, and what they share.

Owns no check itself. `engine_items.py`, `link_items.py` and `cluster_items.py` hold them, `check.py` runs
them. An item raises AssertionError (or anything) to fail, Skip to say why it does not apply, and returns a
line of what it found.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tests.harness import tiny_models

_FACTORY: Any = AutoModelForCausalLM  # its classmethods carry no types


class Skip(Exception):
    """The item does not apply here; says why."""


@dataclass
class Host:
    """Where the items run, and the models that they use (made once)."""

    device: torch.device
    folder: Path
    figures: dict[str, Any] = field(default_factory=dict)
    """For the report: whatever an item measured."""

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def need_cuda(self) -> None:
        if not self.cuda:
            raise Skip("a matter of CUDA alone")

    def gpus(self, count: int) -> list[torch.device]:
        self.need_cuda()
        if torch.cuda.device_count() < count:
            raise Skip(f"needs {count} GPUs, there is {torch.cuda.device_count()}")
        return [torch.device("cuda", index) for index in range(count)]

    def model(self, family: str = "llama") -> Path:
        return tiny_models.build(family, self.folder)


@dataclass(frozen=True)
class Verdict:
    item: str
    verdict: str
    """pass, fail or skipped."""
    detail: str
    seconds: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


Check = Callable[[Host], str]


def judge(name: str, check: Check, host: Host) -> Verdict:
    began = time.perf_counter()
    try:
        verdict, detail = "pass", check(host)
    except Skip as why:
        verdict, detail = "skipped", str(why)
    except Exception as error:  # any failure is a verdict, and the other items still count
        last = traceback.extract_tb(error.__traceback__)[-1]
        verdict = "fail"
        detail = f"{type(error).__name__}: {str(error).strip() or last.line} ({Path(last.filename).name}:{last.lineno})"
    return Verdict(name, verdict, detail, round(time.perf_counter() - began, 2))


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, tiny_models.VOCABULARY, tokens)]


class Unsplit:
    """The whole model by transformers alone: what every answer is compared with."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self._device = device
        self._model = _FACTORY.from_pretrained(folder, dtype=dtype).to(device).eval()

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> np.ndarray[Any, Any]:
        """float32 [vocabulary], of the last position."""
        found = self._model(torch.tensor([token_ids], device=self._device), logits_to_keep=1).logits[0, -1]
        made: np.ndarray[Any, Any] = found.float().cpu().numpy()
        return made


FLOAT32_TOLERANCE = 5e-4
"""Largest difference of a logit, of the tiny models' few units. TF32 alone would make ten times as much."""


def distance(logits: bytes, expected: np.ndarray[Any, Any]) -> float:
    return float(np.abs(np.frombuffer(logits, "<f4") - expected).max())
