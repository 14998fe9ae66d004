"""Recurrent states: what a prefix is good for, who pays for a slot, and when a snapshot may go."""

from __future__ import annotations

import pytest

from tests.harness.cache_pool import ATTENTION, RECURRENT, Pool
from tests.harness.digest_reader import DigestReader
from tests.harness.stage_core import B, hashes, key
from wavepp_proto.terms import CacheGroup, Incarnation
from wavepp_stage.core.cache_manager import ENOUGH, Materialised, Shortfall
from wavepp_stage.core.holds import IllegalTransition
from wavepp_stage.core.work import StateWork

HYBRID = (ATTENTION, RECURRENT)
K = 2 * B
"""A thousand tokens of the paper's example, to scale."""


def hybrid(pool: int = 40, slots: int = 6, host: int = 0) -> Pool:
    return Pool(pool=pool, slots=slots, host=host, groups=HYBRID)


def prompt(symbol: int, blocks: int) -> list[int]:
    """A prompt of `blocks` full blocks and one token."""
    return [symbol] * (blocks * B) + [99]


def test_hit_is_the_deepest_snapshot_when_attention_reaches_further() -> None:
    pool = hybrid()
    tokens = prompt(1, 6)
    pool.cached("a", tokens, snapshots=(2 * B, 4 * B))
    assert pool.hit(tokens) == {ATTENTION: 6 * B, RECURRENT: 4 * B}
    lease = pool.lease("b", tokens, 6 * B)
    assert (lease.endpoint, lease.own_hit) == (4 * B, 4 * B)
    assert pool.lease("c", tokens, 3 * B).endpoint == 2 * B
    assert pool.lease("d", tokens, B).endpoint == 0


def test_sequence_starts_from_the_empty_state_when_no_snapshot_is_known() -> None:
    """Attention alone reaches six blocks; a recurrent layer has nothing to go on with there."""
    pool = hybrid()
    tokens = prompt(1, 6)
    pool.cached("a", tokens)
    lease = pool.lease("b", tokens, 6 * B)
    assert (lease.endpoint, lease.own_hit) == (0, 0)
    pool.cache.escrow(key("b"))
    pool.cache.commit(key("b"))
    assert pool.materialise("b") is Materialised.DONE
    work = pool.plan("b", 0)
    assert work is not None
    assert work.restore is None


def test_agreed_endpoint_falls_along_common_snapshots_when_two_stages_differ() -> None:
    """Paper 4.4: snapshots at {64, 72, 90}K and {64, 80}K. 80K is proposed, 72K and then 64K are usable by both."""
    first, second = hybrid(pool=256), hybrid(pool=256)
    tokens = prompt(1, 92 * K // B)
    first.cached("a", tokens, snapshots=(64 * K, 72 * K, 90 * K))
    second.cached("a", tokens, snapshots=(64 * K, 80 * K))
    endpoints = [[stage.commit("b", tokens, 80 * K).endpoint for stage in (first, second)]]
    while len(set(endpoints[-1])) > 1:
        lowest = min(endpoints[-1])
        for stage in (first, second):
            assert stage.cache.revise(key("b"), lowest).shortfall == ENOUGH
            stage.cache.check()
        endpoints.append([state(stage, "b") for stage in (first, second)])
    assert endpoints == [[72 * K, 80 * K], [72 * K, 64 * K], [64 * K, 64 * K]]


def state(pool: Pool, name: str) -> int:
    held = pool.cache.hold_state(key(name))
    assert held is not None
    return held.endpoint


def test_revise_holds_the_earlier_snapshot_and_lets_the_later_go() -> None:
    pool = hybrid(slots=4)
    tokens = prompt(1, 4)
    pool.cached("a", tokens, snapshots=(2 * B, 4 * B))
    assert pool.states == (2, 2, 0)
    assert pool.commit("b", tokens, 4 * B, snapshots=1).demand_states == 2
    assert pool.states == (2, 1, 2)
    revised = pool.cache.revise(key("b"), 3 * B, 1)
    assert (revised.endpoint, revised.shortfall) == (2 * B, ENOUGH)
    assert pool.states == (2, 1, 2)
    pool.cache.check()
    held = pool.cache.hold_state(key("b"))
    assert held is not None
    assert (held.phase, held.escrow_states) == ("escrowed", 2)  # 2B is not what was asked: not committed


def test_revise_keeps_the_old_hold_when_the_earlier_snapshot_costs_a_slot_too_many() -> None:
    """Another hold starts from the later snapshot: giving it up frees nothing, the earlier one is promised away."""
    pool = hybrid(slots=4)
    tokens = prompt(1, 4)
    pool.cached("a", tokens, snapshots=(2 * B, 4 * B))
    pool.commit("b", tokens, 4 * B)
    pool.commit("c", tokens, 4 * B, snapshots=1)
    assert pool.states == (2, 1, 3)
    revised = pool.cache.revise(key("b"), 2 * B)
    assert (revised.endpoint, revised.shortfall) == (4 * B, Shortfall(0, 1))
    assert state(pool, "b") == 4 * B
    assert pool.states == (2, 1, 3)
    pool.release("c")
    assert pool.cache.revise(key("b"), 2 * B).endpoint == 2 * B
    pool.cache.check()


def test_lease_is_refused_with_slots_when_the_states_do_not_suffice() -> None:
    pool = hybrid(slots=3)
    pool.commit("a", prompt(1, 2), snapshots=1)
    assert pool.states == (3, 0, 2)
    assert pool.lease("b", prompt(2, 2), snapshots=1).shortfall == Shortfall(0, 1)
    assert pool.cache.hold_state(key("b")) is None
    assert pool.lease("b", prompt(2, 2)).shortfall == ENOUGH


def test_snapshot_is_charged_when_a_lease_takes_it_from_what_could_be_evicted() -> None:
    pool = hybrid(slots=2)
    tokens = prompt(1, 2)
    pool.cached("a", tokens, snapshots=(2 * B,))
    assert pool.states == (1, 1, 0)
    assert pool.lease("b", tokens, 2 * B, snapshots=1).shortfall == Shortfall(0, 1)
    assert pool.lease("b", tokens, 2 * B).endpoint == 2 * B
    assert pool.states == (1, 0, 0)


def test_first_row_restores_and_later_rows_go_on_when_planned() -> None:
    pool = hybrid()
    tokens = prompt(1, 6)
    pool.cached("a", tokens, snapshots=(2 * B,))
    start = 1  # slot 0 was the working state
    pool.commit("b", tokens, 2 * B, snapshots=2)
    assert pool.materialise("b") is Materialised.DONE
    assert pool.states == (4, 0, 2)
    assert pool.plan("b", 2 * B, 3 * B, 4 * B) == StateWork(0, start, ((3 * B, 2), (4 * B, 3)))
    assert pool.plan("b", 4 * B, 5 * B) == StateWork(0)  # a third was not promised
    assert pool.states == (2, 0, 0)


def test_snapshot_is_let_go_when_the_first_wave_has_retired() -> None:
    pool = hybrid()
    tokens = prompt(1, 6)
    pool.cached("a", tokens, snapshots=(2 * B,))
    pool.commit("b", tokens, 2 * B)
    pool.materialise("b")
    pool.plan("b", 2 * B)
    assert pool.states == (4, 0, 0)
    pool.publish("b", 2 * B + 1)
    assert pool.states == (4, 1, 0)


def test_snapshot_goes_alone_when_a_slot_is_needed() -> None:
    """The least recently used one; its node stays, and so does what attention can reuse."""
    pool = hybrid(slots=3)
    reader = DigestReader(Incarnation(1))
    old, new = prompt(1, 2), prompt(2, 2)
    pool.cached("a", old, snapshots=(2 * B,))
    pool.cached("b", new, snapshots=(2 * B,))
    reader.read(pool.cache)
    pool.commit("c", prompt(3, 2), snapshots=1)
    pool.materialise("c")
    pool.plan("c", 0, 2 * B)
    assert pool.hit(old) == {ATTENTION: 2 * B, RECURRENT: 0}
    assert pool.hit(new) == {ATTENTION: 2 * B, RECURRENT: 2 * B}
    removed = [
        (group.group, group.removed) for digest in reader.read(pool.cache) for group in digest.groups if group.removed
    ]
    assert removed == [(RECURRENT, hashes(old).shorts[1:2].tobytes())]


def test_node_takes_its_snapshot_along_in_one_delta_when_dropped() -> None:
    pool = hybrid(pool=4)
    tokens = prompt(1, 3)
    pool.cached("a", tokens, snapshots=(3 * B,))
    seq = pool.cache.digests_since(0)[-1].seq
    pool.run("b", prompt(2, 1))
    (delta, *rest) = [d for d in pool.cache.digests_since(seq) if any(group.removed for group in d.groups)]
    assert rest == []
    gone = hashes(tokens).shorts[2:3].tobytes()
    assert {group.group: group.removed for group in delta.groups} == {ATTENTION: gone, RECURRENT: gone}
    assert pool.states[1] == 0


def test_snapshot_is_attached_once_when_two_sequences_take_it() -> None:
    pool = hybrid()
    tokens = prompt(1, 2)
    for name in ("a", "b"):
        pool.commit(name, tokens, snapshots=1)
        assert pool.materialise(name) is Materialised.DONE
        pool.plan(name, 0, 2 * B)
    assert pool.states == (2, 0, 0)
    pool.publish("a", len(tokens))
    assert pool.states == (2, 1, 0)
    pool.publish("b", len(tokens))
    assert pool.states == (3, 1, 0)
    pool.release("a")
    pool.release("b")
    assert pool.states == (5, 1, 0)


def test_planned_snapshot_is_never_published_when_its_row_was_void() -> None:
    """Its slot stays with the hold until the release: a wave that was prepared ahead may still write it."""
    pool = hybrid()
    tokens = prompt(1, 4)
    pool.commit("a", tokens, snapshots=2)
    pool.materialise("a")
    pool.plan("a", 0, 2 * B)
    pool.plan("a", 2 * B, 4 * B)
    pool.publish("a", 2 * B)
    pool.cache.discard(key("a"))
    pool.publish("a", 4 * B)
    assert pool.hit(tokens) == {ATTENTION: 4 * B, RECURRENT: 2 * B}
    assert pool.states == (3, 1, 0)
    pool.release("a")
    assert pool.states == (5, 1, 0)


def test_states_wait_in_quarantine_when_a_formation_ends() -> None:
    pool = hybrid()
    tokens = prompt(1, 4)
    pool.cached("z", tokens, snapshots=(2 * B,))
    pool.commit("a", tokens, 2 * B, snapshots=1)
    pool.materialise("a")
    pool.plan("a", 2 * B, 4 * B)
    pool.commit("b", prompt(2, 1), snapshots=1)
    pool.cache.end_formation(3)
    pool.cache.check()
    # Working state and planned snapshot of a; the snapshot that it started from may still be read.
    assert (pool.states, pool.cache.quarantined_states) == ((3, 0, 0), 2)
    pool.cache.executor_stopped(3)
    pool.cache.check()
    assert (pool.states, pool.cache.quarantined_states) == ((5, 1, 0), 0)


def test_stage_without_attention_tells_only_snapshots() -> None:
    """Its tree is bookkeeping: block numbers of 0 bytes, no host tier, no attention digest."""
    pool = Pool(pool=16, host=8, slots=4, groups=(RECURRENT,))
    tokens = prompt(1, 4)
    pool.cached("a", tokens, snapshots=(2 * B,))
    assert pool.hit(tokens) == {RECURRENT: 2 * B}
    (digest,) = pool.cache.digests_since(0)
    assert [(group.group, group.count) for group in digest.groups] == [(CacheGroup.RECURRENT, 1)]
    assert pool.cache.host_pool_blocks == 0


def test_stage_without_recurrent_layers_has_no_state() -> None:
    pool = Pool(slots=4)
    pool.commit("a", prompt(1, 2), snapshots=3)
    pool.materialise("a")
    assert pool.plan("a", 0, B) is None
    assert pool.cache.state_slots == 0


def test_state_is_planned_only_for_a_sequence_that_runs() -> None:
    pool = hybrid()
    pool.commit("a", prompt(1, 2))
    with pytest.raises(IllegalTransition):
        pool.cache.plan_state(key("a"), 0, ())


def test_snapshots_survive_when_their_blocks_are_off_loaded() -> None:
    pool = hybrid(pool=5, host=4)
    tokens = prompt(1, 2)
    pool.cached("a", tokens, snapshots=(2 * B,))
    pool.cached("b", prompt(2, 4))
    assert pool.cache.census().offloaded == 2
    assert pool.hit(tokens) == {ATTENTION: 2 * B, RECURRENT: 2 * B}
