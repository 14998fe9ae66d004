"""Pages and the memory they lie in: tiers with quotas, moves between them, eviction.

Owns slot allocation, the three states of a page and the bytes of every slot. Knows no sequence; of
the tree it knows that a page may belong to a block, which it asks the tree to drop.

    LOCKED  (locks > 0)   on the device, stays there
    HELD    (holds > 0)   may move to a lower level, is never dropped
    DROPPABLE             moved while a lower level has room, else dropped; least recently used first
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ._common import GPU_LEVEL, OutOfPagesError, PageStatus

if TYPE_CHECKING:
    from ._tree import Block

POISON = 0xFF
"""Byte of slots whose content nobody may read: as float32 it is a NaN."""


@dataclass(eq=False, slots=True)
class Page:
    group: int
    level: int
    slot: int
    block: Block | None = None
    """None until committed."""
    locks: int = 0
    holds: int = 0

    @property
    def status(self) -> PageStatus:
        if self.locks:
            return PageStatus.LOCKED
        return PageStatus.HELD if self.holds else PageStatus.DROPPABLE


@dataclass(eq=False)
class Pool:
    """The slots of one layer group on one level."""

    memory: torch.Tensor
    """uint8 [slots, bytes per slot]."""
    free: list[int] = field(default_factory=list)
    droppable: dict[Page, None] = field(default_factory=dict)
    """In order of last use."""
    held: dict[Page, None] = field(default_factory=dict)
    pages: set[Page] = field(default_factory=set)

    @property
    def total(self) -> int:
        return len(self.memory)


@dataclass(frozen=True)
class StorageStatistics:
    slot_sizes: list[int]
    total: int
    free: int
    evictable: int

    @property
    def available(self) -> int:
        return self.free + self.evictable

    @property
    def unavailable(self) -> int:
        return self.total - self.available


def _pool(slots: int, size: int) -> Pool:
    memory = torch.full((slots, size), POISON, dtype=torch.uint8)
    return Pool(memory, free=list(range(slots - 1, -1, -1)))


class Storage:
    """`slots[level][group]` slots of `sizes[group]` bytes."""

    def __init__(self, slots: list[list[int]], sizes: list[int]) -> None:
        self.sizes = sizes
        self.levels = [[_pool(count, size) for count, size in zip(row, sizes, strict=True)] for row in slots]
        self.on_drop: Callable[[Page], None] = lambda page: None
        """The tree drops the block of a page (and what hangs on it), releasing the pages through `release`."""
        self.on_move: Callable[[Page, int], None] = lambda page, old_level: None

    # --- states ----------------------------------------------------------------------------------

    def _file(self, page: Page) -> None:
        pool = self.levels[page.level][page.group]
        pool.droppable.pop(page, None)
        pool.held.pop(page, None)
        if page.status is PageStatus.HELD:
            pool.held[page] = None
        elif page.status is PageStatus.DROPPABLE:
            pool.droppable[page] = None

    def hold(self, page: Page) -> None:
        page.holds += 1
        self._file(page)

    def unhold(self, page: Page) -> None:
        """A page that nobody holds and that is in no block is gone."""
        assert page.holds > 0, "a hold was given back twice"
        page.holds -= 1
        self._file(page)
        if page.block is None and page.status is PageStatus.DROPPABLE:
            self.release(page)

    def lock(self, page: Page) -> None:
        assert page.level == GPU_LEVEL, "only pages on the device are locked"
        assert page.holds, "only held pages are locked"
        page.locks += 1
        self._file(page)

    def unlock(self, page: Page) -> None:
        assert page.locks > 0, "a lock was given back twice"
        page.locks -= 1
        self._file(page)

    # --- slots -----------------------------------------------------------------------------------

    def obtainable(self, level: int, group: int) -> int:
        """Slots that `take` can give on this level: free, to be dropped, and held ones that fit below."""
        pool = self.levels[level][group]
        below = self.obtainable(level + 1, group) if level + 1 < len(self.levels) else 0
        return len(pool.free) + len(pool.droppable) + min(len(pool.held), below)

    def take(self, level: int, group: int, count: int) -> list[Page]:
        """New uncommitted pages without a holder, all or none. Raises OutOfPagesError."""
        if self.obtainable(level, group) < count:
            raise OutOfPagesError(f"{count} pages of group {group} on level {level}")
        self._make_room(level, group, count)
        pool = self.levels[level][group]
        made = [Page(group, level, pool.free.pop()) for _ in range(count)]
        for page in made:
            pool.memory[page.slot] = POISON
            pool.pages.add(page)
        return made

    def _make_room(self, level: int, group: int, count: int) -> None:
        pool = self.levels[level][group]
        while len(pool.free) < count:
            short = count - len(pool.free)
            if pool.droppable:
                page = next(iter(pool.droppable))
                must_move = max(0, short - len(pool.droppable))
                below = self.obtainable(level + 1, group) if level + 1 < len(self.levels) else 0
                if below > must_move:
                    self._move(page, level + 1)
                else:
                    self.on_drop(page)
            else:
                self._move(next(iter(pool.held)), level + 1)

    def _move(self, page: Page, level: int) -> None:
        """To another level; making room there may drop pages, even this one."""
        old = page.level
        source, target = self.levels[old][page.group], self.levels[level][page.group]
        self._make_room(level, page.group, 1)
        if page not in source.pages:
            return
        slot = target.free.pop()
        target.memory[slot] = source.memory[page.slot]
        self._forget(source, page)
        page.level, page.slot = level, slot
        target.pages.add(page)
        self._file(page)
        self.on_move(page, old)

    def onboard(self, pages: list[Page], level: int = GPU_LEVEL) -> None:
        """Bring held pages to `level`, all or none. Raises OutOfPagesError."""
        away = [page for page in pages if page.level > level]
        for group in {page.group for page in away}:
            needed = sum(page.group == group for page in away)
            if self.obtainable(level, group) < needed:
                raise OutOfPagesError(f"{needed} pages of group {group} to bring to level {level}")
        for page in away:
            self._move(page, level)

    def copy(self, source: Page, target: Page) -> None:
        content = self.levels[source.level][source.group].memory[source.slot]
        self.levels[target.level][target.group].memory[target.slot] = content

    def release(self, page: Page) -> None:
        """The page is gone and its slot is free."""
        assert page.status is PageStatus.DROPPABLE, "a page in use was dropped"
        self._forget(self.levels[page.level][page.group], page)

    def _forget(self, pool: Pool, page: Page) -> None:
        pool.droppable.pop(page, None)
        pool.held.pop(page, None)
        pool.pages.remove(page)
        pool.memory[page.slot] = POISON
        pool.free.append(page.slot)

    # --- facts -----------------------------------------------------------------------------------

    def statistics(self, level: int) -> list[StorageStatistics]:
        moves = level + 1 < len(self.levels)
        return [
            StorageStatistics([size], pool.total, len(pool.free), len(pool.droppable) + moves * len(pool.held))
            for pool, size in zip(self.levels[level], self.sizes, strict=True)
        ]

    def utilization(self, level: int) -> float:
        """Of the fullest group: the share of slots that are neither free nor evictable."""
        return max((entry.unavailable / entry.total for entry in self.statistics(level) if entry.total), default=0.0)

    def check(self) -> None:
        """Every slot is free or one page's, and the lists say what the pages say."""
        for level, pools in enumerate(self.levels):
            for group, pool in enumerate(pools):
                slots = [*pool.free, *(page.slot for page in pool.pages)]
                assert sorted(slots) == list(range(pool.total)), (level, group, sorted(slots))
                assert all((page.level, page.group) == (level, group) for page in pool.pages)
                for status, listed in ((PageStatus.DROPPABLE, pool.droppable), (PageStatus.HELD, pool.held)):
                    assert set(listed) == {page for page in pool.pages if page.status is status}
