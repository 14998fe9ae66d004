"""The device blocks of one stage: which are free, and which wait for an executor to stop.

Every block of the pool is in exactly one place, and the counts sum to the pool size:

    | free | cached | held | quarantined |

    free         on this pool's stack
    cached       a tree node's block that nobody holds: reusable, evictable
    held         a tree node's block somebody holds, or a private block of a sequence
    quarantined  freed by a formation's end; its executor may still touch it

    free ──materialise──▶ held ──release──▶ cached (published) or free (private)
    cached ──lease──▶ held          cached ──evict, off-load──▶ held (the block goes straight to its taker)
    held ──formation end──▶ quarantined ──executor stopped──▶ free

A block that is to be filled from the host is held by its copy lot until that has ended. Owns `free` and
`quarantined`; `cached` and node-held blocks live in tier.py, private blocks in holds.py, blocks on their
way in copies.py. residency.py and block_cache.py are the callers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from wavepp_stage.core.id_stack import IdStack

Blocks = npt.NDArray[np.int32]
"""Device block ids, each 0 <= id < pool size."""


class BlockPool:
    """Blocks 0 .. size - 1."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._unused = IdStack(0, size)
        self._quarantine: dict[int, list[Blocks]] = {}

    @property
    def free(self) -> int:
        return len(self._unused)

    @property
    def quarantined(self) -> int:
        return sum(len(blocks) for lot in self._quarantine.values() for blocks in lot)

    def take(self, count: int) -> Blocks:
        """`count` <= `free` blocks, the last freed first."""
        return self._unused.take(count).astype(np.int32)

    def give(self, blocks: Blocks) -> None:
        """Free `blocks`; blocks[0] is the next one taken."""
        self._unused.give(blocks)

    def quarantine(self, formation: int, blocks: Blocks) -> None:
        """Keep `blocks` from everybody until `formation`'s executor has stopped."""
        self._quarantine.setdefault(formation, []).append(blocks)

    def executor_stopped(self, formation: int) -> None:
        for blocks in self._quarantine.pop(formation, ()):
            self.give(blocks)

    def unheld(self) -> Blocks:
        """Every free or quarantined block (for `check`)."""
        lots = [blocks for lot in self._quarantine.values() for blocks in lot]
        return np.concatenate([self._unused.all().astype(np.int32), *lots])
