"""What a controller knows of one stage: its digests replayed through the reader's cursor.

Owns the sets of hashes by group. After every single delta the attention hashes must be prefix-closed
as far as the caller says which hash is whose parent, and a snapshot needs its node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from wavepp_proto.digest import DigestCursor, Verdict, unpack_hashes
from wavepp_proto.terms import CacheGroup, Digest, Incarnation


class Source(Protocol):
    def digests_since(self, seq: int) -> Sequence[Digest]: ...


class DigestReader:
    """One reader of one cache."""

    def __init__(self, incarnation: Incarnation, parents: Mapping[int, int] | None = None) -> None:
        self.cursor = DigestCursor(incarnation)
        self.known: dict[CacheGroup, set[int]] = {}
        self.snapshots = 0
        self._parents = {} if parents is None else parents
        """Hash of a prefix to that of the prefix one block shorter; first blocks have none."""

    def read(self, cache: Source) -> Sequence[Digest]:
        """Take everything new; every digest must be in order."""
        digests = cache.digests_since(self.cursor.seq if self.cursor.in_sync else 0)
        for digest in digests:
            self._apply(digest)
        return digests

    def _apply(self, digest: Digest) -> None:
        verdict = self.cursor.offer(digest)
        if verdict is Verdict.MORE:
            return
        if verdict is Verdict.REPLACE:
            self.snapshots += 1
            gathered = self.cursor.gathered
            self.known = {
                group.group: {int(value) for page in gathered[group.group] for value in page} for group in digest.groups
            }
        else:
            assert verdict is Verdict.APPLY, verdict
            for group in digest.groups:
                hashes = self.known.setdefault(group.group, set())
                removed, added = set(unpack_hashes(group.removed).tolist()), set(unpack_hashes(group.added).tolist())
                assert removed <= hashes, "only what is known is removed"
                assert hashes.isdisjoint(added), "only what is unknown is added"
                hashes -= removed
                hashes |= added
        self._check_closed()

    def _check_closed(self) -> None:
        blocks = self.known.get(CacheGroup.ATTENTION)
        if blocks is None:
            return
        assert all(self._parents[block] in blocks for block in blocks if block in self._parents), "a hole in a prefix"
        assert self.known.get(CacheGroup.RECURRENT, set()) <= blocks, "a snapshot without its node"
