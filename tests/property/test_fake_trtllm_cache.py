"""The stand-in's cache under any order of calls: every page that somebody holds has the bytes of its own prefix.

A dumb model keeps, per sequence, the prefix that each of its blocks was computed for. Whatever moves,
is evicted, rebased or dropped in between, what is held stays and is right; a refusal changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.fake_trtllm.tensorrt_llm.runtime.kv_cache_manager_v2 import KVCacheManager, _KVCache
from tests.harness.fake_cache import BLOCK, claim, make_manager, slots

PROMPTS = [
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13],
    [1, 2, 3, 4, 5, 6, 7, 8, 19, 20, 21, 22],
    [1, 2, 3, 4, 35, 36],
    [41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57],
]


POISON = 0xFF


def mark(tokens: list[int]) -> int:
    """Of the block that ends a prefix; 0xFF is poison."""
    return hash(tuple(tokens)) % 251


@dataclass(eq=False)
class Open:
    cache: _KVCache
    prompt: list[int]

    @property
    def committed(self) -> int:
        return self.cache.num_committed_tokens


def state_mark(tokens: list[int]) -> int:
    return mark([*tokens, -1])


class CacheUnderAnyOrder(RuleBasedStateMachine):
    @initialize(blocks=st.integers(4, 12), host=st.integers(0, 6), recurrent=st.booleans(), partial=st.booleans())
    def build(self, blocks: int, host: int, recurrent: bool, partial: bool) -> None:
        self.manager: KVCacheManager = make_manager(
            blocks, host, recurrent=recurrent, partial=partial and not recurrent, most_used=0.9
        )
        self.recurrent = recurrent
        self.open: list[Open] = []

    @rule(prompt=st.sampled_from(PROMPTS), cap=st.sampled_from([17, 8, 4, 0]))
    def create(self, prompt: list[int], cap: int) -> None:
        tokens = prompt[:-1][:cap]
        expected = self.manager.probe_reuse(None, tokens)
        cache = claim(self.manager, tokens)
        assert cache.num_committed_tokens == expected <= len(tokens)
        self.open.append(Open(cache, prompt))

    @rule(prompt=st.sampled_from(PROMPTS), chunk=st.integers(3, 9), then=st.sampled_from(["close", "suspend", "run"]))
    def serve(self, prompt: list[int], chunk: int, then: str) -> None:
        """A whole prompt at once, as far as there is room: so that there is something to reuse and to evict."""
        self.create(prompt, len(prompt))
        one = self.open[-1]
        if one.cache.resume(0) and one.cache.resize(len(prompt)):
            while one.committed < len(prompt):
                self._compute(one, chunk)
        if then == "close":
            self.open.pop().cache.close()
        elif then == "suspend" and one.cache.is_active:
            one.cache.suspend()

    def _pick(self, index: int, active: bool) -> Open | None:
        found = [one for one in self.open if one.cache.is_active is active]
        return found[index % len(found)] if found else None

    @precondition(lambda self: self.open)
    @rule(index=st.integers(0, 9))
    def resume(self, index: int) -> None:
        if one := self._pick(index, active=False):
            before = self._places(one)
            levels = [page.level for page in one.cache._owned()]
            if not one.cache.resume(0):
                assert self._places(one) == before
                assert [page.level for page in one.cache._owned()] >= levels

    @precondition(lambda self: any(one.cache.is_active for one in self.open))
    @rule(index=st.integers(0, 9))
    def suspend(self, index: int) -> None:
        if one := self._pick(index, active=True):
            one.cache.suspend()

    @precondition(lambda self: self.open)
    @rule(index=st.integers(0, 9), more=st.integers(0, 17))
    def resize(self, index: int, more: int) -> None:
        if one := self._pick(index, active=True):
            capacity = min(one.committed + more, len(one.prompt))
            before = self._places(one)
            if one.cache.resize(max(capacity, one.cache.history_length)):
                assert one.cache.num_blocks == -(-one.cache.capacity // BLOCK)
            else:
                assert self._places(one) == before

    @precondition(lambda self: self.open)
    @rule(index=st.integers(0, 9), length=st.integers(1, 9))
    def compute(self, index: int, length: int) -> None:
        if one := self._pick(index, active=True):
            self._compute(one, length)

    def _compute(self, one: Open, length: int) -> None:
        end = min(one.committed + length, one.cache.capacity, len(one.prompt))
        memory = self.manager.group_memory(0)
        for number in range(one.committed // BLOCK, -(-end // BLOCK)):
            memory[slots(one.cache)[number]] = mark(one.prompt[: (number + 1) * BLOCK])
        if self.recurrent:
            assert self._state(one) == (state_mark(one.prompt[: one.committed]) if one.committed else POISON)
            self.manager.group_memory(1)[slots(one.cache, 1)[0]] = state_mark(one.prompt[:end]) if end else POISON
        one.cache.commit(one.prompt[one.committed : end])

    def _state(self, one: Open) -> int:
        """The working state: loaded from the snapshot at the claim's end, or new."""
        return int(self.manager.group_memory(1)[slots(one.cache, 1)[0]][0])

    @precondition(lambda self: self.open)
    @rule(index=st.integers(0, 9))
    def close(self, index: int) -> None:
        self.open.pop(index % len(self.open)).cache.close()

    def _places(self, one: Open) -> tuple[int, int, list[int]]:
        return one.cache.capacity, one.committed, slots(one.cache)

    @invariant()
    def content_is_right(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.storage.check()
        for one in self.open:
            for number, block in enumerate(one.cache.blocks):
                if block.page is not None and number < one.committed // BLOCK:
                    memory = self.manager.storage.levels[block.page.level][0].memory
                    assert int(memory[block.page.slot][0]) == mark(one.prompt[: (number + 1) * BLOCK])

    def teardown(self) -> None:
        for one in getattr(self, "open", []):
            one.cache.close()
        if hasattr(self, "manager"):
            self.manager.clear_reusable_blocks()
            for pools in self.manager.storage.levels:
                assert all(len(pool.free) == pool.total for pool in pools)


CacheUnderAnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
test_what_is_held_is_right_when_anything_happens = CacheUnderAnyOrder.TestCase
