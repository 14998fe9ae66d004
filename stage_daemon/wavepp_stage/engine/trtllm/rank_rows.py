"""Which rows of a wave all ranks of one stage run, or that none of them runs it.

Owns that agreement, made before TensorRT-LLM's own collectives begin: whoever entered those alone would wait in them,
and nothing can call it back. A rank whose formation ends before it comes to a wave never comes, so the others may stop
waiting, unless by then all have come: one word in a store, written once, says which of the two it was. `engine.py`
asks, on the executor's thread; `group.py` makes it.
"""

from __future__ import annotations

import time

from wavepp_proto.errors import EngineFault, FormationEnded
from wavepp_stage.core.work import WaveWork
from wavepp_stage.engine.bounded_store import Store

GO, OVER = b"go", b"over"
POLL_S = 0.001


class RankRows:
    """Of one load; every rank of the stage has one, on the same store."""

    def __init__(self, store: Store, rank: int, ranks: int, wait_s: float) -> None:
        self._store, self._rank, self._ranks, self._wait_s = store, rank, ranks, wait_s
        self._before = ""
        """The wave that was agreed on last."""

    def void_anywhere(self, wave: WaveWork, void: int) -> int:
        """Rows that are void on any rank, of a wave that all of them are about to run. Raises FormationEnded if no
        rank runs it, EngineFault if one did not come in time."""
        name = f"{wave.epoch}.{wave.formation}.{wave.ordinal}"
        self._store.set(f"{name}/{self._rank}", f"{void:x}")
        last = self._store.add(f"{name}/came", 1) == self._ranks
        verdict = self._say(name, GO) if last else self._await(name, wave)
        if verdict != GO:
            raise FormationEnded("not every rank of the stage came to this wave", wave=wave.ordinal)
        for rank in range(self._ranks):
            void |= int(self._store.get(f"{name}/{rank}"), 16)
        self._forget_before(name)
        return void

    def _await(self, name: str, wave: WaveWork) -> bytes:
        deadline = time.monotonic() + self._wait_s
        while not self._store.check([f"{name}/verdict"]):
            if wave.ended is None:
                time.sleep(POLL_S)
            elif wave.ended(POLL_S):
                return self._say(name, OVER)
            if time.monotonic() > deadline and self._say(name, OVER) != GO:
                raise EngineFault(
                    "a rank of this stage did not come to the wave", field="rank", value=wave.ordinal,
                    limit=f"{self._wait_s:g} s",
                )  # fmt: skip
        return self._store.get(f"{name}/verdict")

    def _say(self, name: str, word: bytes) -> bytes:
        """The first word stands."""
        return self._store.compare_set(f"{name}/verdict", "", word.decode())

    def _forget_before(self, name: str) -> None:
        """All have come to this wave, so nobody reads what the one before left."""
        before, self._before = self._before, name
        if before and self._rank == 0:
            for key in ("came", "verdict", *range(self._ranks)):
                self._store.delete_key(f"{before}/{key}")
