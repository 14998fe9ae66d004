"""The stage's side of the digest (DESIGN.md section 5): numbered deltas, or one atomic snapshot.

Changes pile up without a number, where an addition and a removal of the same hash cancel out; the
next `since` numbers them, a message's worth at a time. Numbered deltas are kept for readers up to a
bound; a reader further behind gets a snapshot. Owns numbers, log, count and checksum; the hashes that
are resident are the cache's, which is the only caller. The reader's side is wavepp_proto.digest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from wavepp_proto.digest import MASK, checksum, pack_hashes
from wavepp_proto.errors import InternalError
from wavepp_proto.hashing import SHORT_BYTES
from wavepp_proto.limits import DIGEST_BACKLOG_HASHES, MAX_DIGEST_HASHES
from wavepp_proto.terms import CacheGroup, Capacity, Digest, DigestKind, GroupDigest, Incarnation
from wavepp_stage.core.block_hashes import Shorts

NOTHING: Shorts = np.empty(0, dtype=np.uint64)


class DigestFeed:
    """One incarnation's digests; `seq` starts at 1 and never decreases, whatever the cache does."""

    def __init__(self, incarnation: Incarnation) -> None:
        self._incarnation = incarnation
        self.seq = 1
        self._count = 0
        self._checksum = 0
        self._log: deque[Digest] = deque()
        """Deltas with consecutive seqs, the last one `self.seq`."""
        self._logged = 0
        """Hashes in the log."""
        self._changes: list[tuple[bool, Shorts]] = []
        """(added?, hashes) not numbered yet, in order."""
        self._changed = 0
        """Hashes in `_changes`."""
        self._lost = False
        """Too much changed, or the cache was replaced: only a snapshot tells."""
        self._told_capacity = 0
        """Capacity seq of the last numbered delta."""
        self.changes = 0
        """Times that residency changed: readers are woken when it grew."""

    def added(self, hashes: Shorts) -> None:
        """These hashes became resident; parents before children."""
        self._change(True, hashes)

    def removed(self, hashes: Shorts) -> None:
        """These are no longer resident; children before parents."""
        self._change(False, hashes)

    def replaced(self) -> None:
        """The cache is another one now: readers need a snapshot."""
        self.changes += 1
        self._lost = True
        self._changes, self._changed = [], 0

    def since(self, seq: int, resident: Callable[[], Shorts], capacity: Capacity) -> list[Digest]:
        """What a reader at `seq` has not seen (empty if nothing); a reader at 0 knows nothing.

        `resident()` is a copy of all resident hashes at this instant."""
        self._number(resident, capacity)
        if seq == self.seq:
            return []
        first = self.seq - len(self._log)  # the seq before the first logged delta
        if not first <= seq < self.seq or seq == 0:
            return self._snapshot(resident(), capacity)
        return [self._log[at] for at in range(seq - first, len(self._log))]

    def _change(self, added: bool, hashes: Shorts) -> None:
        if not len(hashes):
            return
        self.changes += 1
        if self._lost:
            return
        self._changes.append((added, hashes))
        self._changed += len(hashes)
        if self._changed > DIGEST_BACKLOG_HASHES:
            self.replaced()

    def _number(self, resident: Callable[[], Shorts], capacity: Capacity) -> None:
        if self._lost:
            hashes = resident()
            self._count, self._checksum = len(hashes), checksum(hashes)
            self._lost = False
            self.seq += 1
            self._log.clear()
            self._logged = 0
        else:
            added, removed = self._net()
            self._changes, self._changed = [], 0
            for at in range(0, len(removed), MAX_DIGEST_HASHES):
                self._append(NOTHING, removed[at : at + MAX_DIGEST_HASHES], capacity)
            for at in range(0, len(added), MAX_DIGEST_HASHES):
                self._append(added[at : at + MAX_DIGEST_HASHES], NOTHING, capacity)
            if capacity.seq != self._told_capacity and not len(added) and not len(removed):
                self._append(NOTHING, NOTHING, capacity)
        self._told_capacity = capacity.seq

    def _net(self) -> tuple[Shorts, Shorts]:
        """(added, removed) since the last number, without what cancelled out, in order."""
        added, removed = self._joined(True), self._joined(False)
        if set(added.tolist()).isdisjoint(removed.tolist()):
            return added, removed
        net: dict[int, bool] = {}
        for came, hashes in self._changes:
            for key in hashes.tolist():
                # A hash changes sides each time: a second change undoes the first.
                if net.pop(key, None) is None:
                    net[key] = came
        adds = [key for key, came in net.items() if came]
        removes = [key for key, came in net.items() if not came]
        return np.array(adds, dtype=np.uint64), np.array(removes, dtype=np.uint64)

    def _joined(self, added: bool) -> Shorts:
        return np.concatenate([NOTHING, *(hashes for came, hashes in self._changes if came is added)])

    def _append(self, added: Shorts, removed: Shorts, capacity: Capacity) -> None:
        self.seq += 1
        self._count += len(added) - len(removed)
        self._checksum = (self._checksum + checksum(added) - checksum(removed)) & MASK
        group = self._group(pack_hashes(added), pack_hashes(removed))
        self._log.append(Digest(self._incarnation, self.seq, DigestKind.DELTA, (group,), capacity))
        self._logged += len(added) + len(removed) + 1  # an empty delta takes room too
        while self._logged > DIGEST_BACKLOG_HASHES:
            oldest = self._log.popleft()
            self._logged -= sum(len(g.added) + len(g.removed) for g in oldest.groups) // SHORT_BYTES + 1

    def _snapshot(self, hashes: Shorts, capacity: Capacity) -> list[Digest]:
        packed, step = pack_hashes(hashes), MAX_DIGEST_HASHES * SHORT_BYTES
        starts = range(0, max(1, len(packed)), step)
        return [
            Digest(
                self._incarnation,
                self.seq,
                DigestKind.SNAPSHOT,
                (self._group(packed[start : start + step], b""),),
                capacity,
                page,
                start == starts[-1],
            )
            for page, start in enumerate(starts)
        ]

    def _group(self, added: bytes, removed: bytes) -> GroupDigest:
        return GroupDigest(CacheGroup.ATTENTION, added, removed, self._count, self._checksum)

    def check(self, resident: Shorts) -> None:
        """Numbered state plus what is pending must be what is resident; raises InternalError."""
        if self._lost:
            return
        added, removed = self._net()
        count = self._count + len(added) - len(removed)
        total = (self._checksum + checksum(added) - checksum(removed)) & MASK
        if (count, total) != (len(resident), checksum(resident)):
            raise InternalError("the digest is not what is resident", field="digest", value=count, limit=len(resident))
