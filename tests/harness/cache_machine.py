"""Every step that a stage's cache may be asked for, as rules that drive the cache and its model alike.

The model (cache_model.py) predicts every answer, which prefixes are evicted, moved or lost, and which
copies are made. Beside it runs a memory: what every block, host block and slot really contains. Every
step checks the cache's own invariants, residency on both tiers, and what a digest reader makes of it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from tests.harness.cache_agreement import agree
from tests.harness.cache_memory import CacheMemory, Row
from tests.harness.cache_model import CacheModel
from tests.harness.cache_model_parts import ModelHold
from tests.harness.digest_reader import DigestReader
from tests.harness.stage_core import B, hashes, key
from wavepp_proto.errors import RowVoided
from wavepp_proto.hashing import reuse_cap
from wavepp_proto.terms import CacheGroup, HoldKey, Incarnation
from wavepp_stage.core.block_cache import BlockCache
from wavepp_stage.core.cache_manager import Shortfall
from wavepp_stage.core.cache_shape import CacheShape
from wavepp_stage.core.digest_feed import DigestFeed
from wavepp_stage.core.work import CopyDirection, CopyLot

ATTENTION, RECURRENT = CacheGroup.ATTENTION, CacheGroup.RECURRENT
INCARNATION = Incarnation(3)
SLICE = LOT = 2
LOTS = 2

prompts = st.builds(
    lambda changes, blocks, tail: [int(at in changes) for at in range(blocks) for _ in range(B)] + [9] * tail,
    st.sets(st.integers(0, 6), max_size=2),  # few changes: most prompts share a long prefix
    st.integers(0, 7),
    st.integers(1, B),
)
groups = st.sampled_from([(ATTENTION,), (ATTENTION, RECURRENT), (RECURRENT,)])


picks = st.integers(0, 100)


def some(*phases: str) -> Callable[[CacheMachine], bool]:
    """Precondition: a hold is in one of `phases`."""
    return lambda self: any(hold.phase in phases for hold in self.model.holds.values())


class CacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.counter = 0
        self.formation = 1
        self.parents: dict[int, int] = {}
        self.reader = DigestReader(INCARNATION, self.parents)
        self.memory = CacheMemory()
        self.copying: list[CopyLot] = []
        """Started lots that have not run, in order."""
        self.copied: list[tuple[int, bool]] = []
        """Lots that ran and are not reported: number, ok."""
        self.rows: dict[HoldKey, list[Row]] = {}
        self.position: dict[HoldKey, int] = {}

    @initialize(
        pool=st.integers(8, 12),
        floor=st.integers(0, 2),
        host=st.sampled_from([0, 2, 5, 9]),
        slots=st.integers(2, 7),
        groups=groups,
        warm=st.lists(prompts, max_size=6),
    )
    def start(
        self, pool: int, floor: int, host: int, slots: int, groups: tuple[CacheGroup, ...], warm: list[list[int]]
    ) -> None:
        """An empty cache, or one that is full of prompts already."""
        shape = CacheShape(pool, B, floor, host, slots, groups)
        self.cache = BlockCache(shape, DigestFeed(INCARNATION))
        self.model = CacheModel(shape, SLICE, LOT, LOTS)
        for tokens in warm:
            self.serve(tokens)

    # --- admission --------------------------------------------------------------------------------

    @rule(
        tokens=prompts,
        lower=st.integers(0, 2),
        snapshots=st.sampled_from([0, 1, 1, 3]),
        ignore_floor=st.booleans(),
    )
    def prepare(self, tokens: list[int], lower: int, snapshots: int, ignore_floor: bool) -> None:
        self._prepare(tokens, lower, snapshots, ignore_floor)

    def _prepare(self, tokens: list[int], lower: int, snapshots: int, ignore_floor: bool) -> HoldKey | None:
        """Lease, escrow and commit at the own hit, a little above or below it."""
        self.counter += 1
        name, model = key(f"r{self.counter}"), self.model
        shorts = hashes(tokens).shorts.tolist()
        self.parents.update(zip(shorts[1:], shorts, strict=False))
        hold, hits = ModelHold(tokens, ignore_floor, snapshots), model.hits(tokens)
        own_hit = min(hits.values())
        candidate = min(max(0, own_hit - (lower - 1) * B), reuse_cap(len(tokens), B))
        missing = model.lease(hold, candidate)
        lease = self.cache.lease(name, len(tokens), hashes(tokens), candidate, snapshots, ignore_floor)
        assert {hit.group: hit.endpoint for hit in lease.group_hits} == hits
        assert (lease.own_hit, lease.shortfall) == (own_hit, Shortfall(*missing))
        if any(missing):
            assert self.cache.hold_state(name) is None
            return None
        assert lease.endpoint == hold.leased * B
        model.holds[name] = hold
        escrow = self.cache.escrow(name)
        hold.escrow, hold.escrow_states = hold.demand, model.demand_states(snapshots)
        hold.phase = "escrowed"
        assert (escrow.demand, escrow.demand_states) == (hold.escrow, hold.escrow_states)
        assert (escrow.endpoint, bool(escrow.shortfall)) == (lease.endpoint, False)
        assert escrow.backed_free + escrow.backed_offload + escrow.backed_evict == escrow.demand
        if lease.endpoint == candidate:
            assert not self.cache.commit(name).shortfall
            hold.phase = "committed"
        return name

    @rule(pick=picks, lower=st.integers(0, 3), snapshots=st.integers(0, 2))
    @precondition(some("escrowed", "committed"))
    def revise(self, pick: int, lower: int, snapshots: int) -> None:
        name, hold = self._pick(pick, "escrowed", "committed")
        endpoint, before = max(0, hold.leased - lower) * B, hold.leased * B
        missing = self.model.revise(hold, endpoint, snapshots)
        revised = self.cache.revise(name, endpoint, snapshots)
        assert revised.shortfall == Shortfall(*missing)
        assert revised.endpoint == (before if any(missing) else hold.leased * B)
        if not any(missing):
            assert (revised.demand, revised.demand_states) == (hold.escrow, hold.escrow_states)

    # --- execution --------------------------------------------------------------------------------

    @rule(pick=picks)
    @precondition(some("committed", "materialising"))
    def materialise_a_slice(self, pick: int) -> None:
        self._materialise(*self._pick(pick, "committed", "materialising"))

    def _materialise(self, name: HoldKey, hold: ModelHold) -> None:
        expected = self.model.materialise(hold)
        if expected == "void":
            with pytest.raises(RowVoided):
                self.cache.materialise(name)
            return
        assert self.cache.materialise(name).value == expected
        if expected != "done":
            return
        if hold.release_waits:
            self.model.retire(name)
            return
        self.position[name], self.rows[name] = hold.leased * B, []
        table = self.cache.table(name)
        assert len(set(table.tolist())) == len(table) == hold.blocks
        self.memory.check_prefix(table.tolist(), hold.tokens, hold.leased)

    @rule(pick=picks, blocks=st.integers(1, 4), marks=st.sets(st.integers(1, 4), max_size=2))
    @precondition(some("owned"))
    def prepare_a_row(self, pick: int, blocks: int, marks: set[int]) -> None:
        self._prepare_row(*self._pick(pick, "owned"), blocks, marks)

    def _prepare_row(self, name: HoldKey, hold: ModelHold, blocks: int, marks: set[int]) -> None:
        start = self.position[name]
        end = min(len(hold.tokens), (start // B + blocks) * B)
        if end == start:
            return
        positions = tuple(start + mark * B for mark in sorted(marks) if start + mark * B <= end)
        state = self.cache.plan_state(name, start, positions)
        assert (state is not None) is self.model.shape.recurrent
        for position in positions[: hold.escrow_states]:
            hold.planned.append(position)
            hold.escrow_states -= 1
            self.model.make_slot()
        if state is not None:
            assert [position for position, _ in state.snapshots] == [at for at in positions if at in hold.planned]
            assert (state.restore is not None) is (start == hold.leased * B > 0)
        self.position[name] = end
        self.rows[name].append(Row(start, end, state))

    @rule(pick=picks, luck=st.integers(0, 5))
    @precondition(some("owned"))
    def retire_a_row(self, pick: int, luck: int) -> None:
        name, hold = self._pick(pick, "owned")
        if self.rows[name]:
            self._retire_row(name, hold, void=not luck)

    def _retire_row(self, name: HoldKey, hold: ModelHold, void: bool = False) -> None:
        row = self.rows[name].pop(0)
        if hold.void or void:
            hold.void = True
            self.cache.discard(name)
            return
        self.memory.compute(self.cache.table(name).tolist(), hold.tokens, row)
        self.model.publish(hold, row.end)
        self.cache.publish(name, row.end)

    @rule(pick=picks)
    @precondition(some("committed", "materialising", "owned"))
    def run_to_the_end(self, pick: int) -> None:
        """Materialise, copy and compute at once, so that long histories get somewhere."""
        self._run(*self._pick(pick, "committed", "materialising", "owned"))

    def _run(self, name: HoldKey, hold: ModelHold) -> None:
        while hold.phase != "owned" and not hold.lost:
            self._materialise(name, hold)
            self._finish_copies()
        if hold.phase == "owned" and name in self.model.holds:
            self._prepare_row(name, hold, hold.blocks, {1, hold.blocks - 1} - {0})
            while self.rows[name]:
                self._retire_row(name, hold)

    @rule(tokens=prompts)
    def serve(self, tokens: list[int]) -> None:
        """A whole request."""
        name = self._prepare(tokens, 1, 2, False)
        if name is not None:
            hold = self.model.holds[name]
            if hold.phase == "committed":
                self._run(name, hold)
            self._release(name, hold)

    # --- copies -----------------------------------------------------------------------------------

    @rule()
    def start_copies(self) -> None:
        lots, expected = self.cache.take_lots(), self.model.take_lots()
        assert [lot.number for lot in lots] == [lot.number for lot in expected]
        for lot, model in zip(lots, expected, strict=True):
            assert (lot.direction is CopyDirection.ONBOARD, len(lot)) == (model.onboard, len(model.nodes))
        self.copying += lots

    @rule(luck=st.integers(0, 6))
    @precondition(lambda self: self.copying)
    def run_a_copy(self, luck: int) -> None:
        """The copy thread runs lots in order."""
        lot = self.copying.pop(0)
        self.memory.copy(lot, ok=luck > 0)
        self.copied.append((lot.number, luck > 0))

    @rule(pick=picks)
    @precondition(lambda self: self.copied)
    def report_a_copy(self, pick: int) -> None:
        self._report(pick % len(self.copied))

    def _report(self, at: int) -> None:
        number, ok = self.copied.pop(at)
        self.model.report(number, ok)
        self.cache.copied(number, ok)

    @rule()
    def fail_a_copy(self) -> None:
        """The oldest copy that is under way fails, and those before it have ended."""
        self.start_copies()
        if self.copying:
            self.run_a_copy(0)
            while self.copied:
                self._report(0)

    def _finish_copies(self) -> None:
        self.start_copies()
        while self.copying:
            self.run_a_copy(1)
        while self.copied:
            self._report(-1)

    # --- giving back ------------------------------------------------------------------------------

    @rule(pick=picks)
    @precondition(some("escrowed", "committed", "materialising", "owned"))
    def release(self, pick: int) -> None:
        """As the machine does: after the last wave that contains the request."""
        name, hold = self._pick(pick, "escrowed", "committed", "materialising", "owned")
        self._release(name, hold)

    def _release(self, name: HoldKey, hold: ModelHold) -> None:
        while hold.phase == "owned" and self.rows[name]:
            self._retire_row(name, hold)
        self.cache.release(name)
        if hold.phase != "materialising" or (hold.lost and hold.after <= self.model.ended):
            self.model.retire(name)
        else:  # goes on, and is gone at its end
            hold.release_waits = True
        self.cache.release(key("nobody"))

    @rule(luck=st.integers(0, 7))
    @precondition(lambda self: self.counter > 3)
    def end_formation(self, luck: int) -> None:
        if not luck:  # rarely: it ends every hold
            self._end_formation()

    def _end_formation(self) -> None:
        self.cache.end_formation(self.formation)
        self.model.end_formation(self.formation)
        self.rows.clear()
        assert self.cache.inventory() == ()
        self.formation += 1

    @rule(drained=st.booleans())
    @precondition(lambda self: self.model.dying)
    def stop_executors(self, drained: bool) -> None:
        """The copy thread has run what it was given, or was stopped before it."""
        if drained:
            self._finish_copies()
        for formation in list(self.model.dying):
            stopped = {lot.number for lot in self.model.lots if lot.formation is not None}
            self.copying = [lot for lot in self.copying if lot.number not in stopped]
            self.cache.executor_stopped(formation)
            self.model.executor_stopped(formation)

    # --- looking ----------------------------------------------------------------------------------

    @rule()
    def read_digests(self) -> None:
        """Every delta on the way is checked for holes, the end for the truth."""
        self.reader.read(self.cache)
        truth = {group: hashes for group, hashes in self.cache._store.residents().items() if group in self.reader.known}
        assert self.reader.known == {group: set(hashes.tolist()) for group, hashes in truth.items()}

    def _pick(self, pick: int, *phases: str) -> tuple[HoldKey, ModelHold]:
        eligible = [(name, hold) for name, hold in self.model.holds.items() if hold.phase in phases]
        return eligible[pick % len(eligible)]

    @invariant()
    def cache_agrees_with_the_model(self) -> None:
        if not hasattr(self, "cache"):
            return
        agree(self.cache, self.model)
