"""Digest algebra (DESIGN.md): what a reader does with snapshots and deltas of one daemon.

Owns count and checksum arithmetic and the reader's cursor: gap, duplicate, reorder and checksum
mismatch are detected here, and such a daemon counts as holding nothing until one snapshot repaired
it. Does not own the map from hash to daemons (the controller's index) nor the feed (the stage's).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from wavepp_proto.terms import CacheGroup, Digest, DigestKind, Incarnation

Hashes = npt.NDArray[np.uint64]
MASK = (1 << 64) - 1


def unpack_hashes(packed: bytes) -> Hashes:
    """Packed 8-byte short hashes as an array (no copy)."""
    return np.frombuffer(packed, dtype="<u8")


def pack_hashes(hashes: Iterable[int] | Hashes) -> bytes:
    return np.asarray(hashes if isinstance(hashes, np.ndarray) else list(hashes), dtype="<u8").tobytes()


def checksum(hashes: Hashes) -> int:
    """Sum mod 2^64; order does not matter."""
    return int(np.add.reduce(hashes, dtype=np.uint64)) if hashes.size else 0


class Verdict(Enum):
    APPLY = "apply"  # a delta in order: add and remove its hashes
    REPLACE = "replace"  # the last page of a snapshot: what the cursor gathered replaces everything
    MORE = "more"  # a page of a snapshot that is not complete yet
    IGNORE = "ignore"  # already applied
    RESYNC = "resync"  # gap, reorder or mismatch: count the daemon as empty, ask for a snapshot


@dataclass(slots=True)
class _GroupSum:
    count: int = 0
    checksum: int = 0


@dataclass(slots=True)
class DigestCursor:
    """A reader's place in the digests of one incarnation. `seq` never decreases."""

    incarnation: Incarnation
    seq: int = 0
    in_sync: bool = False
    sums: dict[CacheGroup, _GroupSum] = field(default_factory=dict)
    gathered: dict[CacheGroup, list[Hashes]] = field(default_factory=dict)
    _next_page: int = 0
    _snapshot_seq: int = 0

    def offer(self, digest: Digest) -> Verdict:
        """What to do with `digest`; the caller applies it before offering the next."""
        if digest.incarnation != self.incarnation:
            return self._lose()
        if digest.kind is DigestKind.SNAPSHOT:
            return self._page(digest)
        if self.in_sync and digest.seq <= self.seq:
            return Verdict.IGNORE
        if not self.in_sync or digest.seq != self.seq + 1:
            return self._lose()
        return self._delta(digest)

    def _delta(self, digest: Digest) -> Verdict:
        for group in digest.groups:
            have = self.sums.setdefault(group.group, _GroupSum())
            added, removed = unpack_hashes(group.added), unpack_hashes(group.removed)
            have.count += added.size - removed.size
            have.checksum = (have.checksum + checksum(added) - checksum(removed)) & MASK
            if (have.count, have.checksum) != (group.count, group.checksum):
                return self._lose()
        self.seq = digest.seq
        return Verdict.APPLY

    def _page(self, digest: Digest) -> Verdict:
        # Whatever its page: deltas that overtook this copy made it older than what the reader has.
        if digest.seq < self.seq:
            return Verdict.IGNORE
        if digest.page == 0:
            self.gathered = {}
            self._next_page, self._snapshot_seq = 0, digest.seq
        if digest.page != self._next_page or digest.seq != self._snapshot_seq:
            return self._lose()
        self._next_page += 1
        for group in digest.groups:
            self.gathered.setdefault(group.group, []).append(unpack_hashes(group.added))
        if not digest.last_page:
            return Verdict.MORE
        # The last page carries every group's totals: a group without them could have lost a page.
        if self.gathered.keys() - {group.group for group in digest.groups}:
            return self._lose()
        self.sums = {}
        for group in digest.groups:
            pages = self.gathered.get(group.group, [])
            total = _GroupSum(sum(p.size for p in pages), sum(checksum(p) for p in pages) & MASK)
            if (total.count, total.checksum) != (group.count, group.checksum):
                return self._lose()
            self.sums[group.group] = total
        self.seq, self.in_sync = digest.seq, True
        return Verdict.REPLACE

    def _lose(self) -> Verdict:
        self.in_sync = False
        self.gathered = {}
        self._next_page = 0
        return Verdict.RESYNC
