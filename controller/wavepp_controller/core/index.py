"""Which daemon holds which block: the reuse index of one pipeline (DESIGN.md section 5).

Owns one map per cache group from short hash to bitmask of daemons, fed by digests, and the hint read
from it. A hint binds nobody: leases are the truth. A daemon whose digest is not in sync counts as
holding nothing in any group. The maps are cut into shards so that no single step (growing, sweeping) is long.

A daemon's contents live under a BIT. A snapshot is written page by page under a fresh bit and becomes
visible when its last page has checked out; the bit it replaces, and that of a lost daemon, is masked
at once (nothing asks for it any more) and swept a few shards at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from wavepp_proto.digest import DigestCursor, Hashes, Verdict, unpack_hashes
from wavepp_proto.hashing import SHORT_BYTES
from wavepp_proto.terms import CacheGroup, DaemonKey, Digest, DigestKind, Incarnation

SHARDS = 256
Shards = list[dict[int, int]]
SIEVE = 1 << 16
"""Buckets of the snapshot sieve: far more than the snapshots that fit the stages' slots."""


def short_chain(block_hashes: bytes) -> Hashes:
    """Short hashes of packed 32-byte hashes: a strided view, shape [blocks], nothing copied."""
    return unpack_hashes(block_hashes)[:: 32 // SHORT_BYTES]


def _empty_sieve() -> npt.NDArray[np.uint32]:
    return np.zeros(SIEVE, dtype=np.uint32)


@dataclass(slots=True)
class _Source:
    """What the index knows of one daemon."""

    cursor: DigestCursor
    groups: frozenset[CacheGroup]
    """What it must hold for a prefix to be reusable; it says nothing of other groups."""
    bound: int
    """Most blocks and snapshots its pools can hold: more in its digest is a fault, not memory to spend."""
    bit: int | None = None
    """Visible contents; None until one snapshot is complete, and after a gap."""
    loading: int | None = None
    """Contents of a snapshot that is still arriving."""
    loaded: int = 0
    """Hashes under `loading`."""


@dataclass(slots=True)
class ReuseIndex:
    _tables: dict[CacheGroup, Shards] = field(default_factory=dict)
    _sources: dict[DaemonKey, _Source] = field(default_factory=dict)
    _dead: dict[int, int] = field(default_factory=dict)
    """Bit to shards still to sweep; such a bit is not given out again."""
    _sweep_at: int = 0
    _sieve: npt.NDArray[np.uint32] = field(default_factory=_empty_sieve)
    """Distinct snapshots by the low bits of their hash: most blocks of a chain have none, and are passed over."""
    version: int = 0
    """Grows with every visible change: a hint of an older version may be improved."""

    def attach(
        self,
        key: DaemonKey,
        incarnation: Incarnation,
        bound_blocks: int,
        groups: Iterable[CacheGroup] = (CacheGroup.ATTENTION,),
    ) -> None:
        """Start listening to a daemon, which counts as empty until its first snapshot is complete."""
        self.detach(key)
        self._sources[key] = _Source(DigestCursor(incarnation), frozenset(groups), bound_blocks)

    def regroup(self, key: DaemonKey, groups: Iterable[CacheGroup]) -> None:
        """The daemon has said which groups it really has."""
        source = self._sources.get(key)
        if source is not None and source.groups != frozenset(groups):
            source.groups = frozenset(groups)
            self.version += 1

    def detach(self, key: DaemonKey) -> None:
        """Mask everything the daemon holds, at once."""
        source = self._sources.pop(key, None)
        if source is not None:
            self._hide(source)
            self._abandon(source)

    def in_sync(self, key: DaemonKey) -> bool:
        return key in self._sources and self._sources[key].bit is not None

    def seq_of(self, key: DaemonKey) -> int:
        """Seq of the last digest applied of a daemon in sync; 0 otherwise: a fresh snapshot is wanted."""
        source = self._sources.get(key)
        return source.cursor.seq if source is not None and source.bit is not None else 0

    def indexed_blocks(self, key: DaemonKey) -> int:
        """Blocks and snapshots known of a daemon in sync; 0 otherwise."""
        source = self._sources.get(key)
        if source is None or source.bit is None:
            return 0
        return sum(sums.count for sums in source.cursor.sums.values())

    def apply(self, key: DaemonKey, digest: Digest) -> Verdict:
        """Take one digest message; RESYNC means that the daemon now counts as empty."""
        source = self._sources.get(key)
        if source is None:
            return Verdict.IGNORE
        verdict = source.cursor.offer(digest)
        if verdict is Verdict.RESYNC:
            return self._lose(source)
        if verdict is Verdict.IGNORE:
            return verdict
        if digest.kind is DigestKind.SNAPSHOT:
            return self._page(source, digest, verdict)
        if source.bit is None or self._indexed(source) > source.bound:
            return self._lose(source)
        for group in digest.groups:
            self._add(group.group, unpack_hashes(group.added), source.bit)
            self._remove(group.group, unpack_hashes(group.removed), source.bit)
        self.version += 1
        return verdict

    def hint_blocks(self, chain: Hashes) -> int:
        """Leading blocks of `chain` that every attached daemon can reuse, in every group it has."""
        return self.snapshot_blocks(chain, self.attention_blocks(chain))

    def attention_blocks(self, chain: Hashes) -> int:
        """Leading blocks that EVERY daemon with attention holds; all of them if none has attention.

        Bisects: residency along a chain is monotone on each daemon, and an AND of prefix-closed sets is
        prefix-closed. 0 if any of them is not in sync.
        """
        need = self._need(CacheGroup.ATTENTION)
        if need is None or not self._sources:
            return 0
        return self._depth(chain, need) if need else len(chain)

    def snapshot_blocks(self, chain: Hashes, most: int) -> int:
        """The deepest place, at most `most` blocks in, where EVERY recurrent daemon has a snapshot; 0 if there is
        none. `most` itself if no daemon is recurrent."""
        need = self._need(CacheGroup.RECURRENT)
        if need is None:
            return 0
        if not need or not most:
            return most
        shards = self._shards(CacheGroup.RECURRENT)
        # Presence is not monotone here, so nothing bisects: whatever passes the sieve is looked up, deepest first.
        likely = np.flatnonzero(self._sieve[chain[:most] & np.uint64(SIEVE - 1)])
        place: int
        for place in likely[::-1].tolist():
            found = int(chain[place])
            if shards[found % SHARDS].get(found, 0) & need == need:
                return place + 1
        return 0

    def reusable_to(self, chain: Hashes, blocks: int) -> bool:
        """Whether every daemon can reuse exactly `blocks` (>= 1) blocks, in every group it has: two look-ups."""
        found = int(chain[blocks - 1])
        for group in CacheGroup:
            need = self._need(group)
            if need is None or self._shards(group)[found % SHARDS].get(found, 0) & need != need:
                return False
        return bool(self._sources)

    def own_blocks(self, key: DaemonKey, chain: Hashes) -> int:
        """Leading blocks that one daemon holds in its attention group: for explaining, not for deciding."""
        source = self._sources.get(key)
        return self._depth(chain, source.bit) if source is not None and source.bit is not None else 0

    def sweep(self, shards: int) -> bool:
        """Erase masked bits from the next few shards; True while there is more to do."""
        for _ in range(shards):
            if not self._dead:
                return False
            self._sweep_shard(self._sweep_at)
            self._sweep_at = (self._sweep_at + 1) % SHARDS
            self._dead = {bit: left - 1 for bit, left in self._dead.items() if left > 1}
        return bool(self._dead)

    def distinct_blocks(self) -> int:
        """Entries in memory over all groups, masked ones included."""
        return sum(len(shard) for shards in self._tables.values() for shard in shards)

    def check(self) -> list[str]:
        """Findings in words: entries under bits that nobody owns, two owners of one bit."""
        owned = [bit for source in self._sources.values() for bit in (source.bit, source.loading) if bit is not None]
        known = 0
        for bit in [*owned, *self._dead]:
            known |= bit
        findings = [] if known.bit_count() == len(owned) + len(self._dead) else ["a bit of the index has two owners"]
        snapshots = sum(len(shard) for shard in self._tables.get(CacheGroup.RECURRENT, ()))
        if int(self._sieve.sum()) != snapshots:
            findings.append(f"the sieve counts {int(self._sieve.sum())} snapshots, {snapshots} are known")
        stray = sum(
            1 for shards in self._tables.values() for shard in shards for mask in shard.values() if mask & ~known
        )
        return [*findings, f"{stray} entries under a bit that nobody owns"] if stray else findings

    # --- contents -------------------------------------------------------------------------------

    def _page(self, source: _Source, digest: Digest, verdict: Verdict) -> Verdict:
        if digest.page == 0:
            self._abandon(source)
            source.loading = self._new_bit()
        if source.loading is None:
            return self._lose(source)
        for group in digest.groups:
            added = unpack_hashes(group.added)
            source.loaded += added.size
            if source.loaded > source.bound:
                return self._lose(source)
            self._add(group.group, added, source.loading)
        if verdict is Verdict.REPLACE:
            source.cursor.gathered = {}
            self._hide(source)
            source.bit, source.loading, source.loaded = source.loading, None, 0
            self.version += 1
        return verdict

    def _lose(self, source: _Source) -> Verdict:
        source.cursor.in_sync = False
        source.cursor.gathered = {}
        self._hide(source)
        self._abandon(source)
        return Verdict.RESYNC

    def _hide(self, source: _Source) -> None:
        if source.bit is not None:
            self._dead[source.bit] = SHARDS
            source.bit = None
            self.version += 1

    def _abandon(self, source: _Source) -> None:
        if source.loading is not None:
            self._dead[source.loading] = SHARDS
            source.loading, source.loaded = None, 0

    def _indexed(self, source: _Source) -> int:
        return sum(sums.count for sums in source.cursor.sums.values())

    def _new_bit(self) -> int:
        taken = 0
        for source in self._sources.values():
            taken |= (source.bit or 0) | (source.loading or 0)
        for bit in self._dead:
            taken |= bit
        return ~taken & (taken + 1)

    # --- shards ---------------------------------------------------------------------------------

    def _need(self, group: CacheGroup) -> int | None:
        """Bits of all daemons that have the group, 0 if none has; None if one of them is not in sync."""
        need = 0
        for source in self._sources.values():
            if group in source.groups:
                if source.bit is None:
                    return None
                need |= source.bit
        return need

    def _shards(self, group: CacheGroup) -> Shards:
        shards = self._tables.get(group)
        if shards is None:
            shards = self._tables[group] = [{} for _ in range(SHARDS)]
        return shards

    def _depth(self, chain: Hashes, need: int) -> int:
        shards = self._shards(CacheGroup.ATTENTION)
        low, high = 0, len(chain)
        while low < high:
            middle = (low + high) // 2
            found = int(chain[middle])
            if shards[found % SHARDS].get(found, 0) & need == need:
                low = middle + 1
            else:
                high = middle
        return low

    def _add(self, group: CacheGroup, hashes: Hashes, bit: int) -> None:
        shards = self._shards(group)
        for added in hashes.tolist():
            shard = shards[added % SHARDS]
            if group is CacheGroup.RECURRENT and added not in shard:
                self._sieve[added % SIEVE] += 1
            shard[added] = shard.get(added, 0) | bit

    def _remove(self, group: CacheGroup, hashes: Hashes, bit: int) -> None:
        shards = self._shards(group)
        for removed in hashes.tolist():
            shard = shards[removed % SHARDS]
            left = shard.get(removed, 0) & ~bit
            if left:
                shard[removed] = left
            elif shard.pop(removed, None) is not None and group is CacheGroup.RECURRENT:
                self._sieve[removed % SIEVE] -= 1

    def _sweep_shard(self, at: int) -> None:
        keep = ~sum(self._dead)
        for group, shards in self._tables.items():
            shard = shards[at]
            for found, mask in list(shard.items()):
                left = mask & keep
                if left == 0:
                    del shard[found]
                    if group is CacheGroup.RECURRENT:
                        self._sieve[found % SIEVE] -= 1
                elif left != mask:
                    shard[found] = left
