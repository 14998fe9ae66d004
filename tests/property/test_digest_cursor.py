"""A reader that obeys the cursor never believes a wrong set, whatever the network does to the digests.

The dumb model keeps the true set after every seq; the reader applies only what the cursor tells it.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from wavepp_proto.digest import DigestCursor, Verdict, pack_hashes, unpack_hashes
from wavepp_proto.terms import CacheGroup, Capacity, Digest, DigestKind, GroupDigest, Incarnation

LIFE = Incarnation(1)
ROOM = Capacity(1, 1, 1)
HASH = st.integers(0, 12) | st.integers(2**64 - 4, 2**64 - 1)


@dataclass
class Daemon:
    """The truth: a set of hashes, and every digest it ever emitted."""

    resident: set[int] = field(default_factory=set)
    seq: int = 0
    truth: dict[int, frozenset[int]] = field(default_factory=lambda: {0: frozenset()})

    def change(self, flips: set[int]) -> Digest:
        added, removed = flips - self.resident, flips & self.resident
        self.resident ^= flips
        self.seq += 1
        self.truth[self.seq] = frozenset(self.resident)
        return Digest(LIFE, self.seq, DigestKind.DELTA, (self._group(added, removed),), ROOM)

    def snapshot(self, page_size: int) -> list[Digest]:
        hashes = sorted(self.resident)
        pages = [hashes[at : at + page_size] for at in range(0, len(hashes), page_size)] or [[]]
        return [
            Digest(LIFE, self.seq, DigestKind.SNAPSHOT, (self._group(set(part)),), ROOM, number, part is pages[-1])
            for number, part in enumerate(pages)
        ]

    def _group(self, added: Set[int], removed: Set[int] = frozenset()) -> GroupDigest:
        total = sum(self.resident) % 2**64
        return GroupDigest(CacheGroup.ATTENTION, pack_hashes(added), pack_hashes(removed), len(self.resident), total)


@dataclass
class Reader:
    cursor: DigestCursor = field(default_factory=lambda: DigestCursor(LIFE))
    believes: set[int] = field(default_factory=set)

    def take(self, digest: Digest) -> Verdict:
        verdict = self.cursor.offer(digest)
        if verdict is Verdict.APPLY:
            for group in digest.groups:
                self.believes |= {int(item) for item in unpack_hashes(group.added)}
                self.believes -= {int(item) for item in unpack_hashes(group.removed)}
        elif verdict is Verdict.REPLACE:
            parts = self.cursor.gathered.get(CacheGroup.ATTENTION, [])
            self.believes = {int(item) for part in parts for item in part}
        elif verdict is Verdict.RESYNC:
            self.believes = set()
        return verdict


STEP = st.one_of(
    st.tuples(st.just("change"), st.sets(HASH, max_size=4)),
    st.tuples(st.just("snapshot"), st.integers(1, 4)),
)
FATE = st.sampled_from(["deliver", "deliver", "deliver", "drop", "twice", "hold", "hold_back"])


@settings(max_examples=300)
@given(steps=st.lists(st.tuples(STEP, FATE), max_size=25))
def test_reader_in_sync_believes_the_truth_when_digests_are_lost_doubled_or_reordered(
    steps: list[tuple[tuple[str, set[int] | int], str]],
) -> None:
    daemon, reader = Daemon(), Reader()
    held: list[Digest] = []
    seq = 0
    for (kind, value), fate in steps:
        if kind == "change":
            assert isinstance(value, set)
            digests = [daemon.change(set(value))]
        else:
            assert isinstance(value, int)
            digests = daemon.snapshot(value)
        for digest in _as_fated(digests, fate, held):
            reader.take(digest)
            assert reader.cursor.seq >= seq
            seq = reader.cursor.seq
            if reader.cursor.in_sync:
                assert reader.believes == daemon.truth[reader.cursor.seq]
            else:
                assert not reader.believes


def _as_fated(digests: list[Digest], fate: str, held: list[Digest]) -> list[Digest]:
    """What the network hands over now; `held` keeps what it hands over later."""
    if fate == "drop":
        return digests[1:]
    if fate == "twice":
        return [*digests, *digests]
    if fate == "hold":
        held.extend(digests)
        return []
    if fate == "hold_back":
        late, held[:] = list(held), []
        return [*reversed(digests), *late]
    return digests


@settings(max_examples=100)
@given(flips=st.lists(st.sets(HASH, max_size=5), max_size=12), page_size=st.integers(1, 5), at=st.integers(0, 12))
def test_reader_is_in_sync_after_every_digest_when_nothing_goes_wrong(
    flips: list[set[int]], page_size: int, at: int
) -> None:
    daemon, reader = Daemon(), Reader()
    for digest in daemon.snapshot(page_size):
        reader.take(digest)
    for number, flip in enumerate(flips):
        assert reader.take(daemon.change(set(flip))) is Verdict.APPLY
        assert reader.believes == daemon.resident
        if number == at:
            assert [reader.take(digest) for digest in daemon.snapshot(page_size)][-1] is Verdict.REPLACE
            assert reader.believes == daemon.resident
    assert (reader.cursor.in_sync, reader.cursor.seq) == (True, len(flips))
