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

    held: set[int] = field(default_factory=set)
    known: set[int] | None = None
    seq: int = 0
    life: int = 1

    def grow(self, tree: int, depth: int) -> Digest:
        """Publish or evict so that the tree is held down to `depth`, as one delta."""
        wanted = {int(h) for h in chain(tree)[:depth]}
        evicted = {int(h) for h in chain(tree)[max(depth, 3) :]}
        added, removed = wanted - self.held, self.held & evicted
        self.held = (self.held | added) - removed
        self.seq += 1
        return self._digest(DigestKind.DELTA, added, removed)

    def snapshot(self) -> Digest:
        self.seq += 1
        return self._digest(DigestKind.SNAPSHOT, self.held, set())

    def _digest(self, kind: DigestKind, added: set[int], removed: set[int]) -> Digest:
        held = np.array(sorted(self.held), dtype=np.uint64)
        made = GroupDigest(
            CacheGroup.ATTENTION, pack_hashes(sorted(added)), pack_hashes(sorted(removed)), len(held), checksum(held)
        )
        return Digest(Incarnation(self.life), self.seq, kind, (made,), Capacity(1, 0, 0))


def walk(known: list[set[int] | None], hashes: Hashes) -> int:
    """The linear walk: how deep every daemon is known to go."""
    depth = 0
    for found in hashes.tolist():
        if any(contents is None or found not in contents for contents in known):
            return depth
        depth += 1
    return depth


steps = st.lists(
    st.one_of(
        st.tuples(st.just("grow"), st.integers(0, 2), st.integers(0, TREES - 1), st.integers(0, DEPTH)),
        st.tuples(st.sampled_from(["lose", "repeat"]), st.integers(0, 2), st.integers(0, 2), st.integers(0, DEPTH)),
        st.tuples(st.sampled_from(["snapshot", "restart", "sweep"]), st.integers(0, 2), st.just(0), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=150)
@given(steps)
def test_hint_equals_the_linear_walk_when_digests_are_lost_repeated_or_replaced(
    script: list[tuple[str, int, int, int]],
) -> None:
    index, stages = ReuseIndex(), [Stage() for _ in KEYS]
    for key in KEYS:
        index.attach(key, Incarnation(1), TREES * DEPTH)
    for step, who, tree, depth in script:
        stage, key = stages[who], KEYS[who]
        match step:
            case "grow" | "repeat":
                digest = stage.grow(tree, depth)
                verdict = index.apply(key, digest)
                assert (verdict is Verdict.APPLY) == (stage.known is not None)
                stage.known = None if stage.known is None else set(stage.held)
                if step == "repeat" and stage.known is not None:
                    assert index.apply(key, digest) is Verdict.IGNORE
            case "lose":
                stage.grow(tree, depth)  # the next one leaves a gap
                assert index.apply(key, stage.grow(tree, depth)) is Verdict.RESYNC
                stage.known = None
            case "snapshot":
                assert index.apply(key, stage.snapshot()) is Verdict.REPLACE
                stage.known = set(stage.held)
            case "restart":
                stage.life += 1
                index.attach(key, Incarnation(stage.life), TREES * DEPTH)
                stage.held, stage.known, stage.seq = set(), None, 0
            case "sweep":
                index.sweep(100)
        assert index.check() == []
        for seen in range(TREES):
            assert index.hint_blocks(chain(seen)) == walk([s.known for s in stages], chain(seen))
            assert index.own_blocks(key, chain(seen)) == walk([stage.known], chain(seen))
    while index.sweep(64):
        pass
    union = set().union(*(stage.known or set() for stage in stages))
    assert index.distinct_blocks() == len(union)
