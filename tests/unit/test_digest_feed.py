"""The digest feed: exact numbers, pages and bounds."""

from __future__ import annotations

import numpy as np
import pytest

from wavepp_proto.digest import DigestCursor, Verdict, unpack_hashes
from wavepp_proto.errors import InternalError
from wavepp_proto.limits import DIGEST_BACKLOG_HASHES, MAX_DIGEST_HASHES
from wavepp_proto.terms import CacheGroup, Capacity, Digest, DigestKind, Incarnation
from wavepp_stage.core.digest_feed import DigestFeed, Residents

ATTENTION, RECURRENT = CacheGroup.ATTENTION, CacheGroup.RECURRENT
ROOM = Capacity(1, 8, 0)


class Feed:
    """A feed and what is resident."""

    def __init__(self) -> None:
        self.feed = DigestFeed(Incarnation(2))
        self.resident: list[int] = []
        self.capacity = ROOM
        self.since(0)

    def add(self, *values: int) -> None:
        self.resident += values
        self.feed.added({ATTENTION: np.array(values, dtype=np.uint64)})

    def remove(self, *values: int) -> None:
        self.resident = [value for value in self.resident if value not in values]
        self.feed.removed({ATTENTION: np.array(values, dtype=np.uint64)})

    def since(self, seq: int) -> list[Digest]:
        return list(self.feed.since(seq, self._hashes, self.capacity))

    def _hashes(self) -> Residents:
        return {ATTENTION: np.array(self.resident, dtype=np.uint64)}


def contents(digests: list[Digest]) -> list[tuple[int, list[int], list[int]]]:
    return [
        (digest.seq, unpack_hashes(group.added).tolist(), unpack_hashes(group.removed).tolist())
        for digest in digests
        for group in digest.groups
    ]


def test_reader_gets_an_empty_snapshot_when_nothing_is_cached() -> None:
    (digest,) = Feed().since(0)
    assert (digest.kind, digest.page, digest.last_page) == (DigestKind.SNAPSHOT, 0, True)
    assert contents([digest]) == [(digest.seq, [], [])]


def test_deltas_carry_one_seq_each_when_a_reader_follows() -> None:
    made = Feed()
    start = made.feed.seq
    made.add(1, 2)
    assert contents(made.since(start)) == [(start + 1, [1, 2], [])]
    made.remove(2)
    assert contents(made.since(start + 1)) == [(start + 2, [], [2])]
    assert contents(made.since(start)) == [(start + 1, [1, 2], []), (start + 2, [], [2])]
    assert made.since(start + 2) == []


def test_changes_cancel_when_they_undo_each_other_between_two_fetches() -> None:
    made = Feed()
    start = made.feed.seq
    made.add(1, 2, 3)
    made.remove(3, 2)
    made.add(2)
    assert contents(made.since(start)) == [(start + 1, [1, 2], [])]
    made.remove(1)
    made.add(1)
    assert made.since(start + 1) == []


def test_removals_come_before_additions_when_both_happened() -> None:
    """A reader's set stays closed under prefixes between two deltas of one answer."""
    made = Feed()
    made.add(1)
    start = made.since(0)[-1].seq
    made.add(2)
    made.remove(1)
    assert contents(made.since(start)) == [(start + 1, [], [1]), (start + 2, [2], [])]


def test_delta_is_empty_when_only_capacity_changed() -> None:
    made = Feed()
    start = made.feed.seq
    made.capacity = Capacity(2, 7, 0)
    (digest,) = made.since(start)
    assert contents([digest]) == [(start + 1, [], [])]
    assert digest.capacity == Capacity(2, 7, 0)


def test_snapshot_is_paged_when_it_is_larger_than_a_message() -> None:
    made = Feed()
    made.add(*range(2 * MAX_DIGEST_HASHES + 1))
    pages = made.since(0)
    assert [(page.page, page.last_page, len(page.groups[0].added) // 8) for page in pages] == [
        (0, False, MAX_DIGEST_HASHES),
        (1, False, MAX_DIGEST_HASHES),
        (2, True, 1),
    ]
    assert len({page.seq for page in pages}) == 1
    assert {page.groups[0].count for page in pages} == {2 * MAX_DIGEST_HASHES + 1}


def test_reader_gets_a_snapshot_when_it_is_further_behind_than_the_log() -> None:
    made = Feed()
    start = made.feed.seq
    for value in range(0, DIGEST_BACKLOG_HASHES + MAX_DIGEST_HASHES, MAX_DIGEST_HASHES):
        made.add(*range(value, value + MAX_DIGEST_HASHES))
        made.since(made.feed.seq)
    assert made.since(start)[0].kind is DigestKind.SNAPSHOT
    assert made.since(made.feed.seq - 1)[0].kind is DigestKind.DELTA


def test_backlog_is_given_up_when_nobody_reads() -> None:
    made = Feed()
    start = made.feed.seq
    made.add(*range(DIGEST_BACKLOG_HASHES))
    assert made.feed._changed == DIGEST_BACKLOG_HASHES
    made.add(DIGEST_BACKLOG_HASHES)
    assert made.feed._changed == 0
    assert {digest.kind for digest in made.since(start)} == {DigestKind.SNAPSHOT}


def test_check_fails_when_the_digest_is_not_what_is_resident() -> None:
    made = Feed()
    made.add(1)
    made.feed.check({ATTENTION: np.array([1], dtype=np.uint64)})
    with pytest.raises(InternalError, match="not what is resident"):
        made.feed.check({ATTENTION: np.array([2], dtype=np.uint64)})


def test_removal_is_not_cut_when_it_does_not_fit_behind_another() -> None:
    """A subtree that is dropped stays in one delta: a reader would see its lower half without the upper."""
    made = Feed()
    made.add(*range(1, MAX_DIGEST_HASHES + 1))
    start = made.since(0)[-1].seq
    made.remove(*range(1, 11))
    subtree = range(11, MAX_DIGEST_HASHES + 1)
    made.remove(*subtree)
    made.add(5)
    sizes = [(len(removed), len(added)) for _, added, removed in contents(made.since(start))]
    assert sizes == [(9 + len(subtree), 0)]
    made = Feed()
    made.add(*range(1, MAX_DIGEST_HASHES + 11))
    start = made.since(0)[-1].seq
    made.remove(*range(1, 12))
    made.remove(*range(12, MAX_DIGEST_HASHES + 11))
    assert [len(removed) for _, _, removed in contents(made.since(start))] == [11, MAX_DIGEST_HASHES - 1]


def test_reader_gets_a_snapshot_when_a_removal_is_larger_than_a_message() -> None:
    made = Feed()
    made.add(*range(MAX_DIGEST_HASHES + 2))
    start = made.since(0)[-1].seq
    made.remove(*range(1, MAX_DIGEST_HASHES + 2))
    (digest,) = made.since(start)
    assert (digest.kind, digest.groups[0].count) == (DigestKind.SNAPSHOT, 1)


def test_groups_leave_in_one_delta_when_removed_together() -> None:
    feed, nothing = DigestFeed(Incarnation(2)), np.empty(0, dtype=np.uint64)
    feed.replaced((ATTENTION, RECURRENT))
    node = np.array([7], dtype=np.uint64)
    both = {ATTENTION: node, RECURRENT: node}
    (snapshot,) = feed.since(0, lambda: both, ROOM)
    assert [(group.group, group.count, group.checksum) for group in snapshot.groups] == [
        (ATTENTION, 1, 7),
        (RECURRENT, 1, 7),
    ]
    feed.removed(both)
    (delta,) = feed.since(snapshot.seq, lambda: {ATTENTION: nothing}, ROOM)
    assert [(group.count, group.removed) for group in delta.groups] == [(0, node.tobytes()), (0, node.tobytes())]


def test_group_is_not_told_when_the_stage_does_not_have_it() -> None:
    feed = DigestFeed(Incarnation(2))
    feed.replaced((RECURRENT,))
    seq = feed.since(0, dict, ROOM)[-1].seq
    changes = feed.changes
    feed.added({ATTENTION: np.array([1], dtype=np.uint64)})
    assert feed.changes == changes
    assert feed.since(seq, dict, ROOM) == []


def test_every_reader_starts_over_when_the_daemon_has_a_new_incarnation() -> None:
    made = Feed()
    made.add(1, 2)
    start = made.since(0)[-1].seq
    made.feed.reincarnate(Incarnation(9))
    for seq in (0, start):
        (digest,) = made.since(seq)
        assert (digest.incarnation, digest.kind, digest.groups[0].count) == (Incarnation(9), DigestKind.SNAPSHOT, 2)
        assert digest.seq == start + 1
    made.add(3)
    assert contents(made.since(start + 1)) == [(start + 2, [3], [])]


def test_pages_of_a_snapshot_stay_what_they_were_when_the_cache_has_moved_on() -> None:
    """They are made as they are sent, outside the mutex."""
    feed = DigestFeed(Incarnation(2))
    blocks = np.arange(1, 2 * MAX_DIGEST_HASHES + 1, dtype=np.uint64)
    feed.replaced((ATTENTION, RECURRENT))
    both = {ATTENTION: blocks, RECURRENT: np.array([7, 9], dtype=np.uint64)}
    pages = feed.since(0, lambda: both, ROOM)
    feed.added({ATTENTION: np.array([1 << 40], dtype=np.uint64)})
    feed.since(pages[0].seq, lambda: both, ROOM)
    cursor = DigestCursor(Incarnation(2))
    verdicts = [cursor.offer(page) for page in pages]
    assert verdicts == [Verdict.MORE, Verdict.MORE, Verdict.REPLACE]
    told = [[len(group.added) // 8 for group in page.groups] for page in pages]
    assert told == [[MAX_DIGEST_HASHES, 0], [MAX_DIGEST_HASHES, 0], [0, 2]]
    assert {page.seq for page in pages} == {pages[-1].seq}
    assert pages[:2] == [pages[0], pages[1]]
