"""The reuse index: hints, snapshots page by page, gaps, lost daemons, memory bound."""

from __future__ import annotations

import numpy as np
import pytest

from wavepp_controller.core.hash_table import SHARDS
from wavepp_controller.core.index import ReuseIndex, short_chain
from wavepp_proto.digest import Hashes, Verdict, checksum, pack_hashes
from wavepp_proto.hashing import HashScope, hash_blocks, short
from wavepp_proto.terms import (
    CacheGroup,
    Capacity,
    DaemonKey,
    Digest,
    DigestKind,
    GroupDigest,
    Incarnation,
    PipelineId,
    StageIndex,
)

A, B, C = (DaemonKey(PipelineId("p"), StageIndex(stage)) for stage in range(3))
LIFE = Incarnation(1)
CHAIN: Hashes = np.arange(1, 101, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def snapshot(hashes: Hashes, seq: int = 1, *, page: int = 0, last: bool = True, total: Hashes | None = None) -> Digest:
    whole = hashes if total is None else total
    group = GroupDigest(CacheGroup.ATTENTION, pack_hashes(hashes), b"", len(whole), checksum(whole))
    return Digest(LIFE, seq, DigestKind.SNAPSHOT, (group,), Capacity(1, 0, 0), page, last)


def delta(seq: int, before: Hashes, added: Hashes, removed: Hashes) -> Digest:
    after = np.setdiff1d(np.union1d(before, added), removed)
    group = GroupDigest(CacheGroup.ATTENTION, pack_hashes(added), pack_hashes(removed), len(after), checksum(after))
    return Digest(LIFE, seq, DigestKind.DELTA, (group,), Capacity(1, 0, 0))


def index_of(**held: int) -> ReuseIndex:
    """Daemons a, b, c that hold so many leading blocks of CHAIN."""
    index = ReuseIndex()
    for key, blocks in zip((A, B, C), held.values(), strict=False):
        index.attach(key, LIFE, 1000)
        assert index.apply(key, snapshot(CHAIN[:blocks])) is Verdict.REPLACE
    return index


EMPTY = CHAIN[:0]


def test_hint_is_the_minimum_when_daemons_hold_different_depths() -> None:
    index = index_of(a=40, b=70, c=55)
    assert index.hint_blocks(CHAIN) == 40
    assert [index.own_blocks(key, CHAIN) for key in (A, B, C)] == [40, 70, 55]
    assert index.hint_blocks(CHAIN[:30]) == 30
    assert index.hint_blocks(EMPTY) == 0


def test_hint_is_zero_when_one_daemon_has_sent_no_snapshot() -> None:
    index = index_of(a=40, b=70)
    index.attach(C, LIFE, 1000)
    assert index.hint_blocks(CHAIN) == 0
    assert (index.in_sync(A), index.in_sync(C)) == (True, False)


def test_hint_is_zero_when_nobody_is_attached() -> None:
    assert ReuseIndex().hint_blocks(CHAIN) == 0


def test_deltas_move_the_hint_when_they_come_in_order() -> None:
    index = index_of(a=40, b=40)
    assert index.apply(A, delta(2, CHAIN[:40], CHAIN[40:60], EMPTY)) is Verdict.APPLY
    assert index.hint_blocks(CHAIN) == 40
    assert index.apply(B, delta(2, CHAIN[:40], CHAIN[40:50], EMPTY)) is Verdict.APPLY
    assert index.hint_blocks(CHAIN) == 50
    assert index.apply(A, delta(3, CHAIN[:60], EMPTY, CHAIN[20:60])) is Verdict.APPLY
    assert index.hint_blocks(CHAIN) == 20
    assert index.check() == []


def test_daemon_counts_as_empty_when_a_delta_is_missing_until_one_snapshot_repaired_it() -> None:
    index = index_of(a=40, b=40)
    assert index.apply(A, delta(3, CHAIN[:50], CHAIN[50:60], EMPTY)) is Verdict.RESYNC
    assert (index.hint_blocks(CHAIN), index.in_sync(A), index.indexed_blocks(A)) == (0, False, 0)
    assert index.apply(A, snapshot(CHAIN[:60], seq=3)) is Verdict.REPLACE
    assert (index.hint_blocks(CHAIN), index.indexed_blocks(A)) == (40, 60)


def test_daemon_counts_as_empty_when_the_checksum_is_wrong() -> None:
    index = index_of(a=40, b=40)
    assert index.apply(A, delta(2, CHAIN[:39], CHAIN[40:41], EMPTY)) is Verdict.RESYNC
    assert index.hint_blocks(CHAIN) == 0


def test_duplicate_changes_nothing_when_it_comes_again() -> None:
    index = index_of(a=40, b=40)
    again = delta(2, CHAIN[:40], CHAIN[40:60], EMPTY)
    assert index.apply(A, again) is Verdict.APPLY
    version = index.version
    assert index.apply(A, again) is Verdict.IGNORE
    assert (index.version, index.own_blocks(A, CHAIN)) == (version, 60)


def test_old_contents_stay_visible_when_a_new_snapshot_is_still_arriving() -> None:
    index = index_of(a=40)
    whole = CHAIN[:60]
    assert index.apply(A, snapshot(whole[:30], 2, last=False, total=whole)) is Verdict.MORE
    assert index.hint_blocks(CHAIN) == 40
    assert index.apply(A, snapshot(whole[30:], 2, page=1, total=whole)) is Verdict.REPLACE
    assert index.hint_blocks(CHAIN) == 60


def test_half_a_snapshot_is_swept_when_its_next_page_is_lost() -> None:
    index = index_of(a=0)
    whole = CHAIN[:60]
    index.apply(A, snapshot(whole[:30], 2, last=False, total=whole))
    assert index.apply(A, snapshot(whole[30:], 2, page=2, total=whole)) is Verdict.RESYNC
    assert index.distinct_blocks() == 30
    while index.sweep(16):
        pass
    assert (index.distinct_blocks(), index.check()) == (0, [])


def test_lost_daemon_is_masked_at_once_and_swept_in_slices_when_detached() -> None:
    index = index_of(a=40, b=70)
    index.detach(A)
    assert index.hint_blocks(CHAIN) == 70
    assert index.distinct_blocks() == 70
    slices = 1
    while index.sweep(4):
        slices += 1
    assert slices == SHARDS // 4
    assert (index.distinct_blocks(), index.check()) == (70, [])
    index.detach(B)
    while index.sweep(64):
        pass
    assert index.distinct_blocks() == 0


def test_new_incarnation_sees_nothing_of_the_old_one_when_its_bit_is_not_swept_yet() -> None:
    index = index_of(a=40)
    index.attach(A, Incarnation(2), 1000)
    assert index.hint_blocks(CHAIN) == 0
    fresh = snapshot(CHAIN[:10])
    fresh = Digest(Incarnation(2), 1, fresh.kind, fresh.groups, fresh.capacity)
    assert index.apply(A, fresh) is Verdict.REPLACE
    assert index.hint_blocks(CHAIN) == 10


def test_digest_of_another_incarnation_is_refused_when_it_arrives_late() -> None:
    index = index_of(a=40)
    index.attach(A, Incarnation(2), 1000)
    assert index.apply(A, snapshot(CHAIN[:40])) is Verdict.RESYNC
    assert index.hint_blocks(CHAIN) == 0


@pytest.mark.parametrize("blocks", [20, 21])
def test_daemon_counts_as_empty_when_it_claims_more_than_its_pools(blocks: int) -> None:
    index = ReuseIndex()
    index.attach(A, LIFE, 20)
    verdict = index.apply(A, snapshot(CHAIN[:blocks]))
    assert verdict is (Verdict.REPLACE if blocks == 20 else Verdict.RESYNC)
    assert index.excess(A) == (None if blocks == 20 else blocks)
    assert index.hint_blocks(CHAIN) == (20 if blocks == 20 else 0)


def test_unattached_daemon_is_ignored_when_it_speaks() -> None:
    assert ReuseIndex().apply(A, snapshot(CHAIN)) is Verdict.IGNORE


def test_short_chain_views_the_map_keys_when_given_packed_hashes() -> None:
    packed = hash_blocks(HashScope("m", "l"), np.arange(100, dtype="<i4").tobytes(), 16)
    chain = short_chain(packed)
    assert chain.tolist() == [short(packed[i * 32 : i * 32 + 32]) for i in range(6)]
    assert chain.base is not None  # nothing was copied


# --- recurrent groups ---------------------------------------------------------------------------

ATTENTION, RECURRENT = CacheGroup.ATTENTION, CacheGroup.RECURRENT


def groups_snapshot(blocks: Hashes | None, states: Hashes | None, seq: int = 1) -> Digest:
    """One page that tells whichever groups the daemon has."""
    told = {ATTENTION: blocks, RECURRENT: states}
    groups = tuple(
        GroupDigest(group, pack_hashes(found), b"", len(found), checksum(found))
        for group, found in told.items()
        if found is not None
    )
    return Digest(LIFE, seq, DigestKind.SNAPSHOT, groups, Capacity(1, 0, 0))


def places(*blocks: int) -> Hashes:
    """Short hashes of the prefixes that end after so many blocks."""
    return CHAIN[np.array(blocks, dtype=int) - 1] if blocks else EMPTY


def mixed(a: int, b: tuple[int, tuple[int, ...]], c: tuple[int, ...]) -> ReuseIndex:
    """`a` attends, `b` does both, `c` is recurrent only."""
    index = ReuseIndex()
    for key, groups in ((A, (ATTENTION,)), (B, (ATTENTION, RECURRENT)), (C, (RECURRENT,))):
        index.attach(key, LIFE, 1000, groups)
    index.apply(A, groups_snapshot(CHAIN[:a], None))
    index.apply(B, groups_snapshot(CHAIN[: b[0]], places(*b[1])))
    index.apply(C, groups_snapshot(None, places(*c)))
    return index


@pytest.mark.parametrize(
    ("a", "b", "c", "hint"),
    [
        (60, (50, (16, 32, 48)), (16, 32, 48), 48),
        (40, (50, (16, 32, 48)), (16, 32, 48), 32),  # the blocks end before the last snapshot
        (60, (50, (16, 48)), (16, 32), 16),
        (60, (50, (48,)), (32,), 0),
        (6, (6, ()), (), 0),  # field bug 18: attention alone is worth nothing
        (0, (50, (16,)), (16,), 0),
    ],
)
def test_hint_is_the_last_snapshot_of_all_recurrent_daemons_within_everybodys_blocks(
    a: int, b: tuple[int, tuple[int, ...]], c: tuple[int, ...], hint: int
) -> None:
    index = mixed(a, b, c)
    assert index.hint_blocks(CHAIN) == hint
    assert index.attention_blocks(CHAIN) == min(a, b[0])
    assert index.check() == []


def test_snapshot_is_looked_for_from_any_depth_down() -> None:
    index = mixed(60, (60, (16, 32, 48)), (16, 32, 48))
    assert [index.snapshot_blocks(CHAIN, most) for most in (100, 48, 47, 32, 16, 15, 0)] == [48, 48, 32, 32, 16, 0, 0]


def test_place_is_reusable_when_blocks_and_snapshot_are_there_on_all() -> None:
    index = mixed(60, (50, (16, 32)), (16, 32, 48))
    assert [index.reusable_to(CHAIN, blocks) for blocks in (16, 32, 33, 48)] == [True, True, False, False]
    assert not ReuseIndex().reusable_to(CHAIN, 1)
    dense = index_of(a=40, b=70)
    assert [dense.reusable_to(CHAIN, blocks) for blocks in (1, 40, 41)] == [True, True, False]


@pytest.mark.parametrize("lost", [A, B, C])
def test_daemon_counts_as_empty_in_every_group_when_it_is_not_in_sync(lost: DaemonKey) -> None:
    index = mixed(60, (50, (16, 32)), (16, 32))
    gap = Digest(LIFE, 9, DigestKind.DELTA, (), Capacity(1, 0, 0))
    assert index.apply(lost, gap) is Verdict.RESYNC
    assert index.hint_blocks(CHAIN) == 0
    assert not index.reusable_to(CHAIN, 16)
    assert index.snapshot_blocks(CHAIN, 50) == (32 if lost is A else 0)
    assert index.attention_blocks(CHAIN) == (50 if lost is C else 0)


def test_whole_chain_is_scanned_when_no_daemon_attends() -> None:
    index = ReuseIndex()
    for key in (A, B):
        index.attach(key, LIFE, 1000, (RECURRENT,))
        index.apply(key, groups_snapshot(None, places(16, 80)))
    assert (index.attention_blocks(CHAIN), index.hint_blocks(CHAIN), index.hint_blocks(CHAIN[:79])) == (100, 80, 16)


def test_groups_are_learnt_anew_when_a_daemon_joins_with_others() -> None:
    index = index_of(a=40)
    version = index.version
    index.reshape(A, 1000, (ATTENTION,))
    assert index.version == version
    index.reshape(A, 1000, (ATTENTION, RECURRENT))
    assert (index.hint_blocks(CHAIN), index.version) == (0, version + 1)
    index.reshape(B, 1000, (RECURRENT,))  # not attached
    assert index.check() == []


def test_sieve_forgets_snapshots_when_they_are_dropped_or_their_daemon_is_lost() -> None:
    index = mixed(60, (60, (16, 32)), (16, 32))
    after = places(16)
    removed = GroupDigest(RECURRENT, b"", pack_hashes(places(32)), 1, checksum(after))
    dropped = Digest(LIFE, 2, DigestKind.DELTA, (removed,), Capacity(1, 0, 0))
    assert index.apply(B, dropped) is Verdict.APPLY
    assert index.hint_blocks(CHAIN) == 16
    for key in (A, B, C):
        index.detach(key)
    while index.sweep(64):
        pass
    assert (index.distinct_blocks(), index.check()) == (0, [])


@pytest.mark.parametrize("states", [4, 5])
def test_daemon_counts_as_empty_when_blocks_and_snapshots_exceed_its_pools(states: int) -> None:
    index = ReuseIndex()
    index.attach(A, LIFE, 20 + 4, (ATTENTION, RECURRENT))
    verdict = index.apply(A, groups_snapshot(CHAIN[:20], CHAIN[:states]))
    assert verdict is (Verdict.REPLACE if states == 4 else Verdict.RESYNC)
