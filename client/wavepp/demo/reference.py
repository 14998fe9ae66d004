"""Asks the unsplit model (a process of its own, `unsplit.py`) for the logits of given prompts.

Owns the files that go in and out, and that a prompt asked twice is computed once. Called by
`story.py` when the cluster is gone, so that the timed run has the machine to itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt

from wavepp.demo.helper_process import run_module

TIMEOUT_S = 600.0


async def unsplit_logits(
    model: Path, dtype: str, prompts: Sequence[tuple[int, ...]], log: Path, done: Callable[[int], None]
) -> npt.NDArray[np.float32]:
    """Last-position logits, [len(prompts), vocabulary]; `done` hears the number of tokens of each finished prompt.

    Raises EngineFault if the model cannot be loaded or takes too long."""
    distinct = list(dict.fromkeys(prompts))
    with TemporaryDirectory(prefix="wavepp-demo-") as scratch:
        out = Path(scratch) / "logits.npy"
        order = Path(scratch) / "order.json"
        order.write_text(
            json.dumps({"model": str(model), "dtype": dtype, "prompts": distinct, "out": str(out)}, allow_nan=False),
            encoding="utf-8",
        )

        def hear(line: str) -> None:
            done(len(distinct[int(line.split()[0])]))

        await run_module("wavepp.demo.unsplit", [str(order)], log, hear, TIMEOUT_S)
        logits: npt.NDArray[np.float32] = np.load(out, allow_pickle=False)
    position = {token_ids: row for row, token_ids in enumerate(distinct)}
    return logits[[position[token_ids] for token_ids in prompts]]
