"""A bounded stack of unused ids, moved in arrays.

Owns order only: the last id given back is the first taken, a fresh stack counts up. Used for device
blocks, host blocks, state slots and tree nodes, whose exact ids tests rely on.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from wavepp_proto.errors import InternalError

Ids = npt.NDArray[np.int64]


class IdStack:
    """Unused ids out of [first, first + size)."""

    def __init__(self, first: int, size: int) -> None:
        self._stack: Ids = np.arange(first + size - 1, first - 1, -1, dtype=np.int64)
        self._count = size

    def __len__(self) -> int:
        return self._count

    def take(self, count: int) -> Ids:
        """Exactly `count` ids, in the order in which they would be taken one by one."""
        if count > self._count:
            raise InternalError("more ids taken than are unused", field="unused", value=count, limit=self._count)
        self._count -= count
        return self._stack[self._count : self._count + count][::-1].copy()

    def give(self, ids: npt.NDArray[np.integer]) -> None:
        """Take back `ids`; ids[0] is the next one taken."""
        end = self._count + len(ids)
        if end > len(self._stack):
            raise InternalError("more ids given back than exist", field="unused", value=end, limit=len(self._stack))
        self._stack[self._count : end] = ids[::-1]
        self._count = end

    def all(self) -> Ids:
        """A copy of every unused id (for `check`)."""
        return self._stack[: self._count].copy()
