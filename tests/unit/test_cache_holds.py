"""Holds: the table of their life, and the exact counts and blocks that each step moves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.cache_pool import Pool, own
from tests.harness.stage_core import B, hashes, key, packed_hashes
from wavepp_proto.errors import InternalError
from wavepp_proto.hashing import HASH_BYTES, blocks_for
from wavepp_proto.terms import Capacity, ErrorInfo, HoldKey
from wavepp_stage.core import block_cache
from wavepp_stage.core.block_hashes import BlockHashes
from wavepp_stage.core.cache_manager import ENOUGH, Escrow, Lease, Materialised, Shortfall
from wavepp_stage.core.holds import TRANSITIONS, Hold, HoldInput, IllegalTransition, Phase

IMPOSSIBLE: dict[tuple[Phase, HoldInput], str] = {
    **{(Phase.RETIRED, given): "a retired hold is not in the ledger" for given in HoldInput},
    **{(phase, HoldInput.ESCROW): "room is promised once" for phase in Phase if phase is not Phase.LEASED},
    **{
        (phase, HoldInput.COMMIT): "only a promised endpoint is fixed" for phase in Phase if phase is not Phase.ESCROWED
    },
    **{(phase, HoldInput.REVISE): "only an open endpoint is trimmed" for phase in Phase if phase is not Phase.ESCROWED},
    **{(phase, HoldInput.UNCOMMIT): "only a fixed one opens" for phase in Phase if phase is not Phase.COMMITTED},
    **{(phase, HoldInput.MATERIALISE): "blocks follow a commit" for phase in Phase if phase is not Phase.COMMITTED},
    **{(phase, HoldInput.ABANDON): "only copies are lost" for phase in Phase if phase is not Phase.MATERIALISING},
    **{(phase, HoldInput.INSTALL): "a table follows its blocks" for phase in Phase if phase is not Phase.MATERIALISING},
}


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool()
    yield made
    made.cache.check()


@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("given", HoldInput)
def test_every_pair_is_legal_or_impossible_when_walked(phase: Phase, given: HoldInput) -> None:
    legal, impossible = (phase, given) in TRANSITIONS, (phase, given) in IMPOSSIBLE
    assert legal != impossible
    hold = Hold(key("a"), 4, hashes([1] * 4), False, phase=phase)
    if legal:
        assert hold.advance(given) is TRANSITIONS[phase, given] is hold.phase
        return
    with pytest.raises(IllegalTransition) as caught:
        hold.advance(given)
    assert hold.phase is phase
    assert caught.value.key == key("a")


def test_illegal_transition_tells_the_story_when_raised(pool: Pool) -> None:
    pool.commit("a", range(10))
    with pytest.raises(IllegalTransition) as caught:
        pool.cache.commit(key("a"))
    assert caught.value.info() == ErrorInfo(
        "INTERNAL",
        "commit is illegal for a hold that is committed",
        (("attempt", "1"), ("request_id", "a"), ("story", "escrow:escrowed > commit:committed")),
    )


def test_demand_is_rounded_up_per_request_when_blocks_are_partial(pool: Pool) -> None:
    """Reports of memory running out came from budgets that ignored the partial block."""
    assert pool.commit("a", range(B + 1)).demand == 2
    assert pool.commit("b", range(100, 101 + B)).demand == 2
    assert pool.counts == (8, 0, 4)


def test_lease_stops_below_the_prompt_when_everything_is_cached(pool: Pool) -> None:
    tokens = list(range(2 * B))
    pool.cached("a", tokens)
    assert pool.lease("b", tokens, 2 * B) == Lease(B, B, own(B))


def test_lease_is_charged_when_it_holds_what_eviction_counted_on(pool: Pool) -> None:
    """8 blocks: 4 cached, 4 free. A 5-block prompt that reuses 4 takes 5 of room, not 1."""
    pool.cached("a", range(4 * B))
    assert pool.counts == (4, 4, 0)
    assert pool.lease("b", range(4 * B + 1), 4 * B) == Lease(4 * B, 4 * B, own(4 * B))
    assert pool.counts == (4, 0, 0)
    assert pool.cache.escrow(key("b")).demand == 1
    cold = pool.lease("c", [99] * (3 * B + 1))
    assert cold == Lease(0, 0, own(0), shortfall=Shortfall(1))
    assert pool.cache.hold_state(key("c")) is None


def test_shared_lease_costs_nothing_when_another_hold_has_paid(pool: Pool) -> None:
    pool.cached("a", range(4 * B))
    pool.commit("b", range(4 * B + 1), 4 * B)
    assert pool.commit("c", [*range(4 * B), 77], 4 * B).demand == 1
    assert pool.counts == (4, 0, 2)


def test_escrow_says_what_backs_it_when_free_blocks_run_out(pool: Pool) -> None:
    pool.cached("a", range(5 * B))
    assert pool.commit("b", [50] * (2 * B)) == Escrow(0, 2, backed_free=2)
    assert pool.commit("c", [60] * (3 * B)) == Escrow(0, 3, backed_free=1, backed_evict=2)


def test_floor_is_kept_when_requests_ask_for_the_last_blocks() -> None:
    pool = Pool(pool=8, floor=3)
    assert pool.lease("a", range(6 * B)).shortfall == Shortfall(1)
    assert pool.lease("a", range(6 * B), ignore_floor=True).shortfall == ENOUGH
    assert pool.cache.escrow(key("a")).demand == 6
    pool.cache.check()


def test_free_blocks_go_first_and_then_the_oldest_leaf_when_materialising(pool: Pool) -> None:
    old = pool.cached("a", [1] * (3 * B))
    new = pool.cached("b", [2] * (3 * B))
    assert (old, new) == ([0, 1, 2], [3, 4, 5])
    assert pool.run("c", [3] * (4 * B)) == [6, 7, 2, 1]
    assert pool.counts == (0, 4, 0)


def test_escrow_falls_block_by_block_when_materialise_runs_in_slices(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_cache, "EVICTION_SLICE", 2)
    pool.cached("a", range(6 * B))
    pool.commit("b", [1] * (7 * B))
    assert pool.cache.materialise(key("b")) is Materialised.MORE
    assert pool.counts == (0, 4, 3)
    pool.cache.check()
    assert pool.cache.materialise(key("b")) is Materialised.MORE
    assert pool.counts == (0, 2, 1)
    assert pool.cache.materialise(key("b")) is Materialised.DONE
    assert pool.counts == (0, 1, 0)


def test_release_waits_for_the_end_when_it_arrives_in_materialising(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_cache, "EVICTION_SLICE", 2)
    pool.cached("a", range(8 * B))
    pool.commit("b", [1] * (4 * B))
    assert pool.cache.materialise(key("b")) is Materialised.MORE
    pool.release("b")
    pool.release("b")
    state = pool.cache.hold_state(key("b"))
    assert state is not None
    assert state.phase == "materialising"
    assert pool.cache.materialise(key("b")) is Materialised.DONE
    assert pool.cache.hold_state(key("b")) is None
    assert pool.counts == (4, 4, 0)


def test_revise_trims_and_promises_the_difference_when_the_endpoint_falls(pool: Pool) -> None:
    pool.cached("a", range(4 * B))
    pool.commit("b", range(4 * B + 1), 4 * B)
    assert pool.cache.revise(key("b"), 2 * B) == Escrow(2 * B, 3, backed_free=3)
    assert pool.counts == (4, 2, 3)
    state = pool.cache.hold_state(key("b"))
    assert state is not None
    assert (state.phase, state.endpoint, state.leased_blocks, state.escrow_blocks) == ("committed", 2 * B, 2, 3)
    pool.cache.check()


def test_revise_keeps_the_old_hold_when_others_hold_what_it_gives_up() -> None:
    pool = Pool(pool=6)
    pool.cached("a", range(4 * B))
    pool.commit("b", range(4 * B + 1), 4 * B)
    pool.commit("c", [*range(4 * B), 77], 4 * B)
    assert pool.counts == (2, 0, 2)
    assert pool.cache.revise(key("b"), B) == Escrow(4 * B, 1, shortfall=Shortfall(3))
    state = pool.cache.hold_state(key("b"))
    assert state is not None
    assert (state.phase, state.endpoint) == ("committed", 4 * B)
    pool.release("c")
    assert pool.cache.revise(key("b"), B).shortfall == ENOUGH
    pool.cache.check()


def test_private_copy_stays_in_its_table_when_another_sequence_published_first(pool: Pool) -> None:
    tokens = [*range(2 * B), 5]
    a, b = pool.run("a", tokens), pool.run("b", tokens)
    assert (a, b) == ([0, 1, 2], [3, 4, 5])
    assert pool.counts == (2, 0, 0)
    pool.release("a")
    assert pool.counts == (3, 0, 0)  # b holds the nodes of blocks 0 and 1
    assert pool.table("b") == [3, 4, 5]
    pool.release("b")
    assert pool.counts == (6, 2, 0)
    assert pool.run("c", tokens, 2 * B)[:2] == [0, 1]


def test_publishing_stops_when_holding_the_known_prefix_would_break_a_promise() -> None:
    """The hold on an existing node lowers `evictable`: without room for it the sequence stays private."""
    pool = Pool(pool=6)
    tokens = [*range(2 * B), 5]
    pool.commit("b", tokens)
    assert pool.cache.materialise(key("b")) is Materialised.DONE
    pool.run("a", tokens)
    pool.release("a")
    assert pool.counts == (1, 2, 0)
    pool.commit("c", [9] * (3 * B))
    pool.cache.publish(key("b"), len(tokens))
    pool.cache.check()
    assert pool.counts == (1, 2, 3)
    pool.release("c")
    pool.cache.publish(key("b"), len(tokens))  # for good: the rest of a sequence has no parent any more
    assert pool.counts == (1, 2, 0)
    pool.release("b")
    assert pool.counts == (4, 2, 0)


def test_sequence_publishes_nothing_more_when_a_short_hash_collides(pool: Pool) -> None:
    pool.cached("a", range(B))
    packed = packed_hashes([7] * (4 * B))
    taken = packed_hashes(range(B))[:8] + bytes(HASH_BYTES - 8)
    forged = BlockHashes.unpack(packed[:HASH_BYTES] + taken + packed[2 * HASH_BYTES :])
    cache, name = pool.cache, key("b")
    cache.lease(name, 4 * B, forged, 0)
    cache.escrow(name)
    cache.commit(name)
    assert cache.materialise(name) is Materialised.DONE
    cache.publish(name, 3 * B)
    cache.publish(name, 4 * B)
    cache.check()
    assert cache.cached_blocks == 1
    state = cache.hold_state(name)
    assert state is not None
    assert state.owned_blocks == 3  # one published, three private
    pool.run("c", [8] * (4 * B))  # evicts the node that was in the way: still nothing more
    pool.release("c")
    cache.publish(name, 4 * B)
    assert cache.hold_state(name) == state
    pool.release("b")
    assert pool.counts == (3, 5, 0)


@pytest.mark.parametrize("phase", ["leased", "escrowed", "committed", "owned"])
def test_nothing_is_held_when_released_in_any_phase(pool: Pool, phase: str) -> None:
    pool.cached("a", range(4 * B))
    cache, name = pool.cache, key("b")
    pool.lease("b", range(6 * B), 3 * B)
    if phase != "leased":
        cache.escrow(name)
    if phase in ("committed", "owned"):
        cache.commit(name)
    if phase == "owned":
        cache.materialise(name)
    state = cache.hold_state(name)
    assert state is not None
    assert state.phase == phase
    pool.release("b")
    pool.release("b")
    assert cache.inventory() == ()
    free, evictable, escrowed = pool.counts
    assert (free + evictable, escrowed) == (8, 0)


def test_blocks_wait_in_quarantine_when_a_formation_ends(pool: Pool) -> None:
    pool.cached("z", range(B))
    pool.run("a", range(3 * B + 1), B)
    pool.commit("b", [9] * B)
    pool.cache.end_formation(4)
    pool.cache.check()
    assert pool.cache.inventory() == ()
    # 4 blocks of "a": 3 nodes still held for its executor, 1 private one; "b" touched nothing
    assert pool.counts == (4, 0, 0)
    assert pool.cache.quarantined_blocks == 1
    pool.cache.executor_stopped(3)
    assert pool.cache.quarantined_blocks == 1
    pool.cache.executor_stopped(4)
    pool.cache.check()
    assert pool.counts == (5, 3, 0)


def test_capacity_seq_grows_only_when_something_changed(pool: Pool) -> None:
    assert pool.cache.capacity() == Capacity(1, 8, 0)
    assert pool.cache.capacity().seq == 1
    pool.commit("a", range(B))
    assert pool.cache.capacity().seq == 2
    pool.release("a")
    assert pool.cache.capacity() == Capacity(3, 8, 0)


def test_cache_says_so_when_asked_about_an_unknown_hold(pool: Pool) -> None:
    unknown: HoldKey = key("nobody")
    with pytest.raises(InternalError, match="nothing is held"):
        pool.cache.escrow(unknown)
    assert blocks_for(0, B) == 0
