"""The unsplit model, by transformers alone: computes what every answer must equal.

Runs as a process of its own (`python -m wavepp.demo.unsplit ORDER`), started by `reference.py` after
the cluster has ended. Uses nothing of WavePP: each prompt whole, in one forward, without any cache.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


def compute(order: dict[str, Any]) -> None:
    """Last-position logits of each prompt, written as float32 [prompts, vocabulary]; a line printed for each."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    quiet: Any = logging
    quiet.disable_progress_bar()
    models: Any = AutoModelForCausalLM
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[order["dtype"]]
    model = models.from_pretrained(order["model"], dtype=dtype, local_files_only=True).eval()
    rows = []
    with torch.inference_mode():
        for number, token_ids in enumerate(order["prompts"]):
            began = time.monotonic()
            output = model(torch.tensor([token_ids]), logits_to_keep=1, use_cache=False)
            rows.append(output.logits[0, -1].float().numpy())
            print(f"{number} {time.monotonic() - began:.3f}", flush=True)
    np.save(order["out"], np.stack(rows), allow_pickle=False)


if __name__ == "__main__":
    compute(json.loads(Path(sys.argv[1]).read_bytes()))
