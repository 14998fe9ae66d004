"""Which daemon holds which block: the reuse index of one pipeline (DESIGN.md).

Owns one map per cache group from short hash to bitmask of daemons, fed by digests, and the hint read
from it. A hint binds nobody: leases are the truth. A daemon whose digest is not in sync counts as
holding nothing in any group. Does not own the maps' inside: `hash_table` does.

A daemon's contents live under a BIT. A snapshot is written page by page under a fresh bit and becomes
visible when its last page has checked out; the bit it replaces, and that of a lost daemon, is masked
at once (nothing asks for it any more) and swept a few shards at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from wavepp_controller.core.hash_table import SHARDS, HashTable
from wavepp_proto.digest import DigestCursor, Hashes, Verdict, unpack_hashes
from wavepp_proto.hashing import SHORT_BYTES
from wavepp_proto.terms import CacheGroup, DaemonKey, Digest, DigestKind, Incarnation


def short_chain(block_hashes: bytes) -> Hashes:
    """Short hashes of packed 32-byte hashes: a strided view, shape [blocks], nothing copied."""
    return unpack_hashes(block_hashes)[:: 32 // SHORT_BYTES]


def _tables() -> dict[CacheGroup, HashTable]:
    return {group: HashTable(sparse=group is CacheGroup.RECURRENT) for group in CacheGroup}


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
    excess: int | None = None
    """How much the last digest told of, where that was more than `bound`."""


@dataclass(slots=True)
class ReuseIndex:
    _tables: dict[CacheGroup, HashTable] = field(default_factory=_tables)
    _sources: dict[DaemonKey, _Source] = field(default_factory=dict)
    _dead: dict[int, int] = field(default_factory=dict)
    """Bit to shards still to sweep; such a bit is not given out again."""
    _sweep_at: int = 0
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

    def reshape(self, key: DaemonKey, bound_blocks: int, groups: Iterable[CacheGroup]) -> None:
        """The daemon has said which pools and groups it really has."""
        source = self._sources.get(key)
        if source is None:
            return
        source.bound = bound_blocks
        if source.groups != frozenset(groups):
            source.groups = frozenset(groups)
            self.version += 1

    def excess(self, key: DaemonKey) -> int | None:
        """Blocks and snapshots that the last digest told of, if they are more than fit; a snapshot is not read on."""
        source = self._sources.get(key)
        return None if source is None else source.excess

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
        source.excess = None
        verdict = source.cursor.offer(digest)
        if verdict is Verdict.RESYNC:
            return self._lose(source)
        if verdict is Verdict.IGNORE:
            return verdict
        if digest.kind is DigestKind.SNAPSHOT:
            return self._page(source, digest, verdict)
        if source.bit is None:
            return self._lose(source)
        if self._indexed(source) > source.bound:
            source.excess = self._indexed(source)
            return self._lose(source)
        for group in digest.groups:
            self._tables[group.group].add(unpack_hashes(group.added), source.bit)
            self._tables[group.group].remove(unpack_hashes(group.removed), source.bit)
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
        return self._tables[CacheGroup.ATTENTION].depth(chain, need) if need else len(chain)

    def snapshot_blocks(self, chain: Hashes, most: int) -> int:
        """The deepest place, at most `most` blocks in, where EVERY recurrent daemon has a snapshot; 0 if there is
        none. `most` itself if no daemon is recurrent."""
        need = self._need(CacheGroup.RECURRENT)
        if need is None:
            return 0
        if not need or not most:
            return most
        # Presence is not monotone here, so nothing bisects.
        return self._tables[CacheGroup.RECURRENT].deepest(chain[:most], need)

    def reusable_to(self, chain: Hashes, blocks: int) -> bool:
        """Whether every daemon can reuse exactly `blocks` (>= 1) blocks, in every group it has: two look-ups."""
        found = int(chain[blocks - 1])
        for group in CacheGroup:
            need = self._need(group)
            if need is None or not self._tables[group].has(found, need):
                return False
        return bool(self._sources)

    def own_blocks(self, key: DaemonKey, chain: Hashes) -> int:
        """Leading blocks that one daemon holds in its attention group: for explaining, not for deciding."""
        source = self._sources.get(key)
        if source is None or source.bit is None:
            return 0
        return self._tables[CacheGroup.ATTENTION].depth(chain, source.bit)

    def sweep(self, shards: int) -> bool:
        """Erase masked bits from the next few shards; True while there is more to do."""
        for _ in range(shards):
            if not self._dead:
                return False
            keep = ~sum(self._dead)
            for table in self._tables.values():
                table.sweep(self._sweep_at, keep)
            self._sweep_at = (self._sweep_at + 1) % SHARDS
            self._dead = {bit: left - 1 for bit, left in self._dead.items() if left > 1}
        return bool(self._dead)

    def distinct_blocks(self) -> int:
        """Entries in memory over all groups, masked ones included."""
        return sum(len(table) for table in self._tables.values())

    def check(self) -> list[str]:
        """Findings in words: entries under bits that nobody owns, two owners of one bit."""
        owned = [bit for source in self._sources.values() for bit in (source.bit, source.loading) if bit is not None]
        known = 0
        for bit in [*owned, *self._dead]:
            known |= bit
        findings = [] if known.bit_count() == len(owned) + len(self._dead) else ["a bit of the index has two owners"]
        findings += [finding for table in self._tables.values() for finding in table.check()]
        stray = sum(1 for table in self._tables.values() for mask in table.masks() if mask & ~known)
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
                source.excess = source.loaded
                return self._lose(source)
            self._tables[group.group].add(added, source.loading)
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

    def _need(self, group: CacheGroup) -> int | None:
        """Bits of all daemons that have the group, 0 if none has; None if one of them is not in sync."""
        need = 0
        for source in self._sources.values():
            if group in source.groups:
                if source.bit is None:
                    return None
                need |= source.bit
        return need
