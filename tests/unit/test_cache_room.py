"""Room: what is promised, what the floor leaves alone, and who may go below it."""

from __future__ import annotations

from tests.harness.cache_pool import ATTENTION, RECURRENT, Pool
from tests.harness.stage_core import B, hashes, key
from wavepp_stage.core.cache_manager import ENOUGH, Materialised, Shortfall

DONE = Materialised.DONE


def oversized(pool: Pool, name: str, blocks: int) -> Shortfall:
    return pool.lease(name, [7] * (blocks * B), ignore_floor=True).shortfall


def test_admission_stops_at_half_the_pool_when_prompts_are_one_token_over_a_block() -> None:
    """Field bug 27: a budget in tokens admits twice as many and runs out of memory."""
    pool = Pool(pool=31)
    admitted = []
    for name in map(str, range(20)):
        if not pool.lease(name, [int(name)] * (B + 1)).shortfall:
            assert pool.cache.escrow(key(name)).shortfall == ENOUGH
            admitted.append(name)
    assert len(admitted) == 15
    for name in admitted:
        pool.cache.commit(key(name))
        assert pool.materialise(name) is DONE
        assert len(pool.table(name)) == 2


def test_second_prompt_waits_for_the_first_when_the_pool_holds_one_and_a_fifth() -> None:
    """Field bug 35: the whole rest of a prompt is promised at admission, so nothing is computed twice."""
    pool = Pool(pool=12)
    first, second = [1] * (10 * B), [2] * (10 * B)
    pool.commit("a", first)
    assert pool.lease("b", second).shortfall == Shortfall(8)
    assert pool.materialise("a") is DONE
    assert pool.lease("b", second).shortfall == Shortfall(8)
    pool.publish("a", len(first))
    pool.release("a")
    pool.run("b", second)
    assert pool.cache.census().evicted == 8


def test_oversized_request_ignores_the_floor_when_nobody_else_waits() -> None:
    pool = Pool(pool=10, floor=3)
    assert pool.lease("normal", [1] * (8 * B)).shortfall == Shortfall(1)
    assert oversized(pool, "large", 8) == ENOUGH
    assert pool.cache.escrow(key("large")).shortfall == ENOUGH
    assert pool.cache.commit(key("large")).shortfall == ENOUGH
    assert pool.lease("other", [2] * B).shortfall == Shortfall(2)
    assert pool.materialise("large") is DONE


def test_oversized_request_keeps_to_the_floor_while_another_hold_is_not_materialised() -> None:
    """The floor is what lets that one grow; once it owns its blocks it needs nothing more."""
    pool = Pool(pool=10, floor=3)
    pool.commit("running", [1] * B)
    assert oversized(pool, "large", 8) == Shortfall(2)
    seq = pool.cache.capacity().seq
    assert pool.materialise("running") is DONE
    # One block less is free and one less is promised: no room was gained, but the wait is over.
    assert pool.cache.capacity().seq > seq
    assert oversized(pool, "large", 8) == ENOUGH


def test_second_oversized_request_keeps_to_the_floor_when_the_first_is_not_materialised() -> None:
    pool = Pool(pool=10, floor=3)
    assert oversized(pool, "first", 4) == ENOUGH
    pool.cache.escrow(key("first"))
    assert oversized(pool, "second", 6) == Shortfall(3)


def test_hold_stays_uncommitted_when_the_floor_was_raised_meanwhile() -> None:
    pool = Pool(pool=8)
    assert pool.lease("a", [1] * (6 * B)).shortfall == ENOUGH
    pool.cache.escrow(key("a"))
    pool.cache.floor_blocks = 3
    assert pool.cache.commit(key("a")).shortfall == Shortfall(1)
    held = pool.cache.hold_state(key("a"))
    assert held is not None
    assert (held.phase, held.escrow_blocks) == ("escrowed", 6)
    pool.cache.floor_blocks = 2
    assert pool.cache.commit(key("a")).shortfall == ENOUGH


def test_capacity_seq_grows_when_only_the_floor_changed() -> None:
    pool = Pool(floor=3)
    seq = pool.cache.capacity().seq
    pool.cache.floor_blocks = 1
    assert pool.cache.capacity().seq == seq + 1


def test_both_groups_are_missing_when_neither_has_room() -> None:
    pool = Pool(pool=4, slots=1, groups=(ATTENTION, RECURRENT))
    assert pool.lease("a", [1] * (6 * B), snapshots=2).shortfall == Shortfall(2, 2)
    assert pool.cache.inventory() == ()


def test_known_prefix_is_always_held_when_that_costs_nothing() -> None:
    """Somebody else holds it already: even below the floor a sequence goes on publishing."""
    pool = Pool(pool=8, floor=3)
    tokens = [1] * (3 * B)
    pool.commit("a", tokens)
    assert pool.materialise("a") is DONE
    assert oversized(pool, "large", 4) == ENOUGH
    pool.cache.release(key("large"))
    pool.cache.lease(key("b"), len(tokens), hashes(tokens), 0, ignore_floor=True)
    pool.cache.escrow(key("b"))
    pool.cache.commit(key("b"))
    assert pool.materialise("b") is DONE
    pool.publish("a", len(tokens))
    pool.publish("b", len(tokens))
    pool.release("a")
    assert pool.counts == (2, 0, 0)  # b holds a's three nodes beside its own three blocks
