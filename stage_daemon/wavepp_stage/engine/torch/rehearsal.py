"""The most demanding wave of a plan: as many tokens as fit in one, at the end of the longest sequence.

Owns its shape alone: one row over scattered blocks, so that attention gathers all keys that a sequence can
have. `engine.py` runs it after a load on CUDA, before anything is cached.
"""

from __future__ import annotations

import numpy as np

from wavepp_proto.terms import Attempt, Formation, HoldKey, RequestId, Sampling, WaveOrdinal
from wavepp_stage.engine.base import EnginePlan, RowWork, StateWork, WaveWork
from wavepp_stage.engine.torch.model import Band


def rehearsal_wave(plan: EnginePlan, band: Band) -> WaveWork:
    end = min(band.model.config.max_position_embeddings, plan.pool_blocks * plan.block_tokens)
    length = min(plan.wave_tokens, end)
    row = RowWork(
        key=HoldKey(RequestId("rehearsal"), Attempt(0)),
        start=end - length,
        length=length,
        blocks=np.arange(-(-end // plan.block_tokens), dtype=np.int32)[::-1],
        prefix_hashes=np.zeros(0, np.uint64),
        token_ids=np.zeros(length, np.int32) if plan.is_first else None,
        sampling=Sampling() if plan.is_last else None,
        state=StateWork(0, None, ()) if band.recurrent_layers else None,
    )
    return WaveWork(Formation(0), WaveOrdinal(0), (row,), bytes(16))
