"""The cache adapter on the stand-in: what a hold really holds, and every way of not getting it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest

from tests.harness import tiny_models
from tests.harness.stage_core import key
from tests.harness.trtllm_alone import AloneStage, B, Prompted, assert_exact, prompt, stand_in
from wavepp_proto.errors import InternalError
from wavepp_stage.core.holds import IllegalTransition
from wavepp_stage.engine.trtllm import compat

LONG = prompt(100)
"""Six full blocks and a part of a seventh."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(params=["newer", "rc26"])
def stage(request: pytest.FixtureRequest, model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AloneStage]:
    with stand_in(monkeypatch, request.param):
        made = AloneStage(model)
        yield made
        made.cache.check()
        made.engine.close()


def at_rest(stage: AloneStage) -> bool:
    """Nothing is held by anybody."""
    pools = stage.available() == stage.cache.pool_blocks and not stage.cache.inventory()
    return pools and not stage.manager.kv_cache_map and not stage.desk.requests


# --- lease --------------------------------------------------------------------------------------------


def test_lease_holds_the_candidate_and_tells_the_own_hit_when_more_is_cached(stage: AloneStage) -> None:
    stage.prefill("donor", LONG)
    lease = stage.lease("a", LONG, 3 * B)
    assert (lease.endpoint, lease.own_hit) == (3 * B, 6 * B)
    stage.release("a")
    assert at_rest(stage)


@pytest.mark.parametrize("length", [B, 2 * B, 2 * B + 1])
def test_own_hit_stays_strictly_below_the_prompt_when_all_of_it_is_cached(stage: AloneStage, length: int) -> None:
    stage.prefill("donor", LONG)
    lease = stage.lease("a", LONG[:length])
    assert lease.own_hit == lease.endpoint == (length - 1) // B * B


def test_leased_prefix_survives_when_others_need_every_block(stage: AloneStage) -> None:
    stage.prefill("donor", LONG)
    stage.lease("a", LONG)
    others = [stage.commit(str(number), prompt(6 * B, number + 1)) for number in range(4)]
    assert others == [0] * 4
    escrow = stage.escrow("a")
    assert (escrow.endpoint, escrow.shortfall.blocks) == (6 * B, 0)


def test_lease_is_refused_with_what_lacks_when_the_rest_does_not_fit(stage: AloneStage) -> None:
    stage.commit("big", prompt(stage.cache.pool_blocks * B - 2 * B, 9))
    lease = stage.lease("a", LONG)
    assert (lease.endpoint, lease.shortfall.blocks) == (0, 5)
    assert stage.cache.hold_state(key("a")) is None


def test_floor_is_kept_free_when_a_lease_does_not_ignore_it(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with stand_in(monkeypatch):
        stage = AloneStage(model, floor_blocks=4)
        most = prompt((stage.cache.pool_blocks - 2) * B)
        assert stage.lease("a", most).shortfall.blocks == 2
        assert not stage.lease("a", most, ignore_floor=True).shortfall
        assert not stage.escrow("a").shortfall
        # It waits to be materialised: a second one may not ignore the floor.
        assert stage.lease("b", prompt(1), ignore_floor=True).shortfall.blocks == 3


def test_second_lease_of_a_key_is_illegal_when_the_first_is_held(stage: AloneStage) -> None:
    stage.lease("a", LONG)
    with pytest.raises(IllegalTransition):
        stage.lease("a", LONG)


def test_prompts_share_nothing_when_their_tenants_differ(stage: AloneStage) -> None:
    """The stage is not told a salt: the hash of the first block keeps tenants apart."""
    stage.prefill("donor", LONG, salt="one")
    assert stage.lease("a", LONG, salt="two").own_hit == 0
    assert stage.lease("b", LONG, salt="one").own_hit == 6 * B


# --- escrow -------------------------------------------------------------------------------------------


def test_escrow_takes_its_blocks_at_once_when_it_is_granted(stage: AloneStage) -> None:
    stage.lease("a", LONG)
    before = stage.available()
    escrow = stage.escrow("a")
    assert (escrow.demand, escrow.backed_free) == (7, 7)
    assert before - stage.available() == 7
    stage.release("a")
    assert at_rest(stage)


def test_escrow_evicts_what_nobody_holds_when_no_block_is_free(stage: AloneStage) -> None:
    for number in range(8):
        stage.prefill(str(number), prompt(100, number))
    assert stage.cache.capacity().free_blocks < 7
    shown = stage.shown()
    escrow_of = stage.commit("new", prompt(200, 99))
    assert escrow_of == 0
    assert stage.shown() < shown
    assert stage.cache.census().evicted > 0
    hold = stage.cache.hold_state(key("new"))
    assert hold is not None
    assert hold.owned_blocks == 13


def test_escrow_is_a_shortfall_when_every_row_is_taken(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with stand_in(monkeypatch, rows=2):
        stage = AloneStage(model)
        rows = compat.free_rows(stage.manager)
        for number in range(rows):
            stage.commit(str(number), prompt(8, number))
        stage.lease("late", LONG)
        before = stage.available()
        assert stage.escrow("late").shortfall.blocks == 1
        assert stage.available() == before
        stage.release("0")
        assert not stage.escrow("late").shortfall


@pytest.mark.parametrize("vintage", ["newer", "rc26"])
def test_escrow_is_a_shortfall_when_resuming_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch, vintage: str
) -> None:
    with stand_in(monkeypatch, vintage):
        stage = AloneStage(model)
        stage.prefill("donor", LONG)
        stage.lease("a", LONG)
        monkeypatch.setenv("FAKE_TRTLLM_REFUSE_RESUME", "all")
        assert stage.escrow("a").shortfall.blocks == 1
        monkeypatch.delenv("FAKE_TRTLLM_REFUSE_RESUME")
        assert stage.escrow("a").endpoint == 6 * B
        stage.release("a")
        assert at_rest(stage)


def test_escrow_is_refused_when_the_claim_is_not_exactly_the_endpoint(
    stage: AloneStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never silently less: other stages would compute other tokens."""
    stage.prefill("donor", LONG)
    stage.lease("a", LONG)
    claim = compat.claim
    monkeypatch.setattr(compat, "claim", lambda manager, request, limit: claim(manager, request, limit - B))
    before = stage.available()
    assert stage.escrow("a").shortfall.blocks == 1
    monkeypatch.setattr(compat, "claim", claim)
    assert stage.available() == before
    assert stage.escrow("a").endpoint == 6 * B


# --- revise -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", [0, B, 4 * B])
def test_revise_lowers_a_committed_hold_when_others_reuse_less(stage: AloneStage, endpoint: int) -> None:
    stage.prefill("donor", LONG)
    stage.commit("a", LONG)
    escrow = stage.revise("a", endpoint)
    assert (escrow.endpoint, escrow.demand, escrow.shortfall.blocks) == (endpoint, 7 - endpoint // B, 0)
    hold = stage.cache.hold_state(key("a"))
    assert hold is not None
    assert (hold.phase, hold.endpoint) == ("committed", endpoint)
    assert stage.cache.materialise(key("a")).value == "done"
    stage.release("a")
    assert at_rest(stage)


def test_revised_hold_computes_the_same_answer_when_it_runs(stage: AloneStage, model: Path) -> None:
    stage.prefill("donor", LONG)
    stage.commit("a", LONG)
    stage.revise("a", 2 * B)
    stage.cache.materialise(key("a"))
    assert_exact(model, LONG, stage.finish(Prompted(key("a"), LONG, 2 * B), chunk=3 * B))


def test_old_hold_is_restored_exactly_when_a_lower_one_cannot_be_had(
    stage: AloneStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.prefill("donor", LONG)
    stage.commit("a", LONG)
    before, reserve = stage.cache.capacity(), compat.reserve
    answers = iter([False])
    monkeypatch.setattr(compat, "reserve", lambda manager, request: next(answers, True) and reserve(manager, request))
    escrow = stage.revise("a", 2 * B)
    assert (escrow.endpoint, escrow.shortfall.blocks) == (6 * B, 1)
    hold = stage.cache.hold_state(key("a"))
    assert hold is not None
    assert (hold.phase, hold.endpoint) == ("committed", 6 * B)
    assert stage.cache.capacity().free_blocks == before.free_blocks
    assert not stage.engine.fenced


def test_revise_is_a_shortfall_when_what_is_trimmed_is_held_by_others(stage: AloneStage) -> None:
    stage.prefill("donor", LONG)
    stage.commit("a", LONG)
    stage.commit("b", LONG)
    stage.commit("big", prompt(stage.available() * B, 5))
    assert stage.available() == 0
    escrow = stage.revise("a", 2 * B)
    assert (escrow.endpoint, bool(escrow.shortfall)) == (6 * B, True)
    assert stage.cache.materialise(key("a")).value == "done"


# --- running, giving back ---------------------------------------------------------------------------------


def test_published_blocks_are_reusable_and_in_the_digest_when_their_wave_has_retired(stage: AloneStage) -> None:
    running = stage.admit("a", LONG)
    stage.advance((running, 3 * B))
    assert stage.shown() == 3
    assert stage.lease("b", LONG).endpoint == 3 * B


def test_nothing_of_a_void_row_is_committed_when_its_wave_retires(stage: AloneStage) -> None:
    running = stage.admit("a", LONG)
    stage.advance((running, 2 * B))
    stage.run(stage.row(running, 2 * B))
    stage.cache.discard(key("a"))
    stage.cache.publish(key("a"), 4 * B)
    assert stage.shown() == 2
    stage.release("a")
    assert at_rest(stage)


def test_pins_and_blocks_return_to_baseline_when_a_request_is_cancelled_between_chunks(stage: AloneStage) -> None:
    stage.prefill("donor", LONG)
    running = stage.admit("a", LONG + prompt(60, 3))
    stage.advance((running, B))
    stage.release("a")
    assert at_rest(stage)


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_release_gives_everything_back_once_when_it_comes_twice(stage: AloneStage, steps: int) -> None:
    stage.prefill("donor", LONG)
    stage.lease("a", LONG)
    for step in (stage.cache.escrow, stage.cache.commit, stage.cache.materialise)[:steps]:
        step(key("a"))
    stage.release("a")
    stage.release("a")
    assert at_rest(stage)


def test_blocks_are_in_quarantine_until_the_executor_stopped_when_a_formation_ends(stage: AloneStage) -> None:
    stage.prefill("donor", LONG)
    stage.lease("leased", LONG)
    stage.admit("running", prompt(80, 1))
    other = Thread(target=stage.cache.end_formation, args=(1,))
    other.start()
    other.join()
    census = stage.cache.census()
    assert (census.quarantined, stage.cache.inventory()) == (5, ())
    assert census.free + census.cached + census.held + census.quarantined == stage.cache.pool_blocks
    stage.cache.executor_stopped(1)
    assert at_rest(stage)
    stage.cache.executor_stopped(1)


def test_another_cache_starts_with_nothing_when_the_engine_stays_loaded(stage: AloneStage) -> None:
    stage.prefill("donor", LONG)
    stage.commit("lost", LONG)
    stage.cache.end_formation(1)
    stage.renew_cache()
    assert stage.lease("a", LONG).own_hit == 0
    stage.release("a")
    assert at_rest(stage)


def test_digest_forgets_everything_when_events_were_lost(stage: AloneStage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.prefill("donor", LONG)
    take = compat.take_events
    with monkeypatch.context() as patch:
        patch.setattr(compat, "take_events", lambda manager: take(manager)[:0])
        stage.prefill("unseen", prompt(200, 4))
    running = stage.admit("b", prompt(80, 5))
    stage.advance((running, 2 * B))
    assert stage.shown() == 0
    stage.release("b")
    assert stage.lease("a", LONG).own_hit == 0
    stage.release("a")
    stage.prefill("again", LONG)
    assert stage.shown() == 6


def test_evicted_prefix_stays_reusable_when_there_is_a_host_tier(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with stand_in(monkeypatch):
        stage = AloneStage(model, pool_blocks=12, host_pool_blocks=32)
        stage.prefill("donor", LONG)
        stage.prefill("other", prompt(12 * B - 1, 2))
        assert stage.cache.census().offloaded > 0
        assert stage.prefill("again", LONG) == 6 * B
        assert stage.cache.census().onboarded > 0


# --- fences -------------------------------------------------------------------------------------------


def test_nothing_is_held_and_nothing_is_asked_when_the_desk_is_fenced(stage: AloneStage) -> None:
    stage.commit("a", LONG)
    stage.desk.fence("for this test")
    assert stage.lease("b", LONG).shortfall.blocks == 7
    stage.release("a")
    assert stage.cache.inventory() == ()


def test_desk_is_fenced_when_the_manager_fails_as_nobody_expected(
    stage: AloneStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: object, **named: object) -> int:
        raise RuntimeError("page table")

    monkeypatch.setattr(stage.manager, "probe_prefix_match_length", broken)
    with pytest.raises(InternalError, match="page table"):
        stage.lease("a", LONG)
    assert "page table" in stage.engine.fenced
