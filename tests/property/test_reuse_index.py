"""The index against a set per daemon: any digests, in any order, lost or repeated, from any daemon."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from wavepp_controller.core.index import ReuseIndex
from wavepp_proto.digest import Hashes, Verdict, checksum, pack_hashes
from wavepp_proto.terms import (
    CacheGroup,
    Capacity,
    DaemonKey,
    Digest,
    DigestKind,
    GroupDigest,
    Incarnation,
    PipelineId,
    StageIndex,
)

KEYS = [DaemonKey(PipelineId("p"), StageIndex(stage)) for stage in range(3)]
DENSE, SPARSE = CacheGroup.ATTENTION, CacheGroup.RECURRENT
GROUPS = st.sampled_from([((DENSE,),) * 3, ((DENSE,), (DENSE, SPARSE), (SPARSE,)), ((SPARSE,),) * 3])
"""What the three stages have: attention everywhere, a mixture, recurrent layers only."""
TREES = 3
DEPTH = 12


def chain(tree: int) -> Hashes:
    """Hashes of one prompt; trees share their first blocks pairwise, as prompts with a common prefix do."""
    own = np.arange(DEPTH, dtype=np.uint64) + np.uint64(1000 * (tree + 1))
    own[:3] = np.arange(3, dtype=np.uint64) + np.uint64(7)
    return own * np.uint64(0x9E3779B97F4A7C15)


@dataclass
class Stage:
    """A daemon that truly holds `held`, and what the index last agreed with it on (None: nothing)."""

    groups: tuple[CacheGroup, ...] = (DENSE,)
    held: set[int] = field(default_factory=set)
    states: set[int] = field(default_factory=set)
    known: tuple[set[int], set[int]] | None = None
    """Blocks and snapshots."""
    seq: int = 0
    life: int = 1

    def grow(self, tree: int, depth: int) -> Digest:
        """Publish or evict so that the tree is held down to `depth`, as one delta."""
        wanted = {int(h) for h in chain(tree)[:depth]}
        evicted = {int(h) for h in chain(tree)[max(depth, 3) :]}
        added, removed = wanted - self.held, self.held & evicted
        self.held = (self.held | added) - removed
        self.seq += 1
        return self._digest(DigestKind.DELTA, {DENSE: (added, removed)})

    def flip(self, tree: int, depth: int) -> Digest:
        """Take the snapshot at that depth, or drop it."""
        place = {int(chain(tree)[depth - 1])}
        added, removed = place - self.states, place & self.states
        self.states ^= place
        self.seq += 1
        return self._digest(DigestKind.DELTA, {SPARSE: (added, removed)})

    def snapshot(self) -> Digest:
        self.seq += 1
        return self._digest(DigestKind.SNAPSHOT, {DENSE: (self.held, set()), SPARSE: (self.states, set())})

    def agree(self) -> None:
        self.known = (set(self.held), set(self.states))

    def _digest(self, kind: DigestKind, changes: dict[CacheGroup, tuple[set[int], set[int]]]) -> Digest:
        made = []
        for group in self.groups:
            whole = np.array(sorted(self.held if group is DENSE else self.states), dtype=np.uint64)
            added, removed = (pack_hashes(sorted(part)) for part in changes.get(group, (set(), set())))
            made.append(GroupDigest(group, added, removed, len(whole), checksum(whole)))
        return Digest(Incarnation(self.life), self.seq, kind, tuple(made), Capacity(1, 0, 0))


def walk(stages: list[Stage], hashes: Hashes) -> int:
    """The linear walk: how deep every daemon that attends is known to go, then back to a common snapshot."""
    if any(stage.known is None for stage in stages):
        return 0
    dense = [stage.known[0] for stage in stages if stage.known and DENSE in stage.groups]
    sparse = [stage.known[1] for stage in stages if stage.known and SPARSE in stage.groups]
    found = hashes.tolist()
    depth = 0
    while depth < len(found) and all(found[depth] in held for held in dense):
        depth += 1
    while depth and not all(found[depth - 1] in states for states in sparse):
        depth -= 1
    return depth


steps = st.lists(
    st.one_of(
        st.tuples(st.just("grow"), st.integers(0, 2), st.integers(0, TREES - 1), st.integers(0, DEPTH)),
        st.tuples(st.just("flip"), st.integers(0, 2), st.integers(0, TREES - 1), st.integers(1, DEPTH)),
        st.tuples(st.sampled_from(["lose", "repeat"]), st.integers(0, 2), st.integers(0, 2), st.integers(0, DEPTH)),
        st.tuples(st.sampled_from(["snapshot", "restart", "sweep"]), st.integers(0, 2), st.just(0), st.just(0)),
    ),
    max_size=50,
)


@settings(max_examples=150)
@given(steps, GROUPS)
def test_hint_equals_the_linear_walk_when_digests_are_lost_repeated_or_replaced(
    script: list[tuple[str, int, int, int]], groups: tuple[tuple[CacheGroup, ...], ...]
) -> None:
    index, stages = ReuseIndex(), [Stage(of_stage) for of_stage in groups]
    bound = 2 * TREES * DEPTH
    for key, stage in zip(KEYS, stages, strict=True):
        index.attach(key, Incarnation(1), bound, stage.groups)
    for step, who, tree, depth in script:
        stage, key = stages[who], KEYS[who]
        match step:
            case "grow" | "flip" | "repeat":
                digest = stage.flip(tree, depth) if step == "flip" else stage.grow(tree, depth)
                verdict = index.apply(key, digest)
                assert (verdict is Verdict.APPLY) == (stage.known is not None)
                if stage.known is not None:
                    stage.agree()
                if step == "repeat" and stage.known is not None:
                    assert index.apply(key, digest) is Verdict.IGNORE
            case "lose":
                stage.grow(tree, depth)  # the next one leaves a gap
                assert index.apply(key, stage.grow(tree, depth)) is Verdict.RESYNC
                stage.known = None
            case "snapshot":
                assert index.apply(key, stage.snapshot()) is Verdict.REPLACE
                stage.agree()
            case "restart":
                stages[who] = Stage(stage.groups, life=stage.life + 1)
                index.attach(key, Incarnation(stage.life + 1), bound, stage.groups)
            case "sweep":
                index.sweep(100)
        assert index.check() == []
        for seen in range(TREES):
            hint = walk(stages, chain(seen))
            assert index.hint_blocks(chain(seen)) == hint
            assert not hint or index.reusable_to(chain(seen), hint)
            if DENSE in stage.groups:
                alone = Stage((DENSE,), known=stages[who].known)
                assert index.own_blocks(key, chain(seen)) == walk([alone], chain(seen))
    while index.sweep(64):
        pass
    dense = {found for stage in stages if stage.known and DENSE in stage.groups for found in stage.known[0]}
    sparse = {found for stage in stages if stage.known and SPARSE in stage.groups for found in stage.known[1]}
    assert index.distinct_blocks() == len(dense) + len(sparse)
