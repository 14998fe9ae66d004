"""The stage's side of the digest (DESIGN.md): numbered deltas, or one atomic snapshot.

Changes pile up without a number, where an addition and a removal of the same hash cancel out; the
next `since` numbers them, a message's worth at a time. What is removed in one call stays in one delta,
in all groups: a reader never sees half of a subtree, nor a snapshot without its node. Numbered deltas
are kept for readers up to a bound; a reader further behind gets a snapshot. Owns numbers, log, counts
and checksums; the hashes that are resident are the cache's. The reader's side is wavepp_proto.digest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from wavepp_proto.digest import MASK, checksum, pack_hashes
from wavepp_proto.errors import InternalError
from wavepp_proto.hashing import SHORT_BYTES
from wavepp_proto.limits import DIGEST_BACKLOG_HASHES, MAX_DIGEST_HASHES
from wavepp_proto.terms import CacheGroup, Capacity, Digest, DigestKind, GroupDigest, Incarnation
from wavepp_stage.core.block_hashes import Shorts
from wavepp_stage.core.digest_snapshot import SnapshotPages

NOTHING: Shorts = np.empty(0, dtype=np.uint64)
Residents = Mapping[CacheGroup, Shorts]
"""Hashes by cache group; a group that is missing has none."""
Digests = Sequence[Digest]


def _size(hashes: Residents) -> int:
    return sum(map(len, hashes.values()))


@dataclass(frozen=True, slots=True)
class _Change:
    """What one call told; never empty."""

    added: bool
    hashes: Residents


@dataclass(slots=True)
class _Sum:
    """Count and checksum of what a group's numbered digests say."""

    count: int = 0
    checksum: int = 0

    def apply(self, added: Shorts, removed: Shorts) -> None:
        self.count += len(added) - len(removed)
        self.checksum = (self.checksum + checksum(added) - checksum(removed)) & MASK


class DigestFeed:
    """One incarnation's digests; `seq` starts at 1 and never decreases, whatever the cache does."""

    def __init__(self, incarnation: Incarnation) -> None:
        self._incarnation = incarnation
        self.seq = 1
        self._sums: dict[CacheGroup, _Sum] = {CacheGroup.ATTENTION: _Sum()}
        """By group that is told; others are the cache's own business."""
        self._log: deque[Digest] = deque()
        """Deltas with consecutive seqs, the last one `self.seq`."""
        self._logged = 0
        """Hashes in the log."""
        self._changes: list[_Change] = []
        """Not numbered yet, in order."""
        self._changed = 0
        """Hashes in `_changes`."""
        self._lost = False
        """Too much changed, or the cache was replaced: only a snapshot tells."""
        self._told_capacity = 0
        """Capacity seq of the last numbered delta."""
        self.changes = 0
        """Times that residency changed: readers are woken when it grew."""

    def added(self, hashes: Residents) -> None:
        """These became resident; parents before children, and before their snapshots."""
        self._change(True, hashes)

    def removed(self, hashes: Residents) -> None:
        """These are no longer resident; children before parents. They stay together."""
        self._change(False, hashes)

    def replaced(self, groups: tuple[CacheGroup, ...] | None = None) -> None:
        """The cache is another one now, with other groups if they are given: readers need a snapshot."""
        if groups is not None:
            self._sums = {group: _Sum() for group in groups}
        self.changes += 1
        self._lost = True
        self._changes, self._changed = [], 0

    def reincarnate(self, incarnation: Incarnation) -> None:
        """The same cache under a new name: `seq` goes on, every reader starts with a snapshot."""
        self._incarnation = incarnation
        self.replaced()

    def since(self, seq: int, resident: Callable[[], Residents], capacity: Capacity) -> Digests:
        """What a reader at `seq` has not seen (empty if nothing); a reader at 0 knows nothing.

        `resident()` is a copy of all resident hashes at this instant."""
        self._number(resident, capacity)
        if seq == self.seq:
            return []
        first = self.seq - len(self._log)  # the seq before the first logged delta
        if not first <= seq < self.seq or seq == 0:
            return self._snapshot(resident(), capacity)
        return [self._log[at] for at in range(seq - first, len(self._log))]

    def _change(self, added: bool, hashes: Residents) -> None:
        told = {group: part for group, part in hashes.items() if group in self._sums and len(part)}
        if not told:
            return
        self.changes += 1
        if self._lost:
            return
        self._changes.append(_Change(added, told))
        self._changed += _size(told)
        if self._changed > DIGEST_BACKLOG_HASHES or (not added and _size(told) > MAX_DIGEST_HASHES):
            self.replaced()

    def _number(self, resident: Callable[[], Residents], capacity: Capacity) -> None:
        if self._lost:
            self._sums = {group: _Sum() for group in self._sums}
            for group, hashes in resident().items():
                if group in self._sums:
                    self._sums[group].apply(hashes, NOTHING)
            self._lost = False
            self.seq += 1
            self._log.clear()
            self._logged = 0
        else:
            net = self._net()
            self._changes, self._changed = [], 0
            for delta in _packed([change for change in net if not change.added]):
                self._append({}, delta, capacity)
            for delta in _packed([part for change in net if change.added for part in _cut(change)]):
                self._append(delta, {}, capacity)
            if capacity.seq != self._told_capacity and not net:
                self._append({}, {}, capacity)
        self._told_capacity = capacity.seq

    def _net(self) -> list[_Change]:
        """Changes since the last number, without what cancelled out, in order."""
        if not self._overlaps():
            return self._changes
        last: dict[tuple[CacheGroup, int], int] = {}
        for at, change in enumerate(self._changes):
            for group, hashes in change.hashes.items():
                for key in hashes.tolist():
                    # A hash changes sides each time: a second change undoes the first.
                    if last.pop((group, key), None) is None:
                        last[group, key] = at
        net = []
        for at, change in enumerate(self._changes):
            left = {
                group: np.array([key for key in hashes.tolist() if last.get((group, key)) == at], dtype=np.uint64)
                for group, hashes in change.hashes.items()
            }
            if _size(left):
                net.append(_Change(change.added, left))
        return net

    def _overlaps(self) -> bool:
        """Whether any hash changed more than once."""
        for group in self._sums:
            sides = [set[int](), set[int]()]
            for change in self._changes:
                sides[change.added].update(change.hashes.get(group, NOTHING).tolist())
            if not sides[0].isdisjoint(sides[1]):
                return True
        return False

    def _append(self, added: Residents, removed: Residents, capacity: Capacity) -> None:
        self.seq += 1
        for group, total in self._sums.items():
            total.apply(added.get(group, NOTHING), removed.get(group, NOTHING))
        self._log.append(Digest(self._incarnation, self.seq, DigestKind.DELTA, self._groups(added, removed), capacity))
        self._logged += _size(added) + _size(removed) + 1  # an empty delta takes room too
        while self._logged > DIGEST_BACKLOG_HASHES:
            oldest = self._log.popleft()
            self._logged -= sum(len(g.added) + len(g.removed) for g in oldest.groups) // SHORT_BYTES + 1

    def _snapshot(self, hashes: Residents, capacity: Capacity) -> SnapshotPages:
        told = {group: hashes.get(group, NOTHING) for group in self._sums}
        totals = {group: (total.count, total.checksum) for group, total in self._sums.items()}
        return SnapshotPages(self._incarnation, self.seq, told, totals, capacity, MAX_DIGEST_HASHES)

    def _groups(self, added: Residents, removed: Residents) -> tuple[GroupDigest, ...]:
        """Every group, with its totals, whether it changed or not."""
        return tuple(
            GroupDigest(
                group,
                pack_hashes(added.get(group, NOTHING)),
                pack_hashes(removed.get(group, NOTHING)),
                total.count,
                total.checksum,
            )
            for group, total in self._sums.items()
        )

    def check(self, resident: Residents) -> None:
        """Numbered state plus what is pending must be what is resident; raises InternalError."""
        if self._lost:
            return
        net = self._net()
        for group, numbered in self._sums.items():
            total = _Sum(numbered.count, numbered.checksum)
            for change in net:
                hashes = change.hashes.get(group, NOTHING)
                total.apply(*((hashes, NOTHING) if change.added else (NOTHING, hashes)))
            want = resident.get(group, NOTHING)
            if (total.count, total.checksum) != (len(want), checksum(want)):
                raise InternalError(
                    "the digest is not what is resident", field=group.value, value=total.count, limit=len(want)
                )


def _cut(change: _Change) -> Iterator[_Change]:
    """An addition in pieces that fit a message."""
    for group, hashes in change.hashes.items():
        for at in range(0, len(hashes), MAX_DIGEST_HASHES):
            yield _Change(change.added, {group: hashes[at : at + MAX_DIGEST_HASHES]})


def _packed(changes: list[_Change]) -> Iterator[Residents]:
    """Whole changes, as many as fit a message, in order."""
    parts: dict[CacheGroup, list[Shorts]] = {}
    room = MAX_DIGEST_HASHES
    for change in changes:
        size = _size(change.hashes)
        if parts and size > room:
            yield {group: np.concatenate(pieces) for group, pieces in parts.items()}
            parts, room = {}, MAX_DIGEST_HASHES
        for group, hashes in change.hashes.items():
            parts.setdefault(group, []).append(hashes)
        room -= size
    if parts:
        yield {group: np.concatenate(pieces) for group, pieces in parts.items()}
