"""The stand-in's pages: three states, quotas of tiers, resume and resize."""

from __future__ import annotations

import pytest

from tests.fake_trtllm.tensorrt_llm.runtime.kv_cache_manager_v2 import LogicError, PageStatus
from tests.harness.fake_cache import BLOCK, census, claim, compute, leave, make_manager, read, slots, write

EIGHT = list(range(1, 9))
OTHERS = list(range(101, 117))


def test_page_is_locked_held_droppable_when_its_sequence_is_active_suspended_closed() -> None:
    manager = make_manager(4)
    cache = compute(manager, [*EIGHT, 9], upto=8)
    assert census(manager) == {"LOCKED": 3, "HELD": 0, "DROPPABLE": 0, "FREE": 1}
    cache.suspend()
    assert census(manager) == {"LOCKED": 0, "HELD": 3, "DROPPABLE": 0, "FREE": 1}
    cache.close()
    # The third page was never committed: nothing is left of it.
    assert census(manager) == {"LOCKED": 0, "HELD": 0, "DROPPABLE": 2, "FREE": 2}
    manager.storage.check()


def test_lengths_start_as_what_was_matched_when_a_sequence_is_made() -> None:
    manager = make_manager(4)
    leave(manager, EIGHT)
    cache = claim(manager, [*EIGHT, 9, 10])
    assert (cache.num_committed_tokens, cache.history_length, cache.capacity) == (8, 8, 8)
    assert cache.status is cache.Status.SUSPENDED
    cache.close()


def test_resize_leaves_everything_as_it_was_when_pages_are_short() -> None:
    manager = make_manager(4)
    cache = compute(manager, EIGHT)
    before = slots(cache)
    assert not cache.resize(5 * BLOCK)
    assert (cache.capacity, slots(cache)) == (8, before)
    assert cache.resize(4 * BLOCK)
    assert slots(cache)[:2] == before
    cache.close()
    manager.storage.check()


def test_resize_evicts_droppable_pages_but_no_held_ones_when_there_is_one_tier() -> None:
    manager = make_manager(4)
    leave(manager, EIGHT)
    pin = claim(manager, EIGHT[:BLOCK])
    cache = compute(manager, OTHERS[:1], upto=0)
    assert not cache.resize(4 * BLOCK)
    assert cache.resize(3 * BLOCK)
    assert pin.num_committed_tokens == BLOCK
    assert manager.probe_reuse(None, EIGHT) == BLOCK
    for one in (pin, cache):
        one.close()
    manager.storage.check()


def test_history_never_shrinks_and_stays_below_capacity_when_a_sequence_is_resized() -> None:
    manager = make_manager(4)
    cache = compute(manager, EIGHT)
    with pytest.raises(ValueError, match="decreased"):
        cache.resize(None, 7)
    with pytest.raises(ValueError, match="greater than capacity"):
        cache.resize(7)
    with pytest.raises(AssertionError):
        claim(manager, EIGHT).resize(4)


def test_resume_is_refused_when_the_device_is_fuller_than_allowed() -> None:
    manager = make_manager(8, most_used=0.5)
    first = compute(manager, EIGHT)
    second = compute(manager, OTHERS[:9], upto=0)
    waiting = claim(manager, EIGHT[:BLOCK])
    assert not waiting.resume(0)  # five of eight pages are locked
    assert not waiting.is_active
    second.close()
    assert waiting.resume(0)
    for one in (first, waiting):
        one.close()
    manager.storage.check()


def test_held_page_moves_to_the_host_and_comes_back_when_the_device_is_needed() -> None:
    manager = make_manager(2, host=2)
    cache = compute(manager, EIGHT)
    write(manager, cache, 7)
    cache.suspend()
    other = compute(manager, OTHERS[:8])
    assert census(manager, level=1) == {"LOCKED": 0, "HELD": 2, "DROPPABLE": 0, "FREE": 0}
    assert not cache.resume(0)
    assert census(manager)["LOCKED"] == 2
    other.close()
    assert cache.resume(0)
    assert read(manager, cache) == [7, 7]
    cache.close()
    manager.storage.check()


def test_host_tier_keeps_its_quota_when_more_is_off_loaded() -> None:
    manager = make_manager(2, host=1)
    leave(manager, EIGHT)
    cache = compute(manager, OTHERS[:8])
    # One of two pages found room; dropping the other one first would have taken its child with it.
    assert census(manager, level=1) == {"LOCKED": 0, "HELD": 0, "DROPPABLE": 1, "FREE": 0}
    assert manager.probe_reuse(None, EIGHT) == BLOCK
    cache.close()
    manager.storage.check()


def test_held_pages_refuse_a_resize_when_the_host_tier_is_full() -> None:
    manager = make_manager(2, host=1)
    held = compute(manager, EIGHT)
    held.suspend()
    assert claim(manager, OTHERS[:4]).num_committed_tokens == 0
    cache = claim(manager, OTHERS)
    assert cache.resume(0)
    assert not cache.resize(2 * BLOCK)
    assert cache.resize(BLOCK)
    assert held.cached_tokens_by_level == [4, 4]
    for one in (held, cache):
        one.close()
    manager.storage.check()


def test_prefetch_brings_pages_up_when_there_is_room_and_is_only_a_hint() -> None:
    manager = make_manager(2, host=2)
    leave(manager, EIGHT)
    other = compute(manager, OTHERS[:8])
    pin = claim(manager, EIGHT)
    assert pin.cached_tokens_by_level == [0, 8]
    assert not pin.prefetch(0)
    other.close()
    assert pin.prefetch(0)
    assert pin.cached_tokens_by_level == [8, 0]
    assert all(block.page is not None and block.page.status is PageStatus.HELD for block in pin.blocks)
    pin.close()


def test_content_of_a_freed_page_is_unreadable_when_somebody_else_gets_it() -> None:
    manager = make_manager(2)
    cache = compute(manager, EIGHT, upto=0)
    write(manager, cache, 7)
    cache.close()
    other = compute(manager, OTHERS[:8], upto=0)
    assert read(manager, other) == [0xFF, 0xFF]
    other.close()


def test_deepest_blocks_go_first_when_one_sequence_is_evicted() -> None:
    manager = make_manager(4)
    leave(manager, [*EIGHT, 9, 10, 11, 12])
    cache = compute(manager, OTHERS[:8], upto=0)
    assert manager.probe_reuse(None, [*EIGHT, 9, 10, 11, 12]) == 8
    cache.close()


def test_shutdown_is_refused_when_a_sequence_is_open() -> None:
    manager = make_manager(2)
    cache = compute(manager, EIGHT)
    for call in (manager.shutdown, manager.clear_reusable_blocks):
        with pytest.raises(LogicError, match="still open"):
            call()
    cache.close()
    cache.close()
    manager.clear_reusable_blocks()
    assert census(manager) == {"LOCKED": 0, "HELD": 0, "DROPPABLE": 0, "FREE": 2}
