"""Rows of the page table: bounded, one for each request that has a cache."""

from __future__ import annotations


class IndexMapper:
    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._free = list(range(capacity - 1, -1, -1))
        self._rows: dict[int, int] = {}

    def num_free_slots(self) -> int:
        return len(self._free)

    def size(self) -> int:
        return self._capacity

    def add_new_sequence(self, request_id: int) -> int:
        self._rows[request_id] = self._free.pop()
        return self._rows[request_id]

    def get_index(self, request_id: int) -> int:
        return self._rows[request_id]

    def remove_sequence(self, request_id: int) -> None:
        self._free.append(self._rows.pop(request_id))
