"""A reader's place in the digests of one daemon: every disorder is named and costs one snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from wavepp_proto.digest import DigestCursor, Verdict, checksum, pack_hashes, unpack_hashes
from wavepp_proto.terms import CacheGroup, Capacity, Digest, DigestKind, GroupDigest, Incarnation

LIFE = Incarnation(3)
ROOM = Capacity(1, 1, 1)
ATTENTION, RECURRENT = CacheGroup.ATTENTION, CacheGroup.RECURRENT
BIG = 2**64 - 1


def total(hashes: Sequence[int]) -> tuple[int, int]:
    return len(hashes), sum(hashes) % 2**64


def group(
    after: Sequence[int], added: Sequence[int] = (), removed: Sequence[int] = (), kind: CacheGroup = ATTENTION
) -> GroupDigest:
    """What changed, and the totals that say `after` is resident now."""
    return GroupDigest(kind, pack_hashes(added), pack_hashes(removed), *total(after))


def delta(seq: int, *groups: GroupDigest) -> Digest:
    return Digest(LIFE, seq, DigestKind.DELTA, groups, ROOM)


def page(seq: int, number: int, last: bool, *groups: GroupDigest) -> Digest:
    return Digest(LIFE, seq, DigestKind.SNAPSHOT, groups, ROOM, number, last)


def synced(seq: int = 10, hashes: Sequence[int] = (1, 2, BIG)) -> DigestCursor:
    cursor = DigestCursor(LIFE)
    assert cursor.offer(page(seq, 0, True, group(hashes, hashes))) is Verdict.REPLACE
    return cursor


def gathered(cursor: DigestCursor, kind: CacheGroup = ATTENTION) -> list[int]:
    return [int(item) for part in cursor.gathered.get(kind, []) for item in part]


def test_snapshot_replaces_when_all_pages_came_in_order() -> None:
    cursor = DigestCursor(LIFE)
    whole = (1, 2, BIG, 4, 5)
    assert cursor.offer(page(10, 0, False, group(whole, (1, 2)))) is Verdict.MORE
    assert not cursor.in_sync
    assert cursor.offer(page(10, 1, False, group(whole, (BIG, 4)), group((8,), (8,), kind=RECURRENT))) is Verdict.MORE
    last = page(10, 2, True, group(whole, (5,)), group((8,), (), kind=RECURRENT))
    assert cursor.offer(last) is Verdict.REPLACE
    assert (cursor.in_sync, cursor.seq) == (True, 10)
    assert gathered(cursor) == [1, 2, BIG, 4, 5]
    assert gathered(cursor, RECURRENT) == [8]


def test_delta_applies_when_it_is_the_next_one() -> None:
    cursor = synced()
    assert cursor.offer(delta(11, group((1, BIG, 7, 8), (7, 8), (2,)))) is Verdict.APPLY
    assert cursor.offer(delta(12, group((1, BIG, 7), (), (8,)))) is Verdict.APPLY
    assert cursor.offer(delta(13, group((4,), (4,), kind=RECURRENT))) is Verdict.APPLY
    assert cursor.offer(delta(14)) is Verdict.APPLY
    assert (cursor.in_sync, cursor.seq) == (True, 14)


def test_delta_is_ignored_when_it_was_applied_already() -> None:
    cursor = synced()
    first = delta(11, group((1, 2, BIG, 7), (7,)))
    assert cursor.offer(first) is Verdict.APPLY
    assert cursor.offer(first) is Verdict.IGNORE
    assert cursor.offer(delta(3, group((), ()))) is Verdict.IGNORE
    assert (cursor.in_sync, cursor.seq) == (True, 11)


@pytest.mark.parametrize(
    "wrong",
    [
        delta(12, group((1, 2, BIG, 7), (7,))),
        delta(11, group((1, 2, BIG), (7,))),
        delta(11, replace(group((1, 2, BIG, 7), (7,)), checksum=5)),
        delta(11, replace(group((1, 2, BIG, 7), (7,)), count=9)),
        replace(delta(11, group((1, 2, BIG, 7), (7,))), incarnation=Incarnation(4)),
    ],
    ids=["gap", "lost-add", "checksum", "count", "incarnation"],
)
def test_reader_resyncs_until_one_snapshot_when_a_delta_does_not_follow(wrong: Digest) -> None:
    cursor = synced()
    assert cursor.offer(wrong) is Verdict.RESYNC
    assert not cursor.in_sync
    assert cursor.offer(delta(13, group((), ()))) is Verdict.RESYNC
    assert cursor.offer(page(14, 0, True, group((1, 5), (1, 5)))) is Verdict.REPLACE
    assert cursor.offer(delta(15, group((1,), (), (5,)))) is Verdict.APPLY


def test_delta_is_refused_when_no_snapshot_came_first() -> None:
    assert DigestCursor(LIFE).offer(delta(1, group((7,), (7,)))) is Verdict.RESYNC


@pytest.mark.parametrize(
    "pages",
    [
        [page(10, 1, True, group((1,), (1,)))],
        [page(10, 0, False, group((1, 2), (1,))), page(10, 2, True, group((1, 2), (2,)))],
        [page(10, 0, False, group((1, 2), (1,))), page(11, 1, True, group((1, 2), (2,)))],
        [page(10, 0, True, group((1, 2), (1,)))],
        [page(10, 0, True, replace(group((1,), (1,)), checksum=2))],
    ],
    ids=["no-first", "skipped", "other-copy", "count", "checksum"],
)
def test_snapshot_is_refused_when_its_pages_do_not_make_one_copy(pages: list[Digest]) -> None:
    cursor = DigestCursor(LIFE)
    verdicts = [cursor.offer(item) for item in pages]
    assert verdicts == [Verdict.MORE] * (len(pages) - 1) + [Verdict.RESYNC]
    assert not cursor.in_sync
    assert cursor.gathered == {}


def test_snapshot_is_refused_when_its_last_page_leaves_a_group_out() -> None:
    """Without totals nobody could tell whether the group's pages all came."""
    cursor = DigestCursor(LIFE)
    cursor.offer(page(10, 0, False, group((8,), (8,), kind=RECURRENT), group((1,), (1,))))
    assert cursor.offer(page(10, 1, True, group((1,), ()))) is Verdict.RESYNC


def test_first_page_starts_anew_when_a_snapshot_broke_off() -> None:
    cursor = DigestCursor(LIFE)
    cursor.offer(page(10, 0, False, group((1, 2), (1,))))
    assert cursor.offer(page(12, 0, True, group((3,), (3,)))) is Verdict.REPLACE
    assert gathered(cursor) == [3]


def test_snapshot_is_ignored_page_by_page_when_it_is_older_than_the_reader() -> None:
    cursor = synced(seq=10)
    assert cursor.offer(page(9, 0, False, group((1, 2), (1,)))) is Verdict.IGNORE
    assert cursor.offer(page(9, 1, True, group((1, 2), (2,)))) is Verdict.IGNORE
    assert (cursor.in_sync, cursor.seq) == (True, 10)
    assert cursor.offer(delta(11)) is Verdict.APPLY


def test_seq_never_falls_when_deltas_overtake_a_snapshot() -> None:
    cursor = synced(seq=10)
    assert cursor.offer(page(11, 0, False, group((1, 2, BIG), (1, 2)))) is Verdict.MORE
    assert cursor.offer(delta(11)) is Verdict.APPLY
    assert cursor.offer(delta(12)) is Verdict.APPLY
    assert cursor.offer(page(11, 1, True, group((1, 2, BIG), (BIG,)))) is Verdict.IGNORE
    assert (cursor.in_sync, cursor.seq) == (True, 12)


def test_checksum_wraps_and_packing_is_little_endian_when_hashes_are_large() -> None:
    hashes = unpack_hashes(pack_hashes([BIG, BIG, 3]))
    assert checksum(hashes) == (2 * BIG + 3) % 2**64 == 1
    assert checksum(unpack_hashes(b"")) == 0
    assert pack_hashes([1]) == b"\1" + b"\0" * 7
    assert pack_hashes(np.array([258], np.uint64)) == b"\2\1" + b"\0" * 6
