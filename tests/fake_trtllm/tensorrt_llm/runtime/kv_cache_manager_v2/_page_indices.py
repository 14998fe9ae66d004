"""The numbers of a sequence's pages, kept up to date in buffers that others read.

Owns the buffers, one for each layer group at most. Base of `_KVCache`, which says which pages there are
and calls `_write` whenever they may have changed.
"""

from __future__ import annotations

import array
import sys
from abc import ABC, abstractmethod
from typing import Any

from ._common import BAD_PAGE_INDEX, DEFAULT_BEAM_INDEX
from ._storage import Page


class PageIndices(ABC):
    def __init__(self) -> None:
        self._buffers: dict[int, Any] = {}

    @property
    @abstractmethod
    def is_active(self) -> bool: ...

    @abstractmethod
    def _pages(self, layer_group_id: int) -> list[Page | None]:
        """In the order of blocks; None where a stage has no page for a block."""

    def set_base_page_index_buf(self, beam_idx: int, layer_group_id: int, buf: memoryview | None) -> None:
        """int32 buffer that always holds the numbers of this sequence's pages; None takes it away."""
        assert beam_idx == DEFAULT_BEAM_INDEX
        if buf is None:
            self._buffers.pop(layer_group_id, None)
        else:
            self._buffers[layer_group_id] = buf
            self._write()

    def get_base_page_indices(self, layer_group_id: int, beam_id: int = DEFAULT_BEAM_INDEX) -> array.array[int]:
        """Slots of this sequence's blocks, in order; BAD_PAGE_INDEX while it is suspended."""
        active = self.is_active
        return array.array(
            "i",
            [page.slot if page is not None and active else BAD_PAGE_INDEX for page in self._pages(layer_group_id)],
        )

    def _write(self) -> None:
        for group, buffer in self._buffers.items():
            numbers = self.get_base_page_indices(group)
            rest = len(buffer) - len(numbers)
            buffer[:] = memoryview(numbers + array.array("i", [BAD_PAGE_INDEX] * rest))

    def _unbind(self) -> None:
        self._buffers.clear()

    def _shortest(self) -> int:
        """Blocks that the smallest buffer has room for."""
        return min((len(buffer) for buffer in self._buffers.values()), default=sys.maxsize)
