"""BlockCache against a model that is too simple to be wrong.

The model keeps prefixes in a dict and scans for everything; it predicts every answer of lease, escrow,
revise, materialise and publish, which prefixes eviction takes, and what each block must contain. Every
step checks the cache's own invariants, residency, and that a digest reader ends with the truth.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from tests.harness.stage_core import B, hashes, key
from wavepp_proto.digest import DigestCursor, Verdict, unpack_hashes
from wavepp_proto.hashing import blocks_for, reuse_cap
from wavepp_proto.terms import CacheGroup, HoldKey, Incarnation
from wavepp_stage.core import block_cache
from wavepp_stage.core.block_cache import BlockCache
from wavepp_stage.core.block_hashes import BlockHashes
from wavepp_stage.core.cache_shape import CacheShape
from wavepp_stage.core.digest_feed import DigestFeed

INCARNATION = Incarnation(3)
SLICE = 2
Prefix = tuple[int, ...]
"""Tokens of whole blocks, from the start of a prompt."""

prompts = st.builds(
    lambda changes, blocks, tail: [int(at in changes) for at in range(blocks) for _ in range(B)] + [9] * tail,
    st.sets(st.integers(0, 6), max_size=2),  # few changes: most prompts share a long prefix
    st.integers(0, 7),
    st.integers(1, B),
)


def prefixes(tokens: list[int], blocks: int) -> list[Prefix]:
    return [tuple(tokens[: depth * B]) for depth in range(1, blocks + 1)]


@dataclass
class ModelHold:
    tokens: list[int]
    hashes: BlockHashes
    ignore_floor: bool
    endpoint: int = 0
    phase: str = "leased"
    escrow: int = 0
    chain: list[Prefix] = field(default_factory=list)
    private: int = 0
    computed: int = 0
    publishing: bool = True

    @property
    def blocks(self) -> int:
        return blocks_for(len(self.tokens), B)


class Model:
    """Prefixes, references and counts, each found by scanning."""

    def __init__(self, pool: int, floor: int) -> None:
        self.pool, self.floor = pool, floor
        self.refs: Counter[Prefix] = Counter()
        self.stamp: dict[Prefix, int] = {}
        """Resident prefixes and when they were last used."""
        self.holds: dict[HoldKey, ModelHold] = {}
        self.quarantined: dict[int, tuple[int, list[list[Prefix]]]] = {}
        self.clock = 0

    @property
    def evictable(self) -> int:
        return sum(not self.refs[prefix] for prefix in self.stamp)

    @property
    def free(self) -> int:
        used = len(self.stamp) + sum(hold.private for hold in self.holds.values())
        return self.pool - used - sum(blocks for blocks, _ in self.quarantined.values())

    def room(self, ignore_floor: bool) -> int:
        escrowed = sum(hold.escrow for hold in self.holds.values())
        return self.free + self.evictable - escrowed - (0 if ignore_floor else self.floor)

    def hit(self, tokens: list[int]) -> int:
        resident = [p for p in prefixes(tokens, reuse_cap(len(tokens), B) // B) if p in self.stamp]
        return len(resident) * B

    def drop(self, chain: list[Prefix]) -> None:
        if chain:
            self.clock += 1
        for prefix in chain:
            self.refs[prefix] -= 1
            self.stamp[prefix] = self.clock

    def evict(self, count: int) -> None:
        for _ in range(count):
            parents = {prefix[:-B] for prefix in self.stamp}
            leaves = [p for p in self.stamp if not self.refs[p] and p not in parents]
            del self.stamp[min(leaves, key=lambda p: self.stamp[p])]

    def release(self, hold: ModelHold) -> None:
        self.drop(hold.chain)


class CacheMachine(RuleBasedStateMachine):
    live = Bundle("live")

    def __init__(self) -> None:
        super().__init__()
        self.counter = 0
        self.formation = 1
        self.cursor = DigestCursor(INCARNATION)
        self.reader: set[int] = set()
        self.canary: dict[int, Prefix] = {}

    @initialize(pool=st.integers(4, 14), floor=st.integers(0, 3))
    def start(self, pool: int, floor: int) -> None:
        self.cache = BlockCache(CacheShape(pool, B, floor), DigestFeed(INCARNATION))
        self.model = Model(pool, floor)

    @rule(target=live, tokens=prompts, lower=st.integers(0, 2), ignore_floor=st.booleans())
    def prepare(self, tokens: list[int], lower: int, ignore_floor: bool) -> object:
        """Lease, escrow and commit at the own hit, a little above or below it."""
        self.counter += 1
        name, model = key(f"r{self.counter}"), self.model
        hold = ModelHold(tokens, hashes(tokens), ignore_floor)
        hit = model.hit(tokens)
        candidate = min(max(0, hit - (lower - 1) * B), reuse_cap(len(tokens), B))
        chain = prefixes(tokens, min(hit, candidate) // B)
        shared = sum(model.refs[prefix] > 0 for prefix in chain)
        shortfall = max(0, hold.blocks - shared - model.room(ignore_floor))
        lease = self.cache.lease(name, len(tokens), hold.hashes, candidate, ignore_floor)
        assert lease.own_hit == hit
        assert lease.shortfall == shortfall
        if shortfall:
            assert self.cache.hold_state(name) is None
            return multiple()
        assert lease.endpoint == len(chain) * B
        hold.endpoint, hold.chain = lease.endpoint, chain
        for prefix in chain:
            model.refs[prefix] += 1
        model.holds[name] = hold
        escrow = self.cache.escrow(name)
        hold.escrow, hold.phase = hold.blocks - len(chain), "escrowed"
        assert (escrow.demand, escrow.shortfall, escrow.endpoint) == (hold.escrow, 0, hold.endpoint)
        assert escrow.backed_free + escrow.backed_evict == escrow.demand
        if hold.endpoint == candidate:
            self.cache.commit(name)
            hold.phase = "committed"
        return name

    @rule(name=live, lower=st.integers(0, 3))
    def revise(self, name: HoldKey, lower: int) -> None:
        hold = self.model.holds.get(name)
        if hold is None or hold.phase not in ("escrowed", "committed"):
            return
        endpoint = max(0, hold.endpoint - lower * B)
        kept, trimmed = hold.chain[: endpoint // B], hold.chain[endpoint // B :]
        shared = sum(self.model.refs[prefix] > 1 for prefix in trimmed)
        shortfall = max(0, shared - self.model.room(hold.ignore_floor))
        revised = self.cache.revise(name, endpoint)
        assert revised.shortfall == shortfall
        if shortfall:
            assert revised.endpoint == hold.endpoint
            return
        self.model.drop(trimmed)
        hold.chain, hold.endpoint, hold.phase = kept, endpoint, "committed"
        hold.escrow = hold.blocks - len(kept)
        assert (revised.endpoint, revised.demand) == (endpoint, hold.escrow)

    @rule(name=live)
    def materialise_a_slice(self, name: HoldKey) -> None:
        hold = self.model.holds.get(name)
        if hold is None or hold.phase not in ("committed", "materialising"):
            return
        free = min(hold.escrow, self.model.free)
        evicted = min(hold.escrow - free, SLICE)
        self.model.evict(evicted)
        hold.escrow -= free + evicted
        hold.private += free + evicted
        done = self.cache.materialise(name)
        assert done is (hold.escrow == 0)
        hold.phase = "owned" if done else "materialising"
        hold.computed = hold.endpoint
        if done:
            self._check_lease_canaries(name, hold)

    @rule(name=live, blocks=st.integers(1, 4))
    def compute_and_publish(self, name: HoldKey, blocks: int) -> None:
        hold, model = self.model.holds.get(name), self.model
        if hold is None or hold.phase != "owned":
            return
        hold.computed = min(len(hold.tokens), hold.computed + blocks * B)
        end = hold.computed // B
        table = self.cache.table(name)
        for depth in range(hold.endpoint // B, end):
            if self.cache._holds[name].private[depth]:
                self.canary[int(table[depth])] = tuple(hold.tokens[: (depth + 1) * B])
        wanted = prefixes(hold.tokens, end)[len(hold.chain) :]
        if hold.publishing:
            known = [prefix for prefix in wanted if prefix in model.stamp]
            if sum(not model.refs[prefix] for prefix in known) > model.room(hold.ignore_floor) and known:
                hold.publishing = False
            else:
                for prefix in wanted:
                    if prefix not in model.stamp:
                        model.stamp[prefix] = 0
                        hold.private -= 1
                    model.refs[prefix] += 1
                hold.chain += wanted
        self.cache.publish(name, hold.computed)

    @rule(name=live)
    def run_to_the_end(self, name: HoldKey) -> None:
        """Materialise and compute at once, so that long histories get somewhere."""
        hold = self.model.holds.get(name)
        if hold is None or hold.phase == "escrowed":
            return
        while hold.phase != "owned":
            self.materialise_a_slice(name)
        self.compute_and_publish(name, hold.blocks)

    @rule(name=consumes(live))
    def release(self, name: HoldKey) -> None:
        hold = self.model.holds.get(name)
        self.cache.release(name)
        if hold is None:
            return
        if hold.phase == "materialising":  # waits for the end of it
            while hold.escrow:
                self.materialise_slice_of_released(name, hold)
        self.model.release(self.model.holds.pop(name))
        assert self.cache.hold_state(name) is None

    def materialise_slice_of_released(self, name: HoldKey, hold: ModelHold) -> None:
        assert self.cache.hold_state(name) is not None
        free = min(hold.escrow, self.model.free)
        evicted = min(hold.escrow - free, SLICE)
        self.model.evict(evicted)
        hold.escrow -= free + evicted
        hold.private += free + evicted
        self.cache.materialise(name)

    @rule(name=live)
    def release_again(self, name: HoldKey) -> None:
        if name not in self.model.holds:
            self.cache.release(name)

    @rule(luck=st.integers(0, 7))
    @precondition(lambda self: self.counter > 3)
    def end_formation(self, luck: int) -> None:
        if luck:  # rarely: it ends every hold
            return
        self.cache.end_formation(self.formation)
        blocks, chains = 0, []
        for hold in self.model.holds.values():
            if hold.phase in ("materialising", "owned"):
                blocks += hold.private
                chains.append(hold.chain)
            else:
                self.model.drop(hold.chain)
        self.model.holds.clear()
        self.model.quarantined[self.formation] = (blocks, chains)
        assert self.cache.inventory() == ()
        self.formation += 1

    @rule()
    @precondition(lambda self: self.formation > 1)
    def stop_executors(self) -> None:
        for formation in list(self.model.quarantined):
            self.cache.executor_stopped(formation)
            _, chains = self.model.quarantined.pop(formation)
            for chain in chains:
                self.model.drop(chain)

    @rule()
    def read_digests(self) -> None:
        for digest in self.cache.digests_since(self.cursor.seq if self.cursor.in_sync else 0):
            verdict = self.cursor.offer(digest)
            added = [int(h) for h in unpack_hashes(digest.groups[0].added)]
            if verdict is Verdict.REPLACE:
                pages = self.cursor.gathered[CacheGroup.ATTENTION]
                self.reader = {int(h) for page in pages for h in page}
            else:
                assert verdict is Verdict.APPLY
                self.reader -= {int(h) for h in unpack_hashes(digest.groups[0].removed)}
                self.reader |= set(added)
        assert self.reader == {int(h) for h in self.cache._tree.resident_hashes()}

    def _check_lease_canaries(self, name: HoldKey, hold: ModelHold) -> None:
        """A reused block must hold exactly the prefix that its hash names."""
        table = self.cache.table(name)
        assert len(set(table.tolist())) == len(table) == hold.blocks
        for depth, prefix in enumerate(hold.chain):
            assert self.canary[int(table[depth])] == prefix

    @invariant()
    def cache_agrees_with_the_model(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.check()
        model, capacity = self.model, self.cache.capacity()
        assert (capacity.free_blocks, capacity.evictable_blocks) == (model.free, model.evictable)
        assert capacity.escrowed_blocks == sum(hold.escrow for hold in model.holds.values())
        states = {state.key: (state.phase, state.endpoint, state.owned_blocks) for state in self.cache.inventory()}
        expected = {name: (hold.phase, hold.endpoint, hold.private) for name, hold in model.holds.items()}
        assert states == expected
        resident = {int(hashes(list(prefix)).shorts[-1]) for prefix in model.stamp}
        assert resident == {int(h) for h in self.cache._tree.resident_hashes()}


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_cache, "EVICTION_SLICE", SLICE)


TestBlockCache = CacheMachine.TestCase
TestBlockCache.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
