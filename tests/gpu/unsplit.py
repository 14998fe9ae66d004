"""The model that every answer is compared with, the prompts, and how far apart logits may be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tests.harness.tiny_models import VOCABULARY

_FACTORY: Any = AutoModelForCausalLM  # its classmethods carry no types


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, VOCABULARY, tokens)]


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
