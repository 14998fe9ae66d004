"""Requests that run in this formation: where each stands, and their rows as work for the engine.

Owns the next position of every materialised request. A row whose request cannot run is a request
fault: it raises RowVoided and the wave flows on without it. Does not own blocks and states (the cache
manager) or wave order (waves.py); served_formation.py is the only caller.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from wavepp_proto.errors import RowVoided
from wavepp_proto.hashing import blocks_for, full_blocks
from wavepp_proto.terms import HoldKey, JoinPlan, Row
from wavepp_stage.core.announcements import Announcement, Announcements
from wavepp_stage.core.cache_manager import CacheManager, Materialised
from wavepp_stage.core.holds import Phase
from wavepp_stage.core.work import RowWork

_MATERIALISABLE = (Phase.COMMITTED.value, Phase.MATERIALISING.value)
_NO_BLOCKS = np.empty(0, dtype=np.int32)
_NO_HASHES = np.empty(0, dtype=np.uint64)


def void_row(row: Row) -> RowWork:
    """A row that flows and computes nothing."""
    return RowWork(row.key, row.start, row.length, _NO_BLOCKS, _NO_HASHES, None, None, void=True)


class Sequences:
    """Materialised requests of one formation."""

    def __init__(self, plan: JoinPlan, cache: CacheManager, announcements: Announcements) -> None:
        self._cache = cache
        self._announcements = announcements
        self._block_tokens = plan.block_tokens
        self._samples = plan.key.stage == plan.stages - 1 and plan.key.rank == 0
        self._next: dict[HoldKey, int] = {}
        """Tokens of each request that are computed or in a prepared wave."""
        self._failed: dict[HoldKey, RowVoided] = {}
        """Requests that lost a copy while they were materialised; told by the row that needed it."""

    def __len__(self) -> int:
        return len(self._next)

    def __contains__(self, key: HoldKey) -> bool:
        return key in self._next

    def __iter__(self) -> Iterator[HoldKey]:
        return iter(self._next)

    def materialise(self, row: Row) -> Materialised:
        """Materialise the row's request before its first row, a slice at a time.

        DONE as well when it cannot be: a fault of this row, found when it is prepared."""
        key = row.key
        if key in self._next or key in self._failed:
            return Materialised.DONE
        state = self._cache.hold_state(key)
        if state is None or state.phase not in _MATERIALISABLE:
            return Materialised.DONE
        try:
            reached = self._cache.materialise(key)
        except RowVoided as error:
            self._failed[key] = error
            return Materialised.DONE
        if reached is Materialised.DONE and self._cache.hold_state(key) is not None:
            self._next[key] = state.endpoint  # else a release waited for this end
        return reached

    def prepare(self, row: Row) -> RowWork:
        """The row of a materialised request as work; a second call would be a second row. Raises RowVoided."""
        failed = self._failed.pop(row.key, None)
        if failed is not None:
            raise failed
        announcement = self._announcements.get(row.key)
        if announcement is None:
            raise _fault(row, "the request is not known here", "request_id", row.key.request_id)
        if row.key not in self._next:
            state = self._cache.hold_state(row.key)
            phase = state.phase if state else "none"
            raise _fault(row, "the request is not committed here", "phase", phase, Phase.COMMITTED.value)
        end = self._check(row, announcement)
        recurrent = self._cache.plan_state(row.key, row.start, row.snapshots)
        self._next[row.key] = end
        size, tokens = self._block_tokens, announcement.token_ids
        return RowWork(
            row.key,
            row.start,
            row.length,
            blocks=self._cache.table(row.key)[: blocks_for(end, size)].copy(),
            prefix_hashes=announcement.hashes.shorts[: full_blocks(end, size)],
            token_ids=None if tokens is None else tokens[row.start : end],
            sampling=announcement.sampling if self._samples and row.final else None,
            trace=announcement.trace,
            state=recurrent,
        )

    def forget(self, key: HoldKey) -> None:
        self._next.pop(key, None)
        self._failed.pop(key, None)

    def _check(self, row: Row, announcement: Announcement) -> int:
        """End of the row (tokens), if it continues the sequence."""
        at, end = self._next[row.key], row.start + row.length
        if row.start != at:
            raise _fault(row, "the chunk does not start where the sequence stands", "start", row.start, at)
        if end > announcement.prompt_tokens:
            raise _fault(row, "the chunk ends beyond its prompt", "end", end, announcement.prompt_tokens)
        if row.final != (end == announcement.prompt_tokens):
            raise _fault(row, "only the chunk that ends the prompt is final", "end", end, announcement.prompt_tokens)
        return end


def _fault(row: Row, message: str, field: str, value: str | int, limit: str | int | None = None) -> RowVoided:
    return RowVoided(
        message, field=field, value=value, limit=limit, request_id=row.key.request_id, attempt=row.key.attempt
    )
