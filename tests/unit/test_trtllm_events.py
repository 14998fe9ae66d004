"""A manager's events as our digest: names, tiers, gaps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from wavepp_proto.terms import CacheGroup, Capacity, Digest, DigestKind, Incarnation
from wavepp_stage.core.digest_feed import DigestFeed
from wavepp_stage.engine.trtllm.kv_events import Residents
from wavepp_stage.engine.trtllm.plain import CacheEvent

SHORTS = np.array([11, 12, 13], dtype=np.uint64)
KEYS = ["a", "b", "c"]
NO_ROOM = Capacity(0, 0, 0)


@pytest.fixture
def feed() -> DigestFeed:
    return DigestFeed(Incarnation(1))


@pytest.fixture
def residents(feed: DigestFeed) -> Residents:
    made = Residents(feed)
    made.name(KEYS, SHORTS)
    return made


def read(feed: DigestFeed, residents: Residents, seq: int = 0) -> Sequence[Digest]:
    shown = {CacheGroup.ATTENTION: residents.shorts()}
    feed.check(shown)
    return feed.since(seq, lambda: shown, NO_ROOM)


def test_stored_blocks_are_shown_by_our_hashes(feed: DigestFeed, residents: Residents) -> None:
    assert residents.apply([CacheEvent(5, stored=(("a", 0), ("b", 1)))])
    assert sorted(residents.shorts().tolist()) == [11, 12]
    assert (residents.on_device(SHORTS), residents.on_host(SHORTS)) == (1, 1)
    assert read(feed, residents)[-1].groups[0].count == 2


def test_partial_last_block_is_not_shown_as_nobody_named_it(residents: Residents) -> None:
    assert residents.apply([CacheEvent(1, stored=(("a", 0), ("partial", 0)))])
    assert residents.shorts().tolist() == [11]


def test_removed_subtree_is_one_delta(feed: DigestFeed, residents: Residents) -> None:
    residents.apply([CacheEvent(1, stored=(("a", 0), ("b", 0), ("c", 0)))])
    seq = read(feed, residents)[-1].seq
    residents.apply([CacheEvent(2, removed=("c", "b"))])
    (delta,) = read(feed, residents, seq)
    assert (delta.kind, delta.groups[0].count, len(delta.groups[0].removed)) == (DigestKind.DELTA, 1, 16)
    assert residents.evicted == 2


def test_digest_does_not_change_when_a_block_changes_its_tier(feed: DigestFeed, residents: Residents) -> None:
    residents.apply([CacheEvent(1, stored=(("a", 0),))])
    seq = read(feed, residents)[-1].seq
    residents.apply([CacheEvent(2, moved=("a", 1)), CacheEvent(3), CacheEvent(4, moved=("a", 0))])
    assert read(feed, residents, seq) == []
    assert (residents.offloaded, residents.onboarded, residents.on_device(SHORTS)) == (1, 1, 1)


def test_block_that_is_stored_twice_is_shown_once(residents: Residents) -> None:
    residents.apply([CacheEvent(1, stored=(("a", 0),)), CacheEvent(2, stored=(("a", 0),))])
    assert len(residents) == 1


def test_gap_is_noticed_when_the_buffer_overflowed(residents: Residents) -> None:
    assert residents.apply([CacheEvent(7), CacheEvent(8)])
    assert not residents.apply([CacheEvent(10, stored=(("a", 0),))])
    residents.lose()
    assert len(residents) == 0
    assert residents.apply([CacheEvent(11, stored=(("b", 0),))])


def test_name_is_forgotten_when_no_prompt_and_no_block_needs_it(residents: Residents) -> None:
    residents.name(KEYS[:1], SHORTS[:1])
    residents.forget(KEYS)
    residents.apply([CacheEvent(1, stored=(("a", 0), ("b", 0)))])
    assert residents.shorts().tolist() == [11]
    residents.forget(KEYS[:1])
    residents.apply([CacheEvent(2, removed=("a",)), CacheEvent(3, stored=(("a", 0),))])
    assert residents.shorts().tolist() == []
