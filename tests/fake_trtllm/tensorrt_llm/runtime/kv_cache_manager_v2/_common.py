"""Names and small values that every part of the cache shares.

Owns levels, states, the reuse scope and the errors. Numbers and names are those of the real
package; what stands behind them is written anew.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

GPU_LEVEL = 0
CACHE_LEVEL1 = 1
BAD_PAGE_INDEX = -1
DEFAULT_BEAM_INDEX = 0
PRIORITY_DEFAULT = 35


class CacheTier(enum.IntEnum):
    GPU_MEM = 0
    HOST_MEM = 1
    DISK = 2


class PageStatus(enum.Enum):
    LOCKED = enum.auto()
    """Must stay on the device."""
    HELD = enum.auto()
    """May move to a lower tier, is never dropped."""
    DROPPABLE = enum.auto()


class PageIndexMode(enum.IntEnum):
    SHARED = 0
    PER_LAYER = 1


class ReuseScope(NamedTuple):
    lora_id: int | None = None
    salt: int | None = None


class OutOfMemoryError(Exception):
    """No memory of some tier."""


class OutOfPagesError(OutOfMemoryError):
    """No page of some level, evictions counted in."""


class LogicError(Exception):
    """The caller broke the protocol."""


Tokens = Sequence[int]


def root_key(scope: ReuseScope) -> bytes:
    return hashlib.sha256(repr(("root", scope.lora_id, scope.salt)).encode()).digest()


def block_key(parent: bytes, tokens: Tokens) -> bytes:
    return hashlib.sha256(parent + b"".join(int(token).to_bytes(8, "little", signed=True) for token in tokens)).digest()
