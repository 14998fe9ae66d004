"""What a torch.distributed store does, in one process: for tests of what daemons agree on through one."""

from __future__ import annotations


class PlainStore:
    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.held[key] = value.encode()

    def add(self, key: str, amount: int) -> int:
        count = int(self.held.get(key, b"0")) + amount
        self.held[key] = str(count).encode()
        return count

    def check(self, keys: list[str]) -> bool:
        return self.held.keys() >= set(keys)

    def get(self, key: str) -> bytes:
        return self.held[key]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        assert not expected
        return self.held.setdefault(key, desired.encode())

    def delete_key(self, key: str) -> bool:
        return self.held.pop(key, None) is not None
