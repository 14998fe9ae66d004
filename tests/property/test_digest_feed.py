"""The stage's digest feed against the reader's cursor: any interleaving ends with the truth.

Small limits make every kind of answer frequent: many pages, many deltas, a log too short, a backlog
given up. Readers fetch at will, lose what they fetched, and repair themselves with one snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wavepp_proto.digest import DigestCursor, Verdict, checksum, unpack_hashes
from wavepp_proto.terms import CacheGroup, Capacity, Digest, Incarnation
from wavepp_stage.core import digest_feed
from wavepp_stage.core.block_hashes import Shorts
from wavepp_stage.core.digest_feed import DigestFeed, Residents

INCARNATION = Incarnation(5)
PAGE, BACKLOG = 3, 12
GROUPS = (CacheGroup.ATTENTION, CacheGroup.RECURRENT)
Change = tuple[CacheGroup, int]


@dataclass
class Reader:
    """What a controller does with the digests of one daemon."""

    cursor: DigestCursor = field(default_factory=lambda: DigestCursor(INCARNATION))
    known: set[int] = field(default_factory=set)
    snapshots: int = 0

    def take(self, digests: list[Digest]) -> None:
        for digest in digests:
            before = self.cursor.seq
            verdict = self.cursor.offer(digest)
            assert self.cursor.seq >= before
            (group,) = digest.groups
            assert len(group.added) + len(group.removed) <= 8 * PAGE
            if verdict is Verdict.REPLACE:
                pages = self.cursor.gathered[CacheGroup.ATTENTION]
                self.known = {int(value) for page in pages for value in page}
                self.snapshots += 1
            elif verdict is Verdict.APPLY:
                self.known -= {int(value) for value in unpack_hashes(group.removed)}
                self.known |= {int(value) for value in unpack_hashes(group.added)}
            elif verdict is Verdict.RESYNC:
                self.known = set()

    @property
    def position(self) -> int:
        return self.cursor.seq if self.cursor.in_sync else 0


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest_feed, "MAX_DIGEST_HASHES", PAGE)
    monkeypatch.setattr(digest_feed, "DIGEST_BACKLOG_HASHES", BACKLOG)


change = st.tuples(st.just("change"), st.lists(st.integers(1, 30), min_size=1, max_size=8, unique=True))
fetch = st.tuples(st.just("fetch"), st.integers(0, 1))
lose = st.tuples(st.just("lose"), st.integers(0, 1))
replace = st.tuples(st.just("replace"), st.just(0))
capacity = st.tuples(st.just("capacity"), st.just(0))
steps = st.lists(st.one_of(change, change, fetch, fetch, lose, replace, capacity), max_size=40)


@settings(max_examples=300)
@given(steps=steps)
def test_readers_end_with_the_truth_when_steps_interleave_in_any_way(
    steps: list[tuple[str, list[int] | int]],
) -> None:
    feed, truth, seq = DigestFeed(INCARNATION), dict[int, None](), 1
    readers = [Reader(), Reader()]

    def resident() -> Residents:
        return {CacheGroup.ATTENTION: np.array(list(truth), dtype=np.uint64)}

    def since(reader: Reader) -> list[Digest]:
        return list(feed.since(reader.position, resident, Capacity(seq, 0, 0)))

    for step, detail in steps:
        match step, detail:
            case "change", list(values):
                gone = [value for value in values if value in truth]
                come = [value for value in values if value not in truth]
                for value in gone:
                    del truth[value]
                truth.update(dict.fromkeys(come))
                feed.removed({CacheGroup.ATTENTION: np.array(gone, dtype=np.uint64)})
                feed.added({CacheGroup.ATTENTION: np.array(come, dtype=np.uint64)})
            case "fetch", int(which):
                readers[which].take(since(readers[which]))
                assert readers[which].known == set(truth)
            case "lose", int(which):
                readers[which].take(since(readers[which])[1:])  # the first message of the answer is lost
            case "replace", _:
                truth.clear()
                feed.replaced()
            case "capacity", _:
                seq += 1
        feed.check(resident())
    for reader in readers:
        reader.take(since(reader))
        assert reader.known == set(truth)
        assert since(reader) == []
        sums = reader.cursor.sums[CacheGroup.ATTENTION]
        assert (sums.count, sums.checksum) == (len(truth), checksum(resident()[CacheGroup.ATTENTION]))


marked = st.lists(st.tuples(st.sampled_from(GROUPS), st.integers(1, 12)), min_size=1, max_size=4, unique=True)


@settings(max_examples=300)
@given(steps=st.lists(st.one_of(marked, marked, st.none()), max_size=30))
def test_what_is_removed_together_stays_together_when_changes_pile_up(steps: list[list[Change] | None]) -> None:
    """One reader, several changes between two fetches (None): no delta takes a part of one removal, in any group."""
    feed = DigestFeed(INCARNATION)
    feed.replaced(GROUPS)
    cursor, known = DigestCursor(INCARNATION), set[Change]()
    truth: set[Change] = set()
    last: dict[Change, int] = {}
    """The step that changed a hash last."""

    def resident() -> dict[CacheGroup, Shorts]:
        return by_group(truth)

    for at, step in enumerate([*steps, None]):
        if step is not None:
            gone, come = [one for one in step if one in truth], [one for one in step if one not in truth]
            truth.difference_update(gone)
            truth.update(come)
            last.update(dict.fromkeys(gone, 2 * at) | dict.fromkeys(come, 2 * at + 1))
            feed.removed(by_group(gone))
            feed.added(by_group(come))
            feed.check(resident())
            continue
        for digest in feed.since(cursor.seq if cursor.in_sync else 0, resident, Capacity(1, 0, 0)):
            verdict = cursor.offer(digest)
            if verdict is Verdict.REPLACE:
                known = {(group, int(one)) for group, pages in cursor.gathered.items() for p in pages for one in p}
            if verdict is not Verdict.APPLY:
                continue
            removed = {(part.group, int(one)) for part in digest.groups for one in unpack_hashes(part.removed)}
            known -= removed
            known |= {(part.group, int(one)) for part in digest.groups for one in unpack_hashes(part.added)}
            begun = {last[one] for one in removed}
            assert not {one for one in known if last[one] in begun}, "a removal in two deltas"
        assert known == truth


def by_group(changes: Iterable[Change]) -> dict[CacheGroup, Shorts]:
    ordered = list(changes)
    return {group: np.array([one for side, one in ordered if side is group], dtype=np.uint64) for group in GROUPS}
