"""A small BlockCache with a driver that checks every invariant after each step.

Plays the machine and the copy thread: `run` takes one request through its whole life, copies end when
`copy` says so. For unit tests with exact blocks and counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.harness.stage_core import B, hashes, key
from wavepp_proto.terms import CacheGroup, GroupEndpoint, Incarnation
from wavepp_stage.core.block_cache import BlockCache
from wavepp_stage.core.cache_manager import Escrow, Lease, Materialised
from wavepp_stage.core.cache_shape import CacheShape
from wavepp_stage.core.digest_feed import DigestFeed
from wavepp_stage.core.work import StateWork

ATTENTION, RECURRENT = CacheGroup.ATTENTION, CacheGroup.RECURRENT


def own(endpoint: int) -> tuple[GroupEndpoint, ...]:
    """What a stage with attention only says of its groups."""
    return (GroupEndpoint(ATTENTION, endpoint),)


class Pool:
    """A cache of 8 blocks unless told otherwise."""

    def __init__(
        self,
        pool: int = 8,
        floor: int = 0,
        host: int = 0,
        slots: int = 0,
        groups: tuple[CacheGroup, ...] = (ATTENTION,),
    ) -> None:
        shape = CacheShape(pool, B, floor, host, slots, groups)
        self.cache = BlockCache(shape, DigestFeed(Incarnation(1)))

    def lease(
        self,
        name: str,
        tokens: Sequence[int],
        candidate: int = 0,
        *,
        snapshots: int = 0,
        ignore_floor: bool = False,
    ) -> Lease:
        lease = self.cache.lease(key(name), len(tokens), hashes(tokens), candidate, snapshots, ignore_floor)
        self.cache.check()
        return lease

    def commit(self, name: str, tokens: Sequence[int], candidate: int = 0, *, snapshots: int = 0) -> Escrow:
        assert not self.lease(name, tokens, candidate, snapshots=snapshots).shortfall
        escrow = self.cache.escrow(key(name))
        self.cache.commit(key(name))
        self.cache.check()
        return escrow

    def materialise(self, name: str) -> Materialised:
        done = self.cache.materialise(key(name))
        self.cache.check()
        return done

    def copy(self, *, ok: bool = True) -> list[tuple[str, list[int], list[int]]]:
        """Start and end every copy: (direction, device blocks, host blocks) of each lot."""
        lots = self.cache.take_lots()
        for lot in lots:
            self.cache.copied(lot.number, ok)
            self.cache.check()
        return [(lot.direction.value, lot.device.tolist(), lot.host.tolist()) for lot in lots]

    def run(self, name: str, tokens: Sequence[int], candidate: int = 0, snapshots: tuple[int, ...] = ()) -> list[int]:
        """Commit, materialise with its copies, compute as one chunk and publish; the block table."""
        self.commit(name, tokens, candidate, snapshots=len(snapshots))
        while self.materialise(name) is not Materialised.DONE:
            self.copy()
        self.plan(name, candidate, *snapshots)
        self.publish(name, len(tokens))
        return self.table(name)

    def plan(self, name: str, start: int, *snapshots: int) -> StateWork | None:
        work = self.cache.plan_state(key(name), start, snapshots)
        self.cache.check()
        return work

    def publish(self, name: str, tokens: int) -> None:
        self.cache.publish(key(name), tokens)
        self.cache.check()

    def cached(self, name: str, tokens: Sequence[int], snapshots: tuple[int, ...] = ()) -> list[int]:
        """Run and release."""
        table = self.run(name, tokens, snapshots=snapshots)
        self.release(name)
        return table

    def release(self, name: str) -> None:
        self.cache.release(key(name))
        self.cache.check()

    def table(self, name: str) -> list[int]:
        return [int(block) for block in self.cache.table(key(name))]

    def hit(self, tokens: Sequence[int]) -> dict[CacheGroup, int]:
        """Own hit of each group (tokens)."""
        probe = key("probe")
        lease = self.cache.lease(probe, len(tokens), hashes(tokens), 0)
        self.cache.release(probe)
        return {hit.group: hit.endpoint for hit in lease.group_hits}

    @property
    def counts(self) -> tuple[int, int, int]:
        """(free, evictable, escrowed) blocks."""
        capacity = self.cache.capacity()
        return capacity.free_blocks, capacity.evictable_blocks, capacity.escrowed_blocks

    @property
    def states(self) -> tuple[int, int, int]:
        """(free, evictable, escrowed) slots of the recurrent group."""
        capacity = self.cache.capacity()
        return capacity.recurrent_free, capacity.recurrent_evictable, capacity.recurrent_escrowed

    @property
    def host_free(self) -> int:
        return self.cache.capacity().host_free_blocks
