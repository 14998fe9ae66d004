"""Events about reusable blocks: created, stored, removed, updated; buffered until they are flushed.

Owns the queue and the hashes that events carry. `v1_block_key` gives 64-bit integers, `v2_sha256`
hexadecimal strings, `v2_sha256_64` the first 64 bits of those as signed integers. What does not fit
the buffer is lost, oldest first, as in the real queue.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from threading import Condition
from typing import TYPE_CHECKING

from ..kv_cache_hash import KV_CACHE_HASH_ALGO_V1, KV_CACHE_HASH_ALGO_V2, KV_CACHE_HASH_ALGOS, resolve, v1_block_hash
from ._common import PRIORITY_DEFAULT

if TYPE_CHECKING:
    from ._storage import Page
    from ._tree import Block

EventBlockHash = int | str


@dataclass(slots=True, frozen=True)
class UniqueToken:
    token_id: int | str
    token_extra_id: int = 0


@dataclass(slots=True, frozen=True)
class KVCacheCreatedData:
    num_blocks_per_cache_level: list[int]


@dataclass(slots=True, frozen=True)
class KVCacheStoredBlockData:
    block_hash: EventBlockHash
    tokens: list[UniqueToken]
    cache_level: int
    priority: int
    mm_keys: list[tuple[bytes, int]] = field(default_factory=list)
    cache_salt: str | None = None


@dataclass(slots=True, frozen=True)
class KVCacheStoredData:
    parent_hash: EventBlockHash | None
    """None for the first block of a prompt."""
    blocks: list[KVCacheStoredBlockData]
    """A chain: each one's parent is the one before it."""


@dataclass(slots=True, frozen=True)
class KVCacheRemovedData:
    block_hashes: list[EventBlockHash]


@dataclass(slots=True, frozen=True)
class KVCacheEventDiff:
    old_value: int
    new_value: int


@dataclass(slots=True, frozen=True)
class KVCacheUpdatedData:
    block_hash: EventBlockHash
    cache_level: KVCacheEventDiff | None
    priority: KVCacheEventDiff | None


EventData = KVCacheCreatedData | KVCacheStoredData | KVCacheRemovedData | KVCacheUpdatedData


@dataclass(slots=True, frozen=True)
class KVCacheEvent:
    event_id: int
    data: EventData
    window_size: int
    hash_algo: str | None = None
    attention_dp_rank: int | None = None
    layer_group_id: int | None = None


class KVCacheEventManager:
    def __init__(
        self,
        max_kv_event_entries: int,
        *,
        window_size: int = 0,
        attention_dp_rank: int | None = None,
        hash_algo: str = KV_CACHE_HASH_ALGO_V2,
        window_size_by_layer_group: dict[int, int] | None = None,
    ) -> None:
        algorithm = resolve(hash_algo)
        if algorithm not in KV_CACHE_HASH_ALGOS:
            raise ValueError(f"Unsupported V2 KV cache event hash algorithm: {hash_algo}")
        self._most = max_kv_event_entries
        self._window_size = window_size
        self._windows = dict(window_size_by_layer_group or {})
        self._rank = attention_dp_rank
        self._algorithm = algorithm
        self._next_id = 0
        self._pending: list[KVCacheEvent] = []
        self._events: deque[KVCacheEvent] = deque()
        self._condition = Condition()

    def set_layer_group_window_sizes(self, window_sizes: dict[int, int]) -> None:
        self._windows = dict(window_sizes)

    def add_created_event(
        self, num_blocks_per_cache_level: Sequence[int], layer_group_ids: Sequence[int] | None = None
    ) -> None:
        for group in layer_group_ids if layer_group_ids is not None else [None]:
            self._add(KVCacheCreatedData(list(num_blocks_per_cache_level)), group)

    # --- what the cache reports ------------------------------------------------------------------

    def hash_of(self, block: Block) -> EventBlockHash | None:
        if block.is_root:
            return None
        if self._algorithm == KV_CACHE_HASH_ALGO_V1:
            chain = []
            walk: Block | None = block
            while walk is not None and not walk.is_root:
                chain.append(walk.tokens)
                walk = walk.parent
            return v1_block_hash(chain[::-1])
        if self._algorithm == KV_CACHE_HASH_ALGO_V2:
            return block.key.hex()
        return int.from_bytes(block.key[:8], "big", signed=True)

    def add_stored(self, block: Block, page: Page) -> None:
        own = self.hash_of(block)
        assert own is not None
        assert block.parent is not None
        tokens = [UniqueToken(token) for token in block.tokens]
        stored = KVCacheStoredBlockData(own, tokens, page.level, PRIORITY_DEFAULT)
        parent = self.hash_of(block.parent)
        last = self._pending[-1] if self._pending else None
        if (
            last is not None
            and isinstance(last.data, KVCacheStoredData)
            and last.layer_group_id == page.group
            and last.data.blocks[-1].block_hash == parent
        ):
            self._pending[-1] = replace(last, data=replace(last.data, blocks=[*last.data.blocks, stored]))
        else:
            self._add(KVCacheStoredData(parent, [stored]), page.group)

    def add_removed(self, block: Block, group: int) -> None:
        own = self.hash_of(block)
        assert own is not None
        last = self._pending[-1] if self._pending else None
        if last is not None and isinstance(last.data, KVCacheRemovedData) and last.layer_group_id == group:
            last.data.block_hashes.append(own)
        else:
            self._add(KVCacheRemovedData([own]), group)

    def add_moved(self, block: Block, page: Page, old_level: int) -> None:
        own = self.hash_of(block)
        assert own is not None
        self._add(KVCacheUpdatedData(own, KVCacheEventDiff(old_level, page.level), None), page.group)

    def _add(self, data: EventData, group: int | None) -> None:
        if self._most <= 0:
            return
        window = self._windows.get(group, self._window_size) if group is not None else self._window_size
        self._pending.append(KVCacheEvent(self._next_id, data, window, self._algorithm, self._rank, group))
        self._next_id += 1

    # --- who listens -----------------------------------------------------------------------------

    def flush_iteration_events(self) -> None:
        with self._condition:
            self._events.extend(self._pending)
            self._pending = []
            while len(self._events) > self._most:
                self._events.popleft()
            self._condition.notify_all()

    def get_latest_events(self, timeout_ms: float | None = None) -> list[KVCacheEvent]:
        """What has been flushed and not been taken; waits up to `timeout_ms` (None: for ever) for the first."""
        deadline = None if timeout_ms is None else time.monotonic() + timeout_ms / 1000
        with self._condition:
            while not self._events:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._condition.wait(left)
            taken = list(self._events)
            self._events.clear()
            return taken
