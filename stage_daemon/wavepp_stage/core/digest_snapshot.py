"""The pages of one digest snapshot, made one by one as they are sent (DESIGN.md).

Owns an atomic copy of what was resident, and how it is cut into messages: one page after
the other, across groups. Copying takes a moment under the mutex; making a thousand pages takes a hundred
times as long, and happens outside. Made by `digest_feed`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import overload

from wavepp_proto.digest import pack_hashes
from wavepp_proto.terms import CacheGroup, Capacity, Digest, DigestKind, GroupDigest, Incarnation
from wavepp_stage.core.block_hashes import Shorts


class SnapshotPages(Sequence[Digest]):
    """At least one page, if only to say that nothing is held; the last one is marked."""

    def __init__(
        self,
        incarnation: Incarnation,
        seq: int,
        hashes: Mapping[CacheGroup, Shorts],
        totals: Mapping[CacheGroup, tuple[int, int]],
        capacity: Capacity,
        page_hashes: int,
    ) -> None:
        """`hashes` by group, not to be changed any more; `totals` are (count, checksum) of every group that is told."""
        self._incarnation, self._seq, self._capacity = incarnation, seq, capacity
        self._hashes, self._totals, self._page_hashes = hashes, totals, page_hashes
        total = sum(len(hashes[group]) for group in totals)
        self._pages = max(1, -(-total // page_hashes))

    def __len__(self) -> int:
        return self._pages

    @overload
    def __getitem__(self, index: int) -> Digest: ...
    @overload
    def __getitem__(self, index: slice) -> list[Digest]: ...
    def __getitem__(self, index: int | slice) -> Digest | list[Digest]:
        places = range(self._pages)[index]
        return self._page(places) if isinstance(places, int) else [self._page(place) for place in places]

    def _page(self, page: int) -> Digest:
        groups = []
        start = page * self._page_hashes  # of this page, counted from the begin of the group
        for group, (count, checksum) in self._totals.items():
            hashes = self._hashes[group]
            part = hashes[max(0, start) : max(0, start + self._page_hashes)]
            groups.append(GroupDigest(group, pack_hashes(part), b"", count, checksum))
            start -= len(hashes)
        last = page == self._pages - 1
        return Digest(self._incarnation, self._seq, DigestKind.SNAPSHOT, tuple(groups), self._capacity, page, last)
