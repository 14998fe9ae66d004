"""Requests that wait behind the one that computes their prefix: once computed, never lost, never stuck."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.fake_pipeline import BLOCK, FakePipeline, record, tokens
from wavepp_controller.core.config import ControllerConfig
from wavepp_controller.core.events import MemberUp, SendRound, SendWave, Span
from wavepp_proto.errors import InternalError
from wavepp_proto.hashing import HashScope, hash_blocks
from wavepp_proto.terms import Admitted, Finished


def sharing(**config: Any) -> FakePipeline:
    return FakePipeline(config=ControllerConfig(wave_tokens=64, floor_blocks=0, **config), sharing=True)


def cached_everywhere(pipeline: FakePipeline, *names: str) -> None:
    """Stages can reuse whatever these requests ask for: leases are not what is tested."""
    for daemon in pipeline.daemons.values():
        daemon.hits |= dict.fromkeys(names, 100_000)


def submit_together(pipeline: FakePipeline, *prompts: tuple[str, int, int]) -> None:
    """(name, tokens, seed): all become ready while another round is open, and so at once."""
    pipeline.hold.add(SendRound)
    pipeline.submit("other", 1, seed=99)
    for name, count, seed in prompts:
        pipeline.submit(name, count, seed)
    pipeline.hold.discard(SendRound)
    pipeline.release_held(SendRound)


def rows(pipeline: FakePipeline, name: str) -> list[tuple[int, int]]:
    return [(row.start, row.length) for wave in pipeline.waves() for row in wave if row.key.request_id == name]


def go_on(pipeline: FakePipeline) -> None:
    pipeline.hold = set()
    pipeline.release_held()
    pipeline.pass_time(0.2)
    assert pipeline.machine.live_requests == 0
    assert pipeline.nothing_held()


def admitted(pipeline: FakePipeline, name: str) -> Admitted:
    return pipeline.of_request(name, Admitted)[-1]


def states(pipeline: FakePipeline, *names: str) -> list[str]:
    return [pipeline.state(name) for name in names]


# --- once ---------------------------------------------------------------------------------------


def test_prefix_is_computed_once_when_a_burst_of_equal_prompts_comes() -> None:
    """Field bugs 21 and 22: nobody hits what is not computed yet, and everybody hits it then."""
    pipeline = sharing()
    names = [f"r{number}" for number in range(1, 40)]
    cached_everywhere(pipeline, *names)
    pipeline.hold = {SendWave}
    for name in ("r0", *names):
        pipeline.submit(name, 200)
    assert set(states(pipeline, *names)) == {"waiting"}
    status = next(one for one in pipeline.machine.status().requests if one.request_id == "r7")
    assert status.waiting_for == "the prefix that r0 computes"
    assert all(len(daemon.holds) == 1 for daemon in pipeline.daemons.values())
    go_on(pipeline)
    assert sum(row.length for wave in pipeline.waves() for row in wave) == 200 + 39 * 8
    for name in names:
        one = admitted(pipeline, name)
        assert (one.endpoint, one.candidate, one.shared_tokens, one.rounds) == (192, 192, 192, 1)
    assert (pipeline.counter("shared_requests"), pipeline.counter("shared_tokens")) == (39, 39 * 192)
    assert pipeline.counter("parked") == 39


def test_second_waits_when_both_become_ready_for_the_same_round() -> None:
    pipeline = sharing(policy="fixed")
    cached_everywhere(pipeline, "b")
    pipeline.hold = {SendWave}
    submit_together(pipeline, ("a", 200, 0), ("b", 150, 0), ("c", 100, 5))
    prepared = [[p.key.request_id for p in a.round.prepares] for a in pipeline.of(SendRound) if a.key.stage == 0]
    assert prepared == [["other"], ["a", "c"]]
    assert states(pipeline, "a", "b", "c") == ["running", "waiting", "running"]
    go_on(pipeline)
    assert (admitted(pipeline, "b").endpoint, rows(pipeline, "b")) == (144, [(144, 6)])


def test_front_ends_a_chunk_at_the_boundary_when_it_has_not_come_so_far() -> None:
    pipeline = sharing()
    cached_everywhere(pipeline, "b")
    submit_together(pipeline, ("a", 300, 0), ("b", 100, 0))
    assert rows(pipeline, "a")[:3] == [(0, 64), (64, 32), (96, 64)]
    assert rows(pipeline, "b") == [(96, 4)]
    go_on(pipeline)


def test_prefix_is_taken_as_published_when_the_front_is_past_it() -> None:
    pipeline = sharing()
    cached_everywhere(pipeline, "b", "c")
    pipeline.hold = {SendWave}
    pipeline.submit("a", 600)
    wave, *rest = pipeline.held
    pipeline.held = [wave]
    pipeline.release_held()  # the last stage has reported tokens [0, 64)
    pipeline.submit("b", 60)
    assert (admitted(pipeline, "b").endpoint, admitted(pipeline, "b").shared_tokens) == (48, 0)
    pipeline.submit("c", 100)
    assert pipeline.state("c") == "waiting"
    pipeline.held = rest + pipeline.held
    go_on(pipeline)
    assert admitted(pipeline, "c").endpoint == 96


def test_waiting_ends_when_the_last_stage_has_reported_the_boundary() -> None:
    pipeline = sharing()
    cached_everywhere(pipeline, "b")
    pipeline.hold = {SendWave}
    submit_together(pipeline, ("a", 600, 0), ("b", 100, 0))
    for expected in ("waiting", "waiting", "admitted"):  # `other`, [0, 64), [64, 96)
        wave, *rest = pipeline.held
        pipeline.held = [wave]
        pipeline.release_held()
        pipeline.held = rest + pipeline.held
        assert states(pipeline, "a", "b") == ["running", expected]
    go_on(pipeline)
    assert admitted(pipeline, "b").endpoint == 96


def test_waiting_ends_when_all_digests_show_the_boundary() -> None:
    pipeline = sharing()
    cached_everywhere(pipeline, "b")
    pipeline.hold = {SendWave}
    submit_together(pipeline, ("a", 200, 0), ("b", 200, 0))
    hashes = hash_blocks(HashScope("f1", f"B{BLOCK}"), tokens(192), BLOCK)
    pipeline.digest(0, hashes)
    assert pipeline.state("b") == "waiting"
    pipeline.digest(1, hashes)
    assert pipeline.state("b") == "admitted"
    go_on(pipeline)


def test_nobody_waits_when_the_digests_show_the_prefix_already() -> None:
    pipeline = sharing()
    cached_everywhere(pipeline, "a", "b")
    hashes = hash_blocks(HashScope("f1", f"B{BLOCK}"), tokens(192), BLOCK)
    for stage in (0, 1):
        pipeline.digest(stage, hashes)
    submit_together(pipeline, ("a", 200, 0), ("b", 200, 0))
    assert pipeline.counter("parked") == 0
    go_on(pipeline)


# --- whoever is in front goes away --------------------------------------------------------------


def test_next_in_line_computes_when_the_front_is_cancelled() -> None:
    pipeline = sharing()
    cached_everywhere(pipeline, "b", "c")
    pipeline.hold = {SendWave}
    submit_together(pipeline, ("a", 200, 0), ("b", 200, 0), ("c", 200, 0))
    pipeline.cancel("a")
    assert states(pipeline, "b", "c") == ["admitted", "waiting"]  # `c` found another front
    go_on(pipeline)
    assert [admitted(pipeline, name).endpoint for name in "bc"] == [0, 192]
    assert isinstance(pipeline.outcome("c"), Finished)


def test_next_in_line_computes_when_the_front_is_voided() -> None:
    pipeline = sharing()
    cached_everywhere(pipeline, "b")
    pipeline.daemon(1).faults["a"] = "BAD_CANARY"
    submit_together(pipeline, ("a", 200, 0), ("b", 200, 0))
    assert pipeline.reason("a") == "ROW_VOIDED"
    assert isinstance(pipeline.outcome("b"), Finished)
    assert admitted(pipeline, "b").endpoint == 0
    go_on(pipeline)


def test_parked_request_keeps_its_place_when_the_front_runs_short() -> None:
    pipeline = sharing()
    cached_everywhere(pipeline, "b")
    pipeline.daemon(1).short["a"] = 5
    submit_together(pipeline, ("a", 200, 0), ("b", 200, 0), ("c", 20, 7))
    assert states(pipeline, "a", "b") == ["waiting", "hinted"]
    assert isinstance(pipeline.outcome("c"), Finished)  # shared the round and found room
    pipeline.daemon(1).short.clear()
    pipeline.pass_time(0.15)
    go_on(pipeline)
    assert admitted(pipeline, "b").endpoint == 192


def test_parked_request_queues_again_when_the_formation_ends() -> None:
    pipeline = sharing(attempts=2)
    cached_everywhere(pipeline, "b")
    pipeline.hold = {SendWave}
    submit_together(pipeline, ("a", 200, 0), ("b", 200, 0))
    pipeline.held.clear()
    pipeline.lose(1)
    assert states(pipeline, "a", "b") == ["queued", "queued"]
    pipeline.hold = set()
    pipeline.post(MemberUp(record(1, incarnation=2), pipeline.now))
    go_on(pipeline)
    assert all(isinstance(pipeline.outcome(name), Finished) for name in "ab")


def test_front_goes_on_when_whoever_waits_behind_it_is_cancelled() -> None:
    pipeline = sharing()
    pipeline.hold = {SendWave}
    submit_together(pipeline, ("a", 200, 0), ("b", 200, 0))
    pipeline.cancel("b")
    assert pipeline.reason("b") == "CANCELLED"
    go_on(pipeline)
    assert isinstance(pipeline.outcome("a"), Finished)


def test_check_tells_when_a_request_waits_behind_one_that_is_gone() -> None:
    pipeline = sharing()
    pipeline.hold = {SendWave}
    submit_together(pipeline, ("a", 200, 0), ("b", 200, 0))
    service = pipeline.machine.pipelines[record(0).key.pipeline].service
    assert service is not None
    front = service.admission.holders.pop("a")
    with pytest.raises(InternalError, match="b waits behind a, which is gone"):
        pipeline.machine.check()
    service.admission.holders["a"] = front
    go_on(pipeline)


# --- limits -------------------------------------------------------------------------------------


def test_nobody_waits_when_sharing_is_off() -> None:
    pipeline = sharing(share_tokens=0)
    submit_together(pipeline, ("a", 200, 0), ("b", 200, 0))
    assert pipeline.counter("parked") == 0
    go_on(pipeline)


@pytest.mark.parametrize(("least", "parked"), [(96, 1), (97, 0)])
def test_nobody_waits_when_less_is_shared_than_asked_for(least: int, parked: int) -> None:
    pipeline = sharing(share_tokens=least)
    submit_together(pipeline, ("a", 200, 0), ("b", 100, 0))
    assert pipeline.counter("parked") == parked
    go_on(pipeline)


@pytest.mark.parametrize(("most", "endpoint"), [(1, 0), (2, 192)])
def test_request_waits_only_so_often_when_its_fronts_keep_failing(most: int, endpoint: int) -> None:
    pipeline = sharing(most_parks=most)
    cached_everywhere(pipeline, "b", "c")
    pipeline.hold = {SendWave}
    submit_together(pipeline, ("a", 200, 0), ("b", 200, 0), ("c", 200, 0))
    pipeline.cancel("a")
    go_on(pipeline)
    assert admitted(pipeline, "c").endpoint == endpoint


def test_front_is_cut_only_so_often_when_many_share_other_parts_of_it() -> None:
    pipeline = sharing()
    names = {f"r{number}": 16 * number + 1 for number in range(1, 9)}
    cached_everywhere(pipeline, *names)
    submit_together(pipeline, ("a", 300, 0), *((name, count, 0) for name, count in names.items()))
    assert rows(pipeline, "a") == [(0, 16), (16, 16), (32, 16), (48, 16), (64, 64), (128, 64), (192, 64), (256, 44)]
    assert [admitted(pipeline, name).endpoint for name in names] == [16 * number for number in range(1, 9)]
    go_on(pipeline)


def test_urgent_request_does_not_wait_when_the_front_may_be_overtaken_itself() -> None:
    pipeline = sharing()
    cached_everywhere(pipeline, "b", "c")
    pipeline.hold = {SendWave}
    pipeline.submit("a", 600)  # 256 tokens are in the ring
    pipeline.submit("b", 400, priority=1)
    assert pipeline.state("b") == "admitted"
    pipeline.submit("c", 200, priority=1)
    assert pipeline.state("c") == "waiting"  # what it needs is on its way whoever comes
    go_on(pipeline)


def test_longest_share_is_chosen_when_several_compute_a_part() -> None:
    pipeline = sharing()
    cached_everywhere(pipeline, "b", "c")
    pipeline.hold = {SendWave}
    pipeline.submit("a", 70)
    pipeline.submit("b", 200)  # waits for the 64 tokens of `a`
    assert pipeline.state("b") == "waiting"
    pipeline.hold.discard(SendWave)
    pipeline.hold.add(SendRound)
    pipeline.release_held(SendWave)
    pipeline.submit("c", 300)
    pipeline.hold = {SendWave}
    pipeline.release_held(SendRound)
    assert states(pipeline, "b", "c") == ["running", "waiting"]
    go_on(pipeline)
    assert [admitted(pipeline, name).endpoint for name in "bc"] == [64, 192]


# --- explained ----------------------------------------------------------------------------------


def test_wait_is_named_in_timings_trace_and_counters() -> None:
    pipeline = sharing()
    cached_everywhere(pipeline, "b")
    pipeline.hold = {SendWave}
    submit_together(pipeline, ("a", 200, 0), ("b", 200, 0))
    pipeline.pass_time(0.3)
    go_on(pipeline)
    finished = pipeline.outcome("b")
    assert isinstance(finished, Finished)
    assert finished.timings.sharing_wait_ms == pytest.approx(300)
    assert finished.timings.admission_ms == pytest.approx(300)
    assert pipeline.counter("sharing_wait_ms") == 300
    spans = {span.name: span for span in pipeline.of(Span) if span.request_id == "b"}
    assert dict(spans["wait_behind"].attributes) == {"wavepp.front": "a", "wavepp.boundary": 192}
    assert spans["wait_behind"].end - spans["wait_behind"].start == pytest.approx(0.3)
    assert dict(spans["admission"].attributes)["wavepp.shared_tokens"] == 192
