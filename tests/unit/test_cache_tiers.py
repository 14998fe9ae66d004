"""The host tier: what moves where, what waits for which copy, and what a failed copy costs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.cache_pool import ATTENTION, Pool
from tests.harness.digest_reader import DigestReader
from tests.harness.stage_core import B, hashes, key
from wavepp_proto.errors import RowVoided
from wavepp_proto.terms import Incarnation
from wavepp_stage.core import block_cache
from wavepp_stage.core.cache_manager import ENOUGH, Escrow, Materialised, Shortfall

COPYING, DONE = Materialised.COPYING, Materialised.DONE


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool(pool=6, host=4)
    yield made
    made.cache.check()


def prompt(symbol: int, blocks: int) -> list[int]:
    """A prompt of `blocks` full blocks and one token."""
    return [symbol] * (blocks * B) + [99]


def off_loaded(pool: Pool, symbol: int = 1, blocks: int = 3) -> list[int]:
    """A prompt whose blocks are all on the host."""
    tokens = prompt(symbol, blocks)
    pool.cached("first", tokens)
    pool.cached("pusher", prompt(77, pool.cache.pool_blocks - 1))
    assert pool.hit(tokens) == {ATTENTION: blocks * B}
    return tokens


def test_victim_moves_to_the_host_when_its_block_is_needed(pool: Pool) -> None:
    """Free blocks first, then the least recently used leaf; nothing is gone, so the digest says nothing."""
    pool.cached("a", prompt(1, 3))
    pool.cached("b", prompt(2, 1))
    seq = pool.cache.digests_since(0)[-1].seq
    pool.commit("c", prompt(3, 3))
    assert pool.counts == (2, 4, 4)
    assert pool.materialise("c") is COPYING
    assert pool.copy() == [("offload", [2, 1], [0, 1])]
    assert pool.materialise("c") is DONE
    assert pool.table("c") == [4, 5, 2, 1]
    assert pool.hit(prompt(1, 3)) == {ATTENTION: 3 * B}
    assert (pool.counts, pool.host_free) == ((0, 2, 0), 2)
    assert all(not group.removed for digest in pool.cache.digests_since(seq) for group in digest.groups)


def test_taker_waits_when_its_block_is_still_copied_out(pool: Pool) -> None:
    pool.cached("a", prompt(1, 5))
    pool.commit("b", prompt(2, 2))
    assert pool.materialise("b") is COPYING
    (lot,) = pool.cache.take_lots()
    assert pool.materialise("b") is COPYING
    assert pool.cache.take_lots() == []
    pool.cache.copied(lot.number, True)
    assert pool.materialise("b") is DONE


def test_prefix_comes_back_when_it_is_on_the_host(pool: Pool) -> None:
    """Its room is part of the escrow, its host blocks stay until the copy is complete."""
    tokens = off_loaded(pool)
    assert pool.host_free == 1
    assert pool.commit("again", tokens, 3 * B) == Escrow(3 * B, 4, 0, ENOUGH, 1, 1, 2)
    assert pool.materialise("again") is COPYING
    assert pool.hit(tokens) == {ATTENTION: 3 * B}
    assert pool.cache.census().host_held == 3
    moves = pool.copy()
    assert [direction for direction, _, _ in moves] == ["offload", "onboard"]
    assert moves[1][2] == [2, 1, 0]  # from the root down
    assert pool.materialise("again") is DONE
    assert pool.table("again")[:3] == moves[1][1]
    census = pool.cache.census()
    assert (census.onboarded, census.host_held) == (3, 0)


def test_oldest_host_block_is_dropped_when_the_host_is_full() -> None:
    """Leaf first, least recently used first over both tiers: the newer block moves in where the older one was."""
    pool = Pool(pool=4, host=2)
    pool.cached("a", prompt(1, 2))
    pool.cached("b", prompt(2, 3))  # a moves out
    assert pool.host_free == 0
    assert pool.hit(prompt(1, 2)) == {ATTENTION: 2 * B}
    pool.cached("c", prompt(3, 1))  # takes one free block and one of b, whose tail replaces the tail of a
    assert pool.hit(prompt(1, 2)) == {ATTENTION: B}
    assert pool.hit(prompt(2, 3)) == {ATTENTION: 3 * B}
    assert pool.cache.census().evicted == 1


def test_victim_is_dropped_when_everything_on_the_host_is_held() -> None:
    pool = Pool(pool=6, host=2)
    tokens = prompt(1, 2)
    pool.cached("a", tokens)
    pool.cached("b", prompt(2, 5))  # a moves out
    assert pool.lease("reader", tokens, 2 * B).shortfall == ENOUGH
    pool.commit("c", prompt(3, 2))
    assert pool.materialise("c") is DONE  # no room, no copy, no waiting
    assert pool.copy() == []
    assert pool.hit(prompt(2, 5)) == {ATTENTION: 3 * B}
    assert pool.hit(tokens) == {ATTENTION: 2 * B}
    pool.cache.check()


def test_held_block_never_leaves_the_device(pool: Pool) -> None:
    """A lease holds its chain and what is above it; what is below may go."""
    tokens = prompt(1, 5)
    pool.cached("a", tokens)
    pool.commit("reader", [*tokens[: 2 * B], 5], 2 * B)
    assert pool.counts == (1, 3, 1)
    pool.run("b", prompt(2, 1))
    assert pool.lease("c", prompt(3, 2)).shortfall == Shortfall(2)
    assert pool.materialise("reader") is COPYING
    pool.copy()
    assert pool.materialise("reader") is DONE
    assert pool.table("reader")[:2] == [0, 1]


def test_chain_is_brought_back_once_when_two_holds_need_it() -> None:
    """The second waits for the copies of the first and gives back the blocks that it was promised for them."""
    pool = Pool(pool=10, host=6)
    tokens = off_loaded(pool, blocks=3)
    for name in ("a", "b"):
        pool.commit(name, [*tokens[:-1], ord(name)], 3 * B)
    assert pool.materialise("a") is COPYING
    state = pool.cache.hold_state(key("b"))
    assert state is not None
    assert state.escrow_blocks == 4
    assert pool.materialise("b") is COPYING
    state = pool.cache.hold_state(key("b"))
    assert state is not None
    assert (state.escrow_blocks, state.owned_blocks) == (0, 1)
    assert [len(device) for direction, device, _ in pool.copy() if direction == "onboard"] == [3]
    assert (pool.materialise("b"), pool.materialise("a")) == (DONE, DONE)
    assert pool.table("a")[:3] == pool.table("b")[:3]
    assert pool.cache.census().onboarded == 3


def test_published_block_is_handed_over_when_only_the_host_has_it() -> None:
    """A sequence that computed a prefix again puts it back on the device for everybody."""
    pool = Pool(pool=8, host=4)
    tokens = prompt(1, 2)
    pool.cached("a", tokens)
    pool.commit("b", tokens)
    assert pool.materialise("b") is DONE
    pool.cached("c", prompt(2, 4))  # moves a out
    assert pool.host_free == 2
    pool.publish("b", len(tokens))
    assert pool.host_free == 4
    pool.release("b")
    assert pool.commit("d", tokens, 2 * B).demand == 1
    assert pool.materialise("d") is DONE
    assert pool.cache.census().onboarded == 0


def test_commit_promises_less_when_another_brought_the_prefix_back() -> None:
    pool = Pool(pool=12, host=6)
    tokens = off_loaded(pool, blocks=2)
    assert pool.lease("b", [*tokens[:-1], 5], 2 * B).endpoint == 2 * B
    assert pool.cache.escrow(key("b")).demand == 3
    pool.run("a", tokens, 2 * B)
    assert pool.cache.commit(key("b")).demand == 1
    assert pool.counts[2] == 1


def test_lost_prefix_is_gone_in_one_delta_when_its_copy_out_failed(pool: Pool) -> None:
    """What should have moved is dropped with all below it, and nobody finds it any more."""
    tokens = prompt(1, 3)
    shorts = hashes(tokens).shorts.tolist()
    reader = DigestReader(Incarnation(1), dict(zip(shorts[1:], shorts, strict=False)))
    pool.cached("a", tokens)
    pool.cached("b", prompt(2, 2))
    pool.commit("c", prompt(3, 3))
    assert pool.materialise("c") is COPYING
    reader.read(pool.cache)
    assert pool.copy(ok=False) == [("offload", [2, 1, 0], [0, 1, 2])]
    removed = [len(group.removed) // 8 for digest in reader.read(pool.cache) for group in digest.groups]
    assert removed == [3]
    assert pool.hit(tokens) == {ATTENTION: 0}
    assert pool.host_free == 4
    assert pool.materialise("c") is DONE  # the taker needs the block, not what was in it


def test_hold_is_void_when_the_copy_of_its_prefix_failed(pool: Pool) -> None:
    tokens = off_loaded(pool)
    pool.commit("again", tokens, 3 * B)
    assert pool.materialise("again") is COPYING
    pool.copy(ok=False)
    with pytest.raises(RowVoided):
        pool.cache.materialise(key("again"))
    assert pool.hit(tokens) == {ATTENTION: 0}
    state = pool.cache.hold_state(key("again"))
    assert state is not None
    assert state.phase == "materialising"
    pool.release("again")
    assert pool.cache.inventory() == ()
    free, evictable, escrowed = pool.counts
    assert (free + evictable, escrowed) == (6, 0)
    assert pool.host_free == 4 - pool.cache.host_cached_blocks


def test_lost_hold_gives_nothing_back_when_a_copy_still_moves_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Field bug 42: a block given to another while an old copy lands in it is a wrong answer without an error."""
    monkeypatch.setattr(block_cache, "OFFLOAD_SLICE", 1)
    pool = Pool(pool=6, host=4)
    tokens = off_loaded(pool)
    pool.commit("again", tokens, 3 * B)
    while pool.materialise("again") is Materialised.MORE:
        pass
    first, out, *later = pool.cache.take_lots()
    assert [lot.direction.value for lot in (first, out, *later)] == ["offload", "onboard", "offload", "onboard"]
    pool.cache.copied(out.number, False)  # it counts once the one before it has ended
    assert pool.materialise("again") is COPYING
    pool.cache.copied(first.number, True)
    pool.release("again")
    assert pool.cache.hold_state(key("again")) is not None
    for lot in later:
        assert pool.cache.hold_state(key("again")) is not None
        pool.cache.copied(lot.number, True)
        pool.cache.check()
    pool.copy()
    assert pool.cache.hold_state(key("again")) is None
    free, evictable, escrowed = pool.counts
    assert (free + evictable, escrowed) == (6, 0)


def test_published_block_is_handed_over_when_another_is_bringing_it_back() -> None:
    """The copy that is under way fails; nobody needs it any more."""
    pool = Pool(pool=12, host=4)
    tokens = prompt(1, 2)
    pool.cached("a", tokens)
    pool.commit("b", tokens)
    assert pool.materialise("b") is DONE
    pool.run("c", prompt(2, 8))  # moves a out
    pool.release("c")
    pool.commit("d", [*tokens[:-1], 5], 2 * B)
    assert pool.materialise("d") is COPYING
    pool.publish("b", len(tokens))
    pool.copy(ok=False)
    assert pool.materialise("d") is DONE
    assert pool.table("d")[:2] == pool.table("b")[:2]
    assert pool.hit(tokens) == {ATTENTION: 2 * B}


def test_late_failure_harms_nobody_when_node_and_host_block_have_new_owners() -> None:
    """The one host block goes from a to b to z, and z has the node id that a had: only z's own copy counts for z."""
    pool = Pool(pool=4, host=1)
    pool.cached("a", [1] * B)
    pool.cached("b", [2] * B)
    pool.commit("z", [3] * B)
    assert pool.materialise("z") is DONE
    for name, blocks in (("x", 2), ("y", 1)):  # a moves out, then b does and a is gone
        pool.commit(name, [ord(name)] * (blocks * B))
        assert pool.materialise(name) is COPYING
    pool.publish("z", B)
    pool.release("z")
    pool.commit("w", [9] * B)
    assert pool.materialise("w") is COPYING
    lots = pool.cache.take_lots()
    assert [lot.host.tolist() for lot in lots] == [[0], [0], [0]]
    for lot in lots:
        pool.cache.copied(lot.number, lot.number > 1)
        pool.cache.check()
    assert [pool.hit([symbol] * B + [99])[ATTENTION] for symbol in (1, 2, 3)] == [0, 0, B]


def test_committed_hold_falls_below_what_was_lost_when_revised() -> None:
    """It leased a prefix whose lower half was still being copied out; that copy fails."""
    pool = Pool(pool=8, host=4)
    tokens = prompt(1, 2)
    pool.cached("a", tokens)
    pool.cached("b", prompt(2, 3))
    pool.commit("c", [8] * (4 * B))
    assert pool.materialise("c") is COPYING  # moves the last block of a
    assert pool.commit("d", tokens, 2 * B).demand == 2
    assert pool.copy(ok=False) == [("offload", [1], [0])]
    revised = pool.cache.revise(key("d"), 2 * B)
    assert (revised.endpoint, revised.demand) == (B, 2)
    state = pool.cache.hold_state(key("d"))
    assert state is not None
    assert (state.phase, state.endpoint) == ("escrowed", B)
    assert pool.cache.revise(key("d"), B).shortfall == ENOUGH
    assert pool.materialise("d") is COPYING
    pool.copy()
    assert pool.materialise("d") is DONE
    assert pool.table("d")[0] == 0


def test_copies_that_were_not_started_never_are_when_the_formation_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_cache, "OFFLOAD_SLICE", 1)
    pool = Pool(pool=8, host=8)
    tokens = prompt(1, 7)
    pool.cached("a", tokens)
    pool.commit("b", prompt(2, 6))
    assert [pool.materialise("b") for _ in range(6)] == [Materialised.MORE] * 5 + [COPYING]
    assert [lot.number for lot in pool.cache.take_lots()] == [1, 2, 3, 4]
    pool.cache.end_formation(1)
    pool.cache.check()
    assert pool.cache.take_lots() == []
    # Blocks 6 to 3 were on their way out; the rest was to follow, and with it all that is below it.
    assert pool.hit(tokens) == {ATTENTION: B}
    pool.cache.copied(1, True)
    pool.cache.executor_stopped(1)
    pool.cache.check()
    assert pool.cache.quarantined_blocks == 0
    assert pool.counts == (7, 1, 0)
    pool.cache.copied(2, True)  # too late: nothing happens
    pool.cache.check()


def test_late_copy_still_lands_when_its_formation_ended(pool: Pool) -> None:
    """Blocks of an ended formation stay in quarantine until its copies have ended as well."""
    tokens = off_loaded(pool)
    pool.commit("again", tokens, 3 * B)
    assert pool.materialise("again") is COPYING
    lots = pool.cache.take_lots()
    pool.cache.end_formation(1)
    pool.cache.check()
    assert pool.cache.quarantined_blocks == 1
    for lot in lots:
        pool.cache.copied(lot.number, True)
        pool.cache.check()
    assert pool.cache.census().onboarded == 3
    pool.cache.executor_stopped(1)
    pool.cache.check()
    assert pool.cache.quarantined_blocks == 0
    assert pool.hit(tokens) == {ATTENTION: 3 * B}
