"""One sequence's cache: what it holds, how far it is computed, what it gave to the tree.

Owns the order num_committed_tokens <= history_length <= capacity and the states SUSPENDED (at first),
ACTIVE, CLOSED. A suspended sequence holds its pages; an active one has locked them on the device and
has their numbers in its page index buffers. Only `_manager.py` makes one.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..._fake.owner import Owner, owned
from ._commit import SeqBlock, commit_block
from ._common import GPU_LEVEL, LogicError, OutOfPagesError, ReuseScope, Tokens
from ._page_indices import PageIndices
from ._storage import Page
from ._tree import Match

if TYPE_CHECKING:
    from ._manager import KVCacheManager


class _Status(enum.Enum):
    ACTIVE = enum.auto()
    SUSPENDED = enum.auto()
    CLOSED = enum.auto()


KvCacheStatus = _Status


class _KVCache(PageIndices):
    Status = _Status

    def __init__(
        self,
        manager: KVCacheManager,
        reuse_scope: ReuseScope,
        reuse_match: Match | None,
        id: Any,
        custom_priority_callback: Any = None,
        expected_prompt_length: int | None = None,
        text_only: bool | None = None,
        enable_request_stats: bool = False,
    ) -> None:
        super().__init__()
        self.id = id
        self.cuda_stream: int | None = None
        self.manager = manager
        self.reuse_scope = reuse_scope
        self._storage = manager.storage
        self.tokens: list[int] = []
        self._history = self._capacity = 0
        self.blocks: list[SeqBlock] = []
        self.recurrent: Page | None = None
        """The working state once resumed; before that the snapshot to begin with."""
        self._status = _Status.SUSPENDED
        self._never_resumed = True
        self._committing = True
        if reuse_match is not None and reuse_match.num_tokens:
            self._claim(reuse_match)

    def _claim(self, match: Match) -> None:
        attention, recurrent = self.manager.attention_group, self.manager.recurrent_group
        for block in match.blocks:
            page = block.pages[attention] if attention is not None else None
            if page is not None:
                self._storage.hold(page)
            self.blocks.append(SeqBlock(page, block))
            self.tokens.extend(block.tokens)
        del self.tokens[match.num_tokens :]
        if recurrent is not None:
            self.recurrent = match.blocks[-1].pages[recurrent]
            self._storage.hold(self.recurrent)
        self._history = self._capacity = match.num_tokens

    @property
    def owner(self) -> Owner:
        return self.manager.owner

    # --- lengths ---------------------------------------------------------------------------------

    @property
    def tokens_per_block(self) -> int:
        return self.manager.tokens_per_block

    @property
    def status(self) -> _Status:
        return self._status

    @property
    def is_active(self) -> bool:
        return self._status is _Status.ACTIVE

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_committed_tokens(self) -> int:
        return len(self.tokens)

    @property
    def committed_tokens(self) -> list[int]:
        return list(self.tokens)

    @property
    def history_length(self) -> int:
        return self._history

    @history_length.setter
    def history_length(self, history_length: int) -> None:
        if not self.resize(None, history_length):
            raise OutOfPagesError("history")

    @property
    def capacity(self) -> int:
        return self._capacity

    @capacity.setter
    def capacity(self, capacity: int) -> None:
        if not self.resize(capacity):
            raise OutOfPagesError("capacity")

    @property
    def cached_tokens_by_level(self) -> list[int]:
        counts = [0] * len(self._storage.levels)
        for index, block in enumerate(self.blocks):
            if block.tree is not None and block.page is not None:
                start = index * self.tokens_per_block
                counts[block.page.level] += min(self.tokens_per_block, len(self.tokens) - start)
        return counts

    @owned
    def resize(self, capacity: int | None, history_length: int | None = None) -> bool:
        """All or nothing: False leaves the sequence unchanged."""
        assert self._status is _Status.ACTIVE, "only an active sequence is resized"
        capacity = self._capacity if capacity is None else capacity
        history = self._history if history_length is None else history_length
        if history < self._history:
            raise ValueError("History length cannot be decreased")
        if capacity < history:
            raise ValueError("History length cannot be greater than capacity")
        count = -(-capacity // self.tokens_per_block)
        if count > len(self.blocks):
            if self._shortest() < count:
                raise ValueError("User-provided base page indices is too short")
            try:
                pages = self._new_pages(self.manager.attention_group, count - len(self.blocks))
            except OutOfPagesError:
                return False
            self.blocks.extend(SeqBlock(page, None) for page in pages)
        while len(self.blocks) > count:
            self._drop_last()
        self._capacity, self._history = capacity, history
        self._write()
        return True

    def _new_pages(self, group: int | None, count: int) -> list[Page | None]:
        """Locked pages on the device; placeholders on a stage without attention layers."""
        if group is None:
            return [None] * count
        pages = self._storage.take(GPU_LEVEL, group, count)
        for page in pages:
            self._storage.hold(page)
            self._storage.lock(page)
        return [*pages]

    def _drop_last(self) -> None:
        block = self.blocks.pop()
        if block.page is not None:
            self.give_back(block.page)

    def give_back(self, page: Page) -> None:
        if self.is_active:
            self._storage.unlock(page)
        self._storage.unhold(page)

    def _pages(self, layer_group_id: int) -> list[Page | None]:
        if layer_group_id == self.manager.recurrent_group:
            return [self.recurrent]
        return [block.page for block in self.blocks]

    # --- states ----------------------------------------------------------------------------------

    def _owned(self) -> list[Page]:
        pages = [block.page for block in self.blocks if block.page is not None]
        return pages if self.recurrent is None else [*pages, self.recurrent]

    @owned
    def resume(self, cuda_stream: int | None = None) -> bool:
        """Bring every page to the device and lock it; False leaves everything where it was."""
        assert self._status is _Status.SUSPENDED
        if cuda_stream is not None:
            self.cuda_stream = cuda_stream
        assert self.cuda_stream is not None, "cuda_stream is never set"
        if self.manager.refuses_resume():
            return False
        owned = self._owned()
        here = [page for page in owned if page.level == GPU_LEVEL]
        for page in here:
            self._storage.lock(page)
        try:
            fresh = self._private_pages(owned)
            self._storage.onboard(owned)
        except OutOfPagesError:
            for page in here:
                self._storage.unlock(page)
            return False
        for page in owned:
            if page not in here:
                self._storage.lock(page)
        self._status = _Status.ACTIVE
        if self._never_resumed:
            self._copy_private(fresh)
        self._never_resumed = False
        self._write()
        return True

    def _private_pages(self, owned: list[Page]) -> dict[int, Page]:
        """For what a first resume copies (a partial last block, the snapshot): all or nothing, with the onboarding."""
        attention, recurrent = self.manager.attention_group, self.manager.recurrent_group
        groups: list[int] = []
        if self._never_resumed and attention is not None and len(self.tokens) % self.tokens_per_block:
            groups.append(attention)
        if self._never_resumed and recurrent is not None:
            groups.append(recurrent)
        for group in {*groups, *(page.group for page in owned)}:
            needed = groups.count(group) + sum(page.group == group and page.level > GPU_LEVEL for page in owned)
            if self._storage.obtainable(GPU_LEVEL, group) < needed:
                raise OutOfPagesError(f"{needed} pages of group {group}")
        fresh: dict[int, Page] = {}
        for group in groups:
            (page,) = self._storage.take(GPU_LEVEL, group, 1)
            self._storage.hold(page)
            self._storage.lock(page)
            fresh[group] = page
        return fresh

    def _copy_private(self, fresh: dict[int, Page]) -> None:
        attention, recurrent = self.manager.attention_group, self.manager.recurrent_group
        if attention is not None and attention in fresh:
            last = self.blocks[-1]
            assert last.page is not None
            self._storage.copy(last.page, fresh[attention])
            self.give_back(last.page)
            self.blocks[-1] = SeqBlock(fresh[attention], None)
        if recurrent is not None:
            if self.recurrent is not None:
                self._storage.copy(self.recurrent, fresh[recurrent])
                self.give_back(self.recurrent)
            self.recurrent = fresh[recurrent]

    @owned
    def suspend(self) -> None:
        """Pages stay held; they may move to a lower level. Page index buffers are taken away."""
        assert self._status is _Status.ACTIVE
        for page in self._owned():
            self._storage.unlock(page)
        self._unbind()
        self._status = _Status.SUSPENDED

    @owned
    def prefetch(self, target: int) -> bool:
        """Bring what lies below `target` up to it, as far as there is room; a hint only."""
        assert self._status is _Status.SUSPENDED
        try:
            self._storage.onboard(self._owned(), target)
        except OutOfPagesError:
            return False
        return True

    @owned
    def close(self) -> None:
        """Give everything back; committed blocks stay in the tree. The deepest ones are evicted first."""
        if self._status is _Status.CLOSED:
            return
        if not self._never_resumed:
            self.stop_committing()
        if self.recurrent is not None:
            self.give_back(self.recurrent)
            self.recurrent = None
        while self.blocks:
            self._drop_last()
        self._unbind()
        self._capacity = self._history = 0
        self.tokens.clear()
        self._status = _Status.CLOSED
        self.manager.closed(self)

    # --- committing ------------------------------------------------------------------------------

    @owned
    def commit(
        self,
        accepted_input_tokens: Tokens,
        beam_search_indices: Sequence[int] | None = None,
        is_end: bool = False,
    ) -> None:
        """These tokens are computed; blocks that are full now become reusable."""
        if not len(accepted_input_tokens):
            return
        assert self._status is _Status.ACTIVE
        if not self._committing:
            raise LogicError("Cannot commit tokens after stop_committing()")
        before = len(self.tokens) // self.tokens_per_block
        self.tokens.extend(int(token) for token in accepted_input_tokens)
        if len(self.tokens) > self._capacity:
            raise LogicError("committed more tokens than there is capacity for")
        for index in range(before, len(self.tokens) // self.tokens_per_block):
            commit_block(self, index)
        self._history = max(self._history, len(self.tokens))
        self._write()
        if is_end:
            self.stop_committing()

    @owned
    def stop_committing(self) -> None:
        """No more tokens will come; a partial last block becomes reusable as far as it goes."""
        assert self._status is not _Status.CLOSED
        if not self._committing:
            return
        if len(self.tokens) % self.tokens_per_block and not self._never_resumed:
            commit_block(self, len(self.tokens) // self.tokens_per_block)
        self._committing = False
