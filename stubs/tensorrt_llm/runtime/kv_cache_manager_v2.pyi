from collections.abc import Iterator, Sequence
from typing import NamedTuple

class OutOfMemoryError(Exception): ...

class ReuseScope(NamedTuple):
    lora_id: int | None = ...
    salt: int | None = ...

class StorageStatistics:
    @property
    def total(self) -> int: ...
    @property
    def available(self) -> int: ...
    @property
    def evictable(self) -> int: ...

class UniqueToken:
    token_id: int | str

class KVCacheStoredBlockData:
    block_hash: int | str
    tokens: list[UniqueToken]
    cache_level: int

class KVCacheStoredData:
    parent_hash: int | str | None
    blocks: list[KVCacheStoredBlockData]

class KVCacheRemovedData:
    block_hashes: list[int | str]

class KVCacheEventDiff:
    old_value: int
    new_value: int

class KVCacheUpdatedData:
    block_hash: int | str
    cache_level: KVCacheEventDiff | None

class KVCacheCreatedData:
    num_blocks_per_cache_level: list[int]

class KVCacheEvent:
    event_id: int
    data: KVCacheCreatedData | KVCacheStoredData | KVCacheRemovedData | KVCacheUpdatedData
    hash_algo: str | None

class _KVCache:
    @property
    def num_committed_tokens(self) -> int: ...
    def resize(self, capacity: int | None, history_length: int | None = ...) -> bool: ...
    def close(self) -> None: ...

class _Storage:
    def get_statistics(self, cache_level: int = ...) -> Sequence[StorageStatistics]: ...

class KVCacheManager:
    _storage: _Storage
    def create_kv_cache(
        self, reuse_scope: ReuseScope | None = ..., input_tokens: Sequence[int] | None = ...
    ) -> _KVCache: ...
    def get_storage_statistics(self, cache_level: int = ...) -> Sequence[StorageStatistics]: ...
    @property
    def layer_grouping(self) -> Sequence[Sequence[int]]: ...
    @property
    def cache_tier_list(self) -> Sequence[int]: ...

def sequence_to_blockchain_keys(
    tokens_per_block: int, reuse_scope: ReuseScope, tokens: Sequence[int]
) -> Iterator[tuple[list[int], bytes]]: ...
