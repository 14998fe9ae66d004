"""The stand-in's tree: claims of exactly what is given, commits that rebase, snapshots, what events say."""

from __future__ import annotations

import pytest

from tests.fake_trtllm.tensorrt_llm.runtime.kv_cache_manager_v2 import (
    KVCacheEvent,
    KVCacheEventManager,
    KVCacheRemovedData,
    KVCacheStoredData,
    KVCacheUpdatedData,
    LogicError,
    ReuseScope,
    sequence_to_blockchain_keys,
)
from tests.harness.fake_cache import BLOCK, SCOPE, census, claim, compute, leave, make_manager, read, slots, write

TWELVE = list(range(1, 13))


def test_claim_stops_where_the_tokens_stop_when_more_is_cached() -> None:
    manager = make_manager(4)
    leave(manager, TWELVE)
    lengths = [claim(manager, TWELVE[:limit]).num_committed_tokens for limit in (0, 3, 4, 8, 11, 12)]
    assert lengths == [0, 0, 4, 8, 8, 12]


def test_probe_holds_nothing_when_it_finds_a_prefix() -> None:
    manager = make_manager(4)
    leave(manager, TWELVE)
    before = census(manager)
    assert manager.probe_reuse(None, [*TWELVE, 13]) == 12
    assert census(manager) == before


def test_scope_separates_equal_prompts_when_their_salts_differ() -> None:
    manager = make_manager(8)
    leave(manager, TWELVE, ReuseScope(salt=1))
    assert manager.probe_reuse(ReuseScope(salt=1), TWELVE) == 12
    assert manager.probe_reuse(ReuseScope(salt=2), TWELVE) == 0
    assert manager.probe_reuse(None, TWELVE) == 0


def test_sequence_goes_over_to_the_page_that_exists_when_it_commits_the_same_block() -> None:
    manager = make_manager(8)
    first, second = compute(manager, TWELVE, upto=0), compute(manager, TWELVE, upto=0)
    write(manager, first, 1)
    write(manager, second, 2)
    own = slots(second)
    first.commit(TWELVE[:8])
    second.commit(TWELVE[:8])
    assert slots(second) == [*slots(first)[:2], own[2]]
    assert read(manager, second) == [1, 1, 2]
    assert census(manager) == {"LOCKED": 4, "HELD": 0, "DROPPABLE": 0, "FREE": 4}
    first.close()
    second.close()
    assert census(manager) == {"LOCKED": 0, "HELD": 0, "DROPPABLE": 2, "FREE": 6}
    manager.storage.check()


def test_page_numbers_change_under_a_bound_buffer_when_a_commit_rebases() -> None:
    manager = make_manager(8)
    first, second = compute(manager, TWELVE, upto=0), compute(manager, TWELVE, upto=0)
    buffer = memoryview(bytearray(5 * 4)).cast("i")
    second.set_base_page_index_buf(0, 0, buffer)
    assert list(buffer) == [*slots(second), -1, -1]
    first.commit(TWELVE[:BLOCK])
    second.commit(TWELVE[:BLOCK])
    assert buffer[0] == slots(first)[0]
    second.suspend()
    assert slots(second) == [-1, -1, -1]


def test_rebasing_brings_the_page_to_the_device_when_it_lies_on_the_host() -> None:
    manager = make_manager(3, host=3)
    second = compute(manager, TWELVE[:8], upto=0)
    leave(manager, TWELVE[:BLOCK])
    other = compute(manager, [99], upto=0)
    assert census(manager, level=1)["DROPPABLE"] == 1
    other.close()
    second.commit(TWELVE[:BLOCK])
    assert census(manager, level=1)["DROPPABLE"] == 0
    assert census(manager) == {"LOCKED": 2, "HELD": 0, "DROPPABLE": 0, "FREE": 1}
    second.close()


def test_partial_block_is_copied_before_it_is_written_when_it_is_reused() -> None:
    manager = make_manager(6, partial=True)
    cache = compute(manager, TWELVE[:6])
    write(manager, cache, 5)
    cache.close()
    again = claim(manager, TWELVE[:6])
    assert again.num_committed_tokens == 6
    shared = again.blocks[1].page
    assert again.resume(0)
    assert again.blocks[1].page is not shared
    assert read(manager, again) == [5, 5]
    manager.group_memory(0)[slots(again)[1]] = 6
    assert shared is not None
    assert int(manager.group_memory(0)[shared.slot][0]) == 5
    again.close()
    manager.storage.check()


def test_first_resume_fails_whole_when_there_is_no_page_for_the_copy() -> None:
    manager = make_manager(3, partial=True)
    compute(manager, TWELVE[:6]).close()
    full = compute(manager, [99], upto=0)
    again = claim(manager, TWELVE[:6])
    assert not again.resume(0)
    assert census(manager) == {"LOCKED": 1, "HELD": 2, "DROPPABLE": 0, "FREE": 0}
    full.close()
    assert again.resume(0)


def test_partial_block_is_left_alone_when_partial_reuse_is_off() -> None:
    manager = make_manager(6)
    compute(manager, TWELVE[:6]).close()
    assert manager.probe_reuse(None, TWELVE) == BLOCK


def test_commit_is_refused_when_committing_was_stopped() -> None:
    manager = make_manager(4)
    cache = compute(manager, TWELVE, upto=4)
    cache.stop_committing()
    with pytest.raises(LogicError):
        cache.commit([5])


@pytest.mark.parametrize("attention", [True, False], ids=["hybrid", "recurrent only"])
def test_match_is_pruned_to_the_deepest_snapshot_when_a_stage_has_recurrent_layers(attention: bool) -> None:
    manager = make_manager(8, attention=attention, recurrent=True)
    cache = compute(manager, [*TWELVE, 13], upto=0)
    cache.commit(TWELVE[:BLOCK])
    cache.commit(TWELVE[BLOCK : 3 * BLOCK])  # no state was kept at 8
    cache.close()
    lengths = [manager.probe_reuse(None, TWELVE[:limit]) for limit in (4, 8, 11, 12)]
    assert lengths == [4, 4, 4, 12]
    manager.storage.check()


def test_dropped_snapshot_costs_reuse_but_no_block_when_states_are_short() -> None:
    manager = make_manager(3, recurrent=True)
    leave(manager, TWELVE[:8])
    assert manager.probe_reuse(None, TWELVE) == 8
    working = [claim(manager, [token]) for token in (91, 92, 93)]
    assert all(cache.resume(0) for cache in working[:2])
    assert manager.probe_reuse(None, TWELVE) == 8
    assert working[2].resume(0)
    assert manager.probe_reuse(None, TWELVE) == 0
    assert census(manager) == {"LOCKED": 0, "HELD": 0, "DROPPABLE": 2, "FREE": 1}
    for cache in working:
        cache.close()
    manager.storage.check()


def test_snapshot_is_copied_into_a_working_state_when_a_claim_resumes() -> None:
    manager = make_manager(4, recurrent=True)
    cache = compute(manager, TWELVE, upto=0)
    write(manager, cache, 3, group=1)
    cache.commit(TWELVE[:8])
    write(manager, cache, 4, group=1)
    cache.close()
    again = claim(manager, TWELVE)
    assert again.resume(0)
    assert read(manager, again, group=1) == [3]
    again.close()
    manager.storage.check()


def _flushed(events: KVCacheEventManager) -> list[KVCacheEvent]:
    events.flush_iteration_events()
    return events.get_latest_events(0)


def test_events_show_after_a_flush_only_when_blocks_come_move_and_go() -> None:
    events = KVCacheEventManager(100, hash_algo="v2_sha256")
    manager = make_manager(3, host=1, events=events)
    leave(manager, TWELVE)
    assert events.get_latest_events(0) == []
    keys = [key.hex() for block, key in sequence_to_blockchain_keys(BLOCK, SCOPE, TWELVE) if block]
    (stored,) = _flushed(events)
    assert isinstance(stored.data, KVCacheStoredData)
    assert stored.data.parent_hash is None
    assert [block.block_hash for block in stored.data.blocks] == keys
    assert [[token.token_id for token in block.tokens] for block in stored.data.blocks] == [
        TWELVE[:4], TWELVE[4:8], TWELVE[8:]]  # fmt: skip
    cache = compute(manager, [77, 78, 79, 80, 81], upto=0)
    moved, removed, moved_too = _flushed(events)
    assert isinstance(moved.data, KVCacheUpdatedData)
    assert moved.data.block_hash == keys[2]
    assert moved.data.cache_level is not None
    assert (moved.data.cache_level.old_value, moved.data.cache_level.new_value) == (0, 1)
    # The host has room for one: the deepest block gives way to the one above it.
    assert isinstance(removed.data, KVCacheRemovedData)
    assert removed.data.block_hashes == [keys[2]]
    assert isinstance(moved_too.data, KVCacheUpdatedData)
    assert moved_too.data.block_hash == keys[1]
    assert [event.event_id for event in (stored, moved, removed, moved_too)] == [0, 1, 2, 3]
    cache.close()


def test_stored_event_names_its_parent_when_a_chain_grows_later() -> None:
    events = KVCacheEventManager(100, hash_algo="v2_sha256")
    manager = make_manager(4, events=events)
    cache = compute(manager, TWELVE, upto=4)
    (first,) = _flushed(events)
    cache.commit(TWELVE[4:])
    (second,) = _flushed(events)
    assert isinstance(first.data, KVCacheStoredData)
    assert isinstance(second.data, KVCacheStoredData)
    assert second.data.parent_hash == first.data.blocks[-1].block_hash
    assert len(second.data.blocks) == 2
    cache.close()


@pytest.mark.parametrize(("algorithm", "kind"), [("v1_block_key", int), ("v2_sha256", str), ("v2_sha256_64", int)])
def test_event_hashes_follow_the_chosen_algorithm_when_blocks_are_stored(algorithm: str, kind: type) -> None:
    events = KVCacheEventManager(100, hash_algo=algorithm)
    manager = make_manager(6, events=events)
    leave(manager, TWELVE)
    leave(manager, [99, *TWELVE[1:]])
    first, second = _flushed(events)
    assert (first.hash_algo, second.hash_algo) == (algorithm, algorithm)
    assert isinstance(first.data, KVCacheStoredData)
    assert isinstance(second.data, KVCacheStoredData)
    hashes = [block.block_hash for data in (first.data, second.data) for block in data.blocks]
    assert all(type(value) is kind for value in hashes)
    assert len(set(hashes)) == 6  # a prefix names a block, not its own tokens


def test_unknown_algorithm_is_refused_when_events_are_asked_for() -> None:
    with pytest.raises(ValueError, match="Unsupported"):
        KVCacheEventManager(1, hash_algo="md5")


def test_oldest_events_are_lost_when_the_buffer_is_short() -> None:
    events = KVCacheEventManager(2, hash_algo="v2_sha256")
    manager = make_manager(8, events=events)
    for start in (10, 20, 30):
        leave(manager, list(range(start, start + 4)))
    assert [event.event_id for event in _flushed(events)] == [1, 2]


def test_partial_block_is_told_as_such_when_committing_ends() -> None:
    events = KVCacheEventManager(10, hash_algo="v2_sha256")
    manager = make_manager(4, events=events)
    compute(manager, TWELVE[:6]).close()
    (stored,) = _flushed(events)
    assert isinstance(stored.data, KVCacheStoredData)
    assert [len(block.tokens) for block in stored.data.blocks] == [4, 2]
