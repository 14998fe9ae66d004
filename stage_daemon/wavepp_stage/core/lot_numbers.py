"""Numbers of the copy lots between the core and the copy thread.

A cache counts its lots from 1; the copy thread sees one sequence for the life of the daemon. So the end
of a copy that a replaced cache asked for is never taken for one of its successor's. Does not own what is
copied (the cache manager); machine.py is the only caller.
"""

from __future__ import annotations

from dataclasses import replace

from wavepp_stage.core.cache_manager import CacheManager
from wavepp_stage.core.work import CopyLot


class LotNumbers:
    """Over all caches that this daemon had."""

    def __init__(self) -> None:
        self._base = 0
        """Last number that an earlier cache gave out: lot n of the present one is `_base` + n outside."""
        self._last = 0

    def take(self, cache: CacheManager) -> list[CopyLot]:
        """Lots to be started now, in order."""
        lots = [replace(lot, number=self._base + lot.number) for lot in cache.take_lots()]
        if lots:
            self._last = lots[-1].number
        return lots

    def ended(self, cache: CacheManager, number: int, ok: bool) -> None:
        """Lot `number` is complete or has failed; what a replaced cache asked for concerns nobody."""
        if number > self._base:
            cache.copied(number - self._base, ok)

    def cache_replaced(self) -> None:
        """The next lots come from another cache."""
        self._base = self._last
