"""Stages of several ranks: everybody is asked, everybody must agree, and one that is lost ends it for all."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from tests.harness.fake_pipeline import BLOCK, PIPELINE, FakePipeline, fault, record, tokens
from tests.harness.flaky_pipeline import FlakyPipeline
from wavepp_controller.core.config import ControllerConfig
from wavepp_controller.core.events import (
    AnnounceRequest,
    BeatArrived,
    EndFormation,
    FormPipeline,
    LeadershipWon,
    MemberUp,
    ReportArrived,
    SendRound,
    SendWave,
)
from wavepp_controller.core.latency_model import LatencyModel
from wavepp_controller.core.stage_model import demand_of
from wavepp_proto import limits
from wavepp_proto.hashing import HashScope, hash_blocks
from wavepp_proto.terms import (
    Admitted,
    Attempt,
    DaemonKey,
    Epoch,
    Failed,
    Finished,
    Heartbeat,
    HoldKey,
    Incarnation,
    MemberRecord,
    Rank,
    RequestId,
    Row,
    StageIndex,
    StageTimes,
    WaveReport,
)

PLACES = [(0, 0), (0, 1), (1, 0), (1, 1)]


def place(stage: int, rank: int) -> DaemonKey:
    return DaemonKey(PIPELINE, StageIndex(stage), Rank(rank))


def of_ranks(*pairs: tuple[int, int], **fields: Any) -> list[MemberRecord]:
    return [record(stage, rank=rank, ranks=2, **fields) for stage, rank in pairs]


def register(*records: MemberRecord) -> FakePipeline:
    pipeline = FakePipeline(start=False)
    pipeline.post(LeadershipWon(Epoch(1), pipeline.now))
    for one in records:
        pipeline.post(MemberUp(one, pipeline.now))
    return pipeline


def cached(pipeline: FakePipeline, count: int, blocks: dict[tuple[int, int], int] | None = None) -> bytes:
    """Every daemon says that it holds a prompt, or its first `blocks`."""
    hashes = hash_blocks(HashScope("f1", f"B{BLOCK}"), tokens(count), BLOCK)
    for key in list(pipeline.daemons):
        most = (blocks or {}).get((key.stage, key.rank))
        pipeline.digest(key.stage, hashes, blocks=most, rank=key.rank)
    return hashes


def drained(pipeline: FakePipeline) -> None:
    """Every daemon ran the same waves, and nothing is left anywhere."""
    assert len({daemon.running for daemon in pipeline.daemons.values()}) == 1
    assert pipeline.nothing_held()
    assert pipeline.machine.live_requests == 0
    pipeline.machine.check()


# --- forming ------------------------------------------------------------------------------------


def test_pipeline_forms_when_every_rank_of_every_stage_is_there() -> None:
    pipeline = register(*of_ranks(*PLACES[:3]))
    assert pipeline.of(FormPipeline) == []
    (waiting,) = pipeline.machine.status().pipelines
    assert waiting.missing == (place(1, 1),)
    pipeline.post(MemberUp(of_ranks((1, 1))[0], pipeline.now))
    (formed,) = pipeline.of(FormPipeline)
    assert [(p.key.stage, p.key.rank, p.stages, p.ranks) for p in formed.plans] == [
        (stage, rank, 2, 2) for stage, rank in PLACES
    ]
    assert all([peer.key for peer in plan.peers] == [place(*one) for one in PLACES] for plan in formed.plans)


def test_missing_rank_is_named_when_the_pipeline_does_not_form() -> None:
    pipeline = register(*of_ranks((0, 0), (1, 0)))
    pipeline.submit("a", 20)
    pipeline.pass_time(ControllerConfig().pipeline_wait_ms / 1e3 + 0.1)
    outcome = pipeline.outcome("a")
    assert isinstance(outcome, Failed)
    assert dict(outcome.error.fields)["missing_stages"] == "0.1 1.1"


@pytest.mark.parametrize(
    ("changes", "field", "value", "limit"),
    [
        ({"ranks": 1, "rank": 0}, "ranks", "1", "2"),
        ({"first_layer": 1}, "first_layer", "1", "2"),
        ({"last_layer": 3}, "last_layer", "3", "4"),
    ],
)
def test_rank_is_refused_by_name_when_it_differs_from_its_stage(
    changes: dict[str, Any], field: str, value: str, limit: str
) -> None:
    other = record(1, **{"rank": 1, "ranks": 2, **changes})
    pipeline = register(*of_ranks(*PLACES[: 2 if field == "ranks" else 3]), other)
    assert pipeline.of(FormPipeline) == []
    (refused,) = pipeline.machine.status().refused
    named = dict(refused.error.fields)
    assert (named["field"], named["value"], named["limit"]) == (field, value, limit)


@pytest.mark.parametrize(("rank", "ranks"), [(2, 2), (0, limits.MAX_RANKS + 1), (0, 0)])
def test_member_is_refused_when_its_rank_is_out_of_range(rank: int, ranks: int) -> None:
    pipeline = register(record(0, stages=1, rank=rank, ranks=ranks))
    assert pipeline.of(FormPipeline) == []
    assert len(pipeline.machine.status().refused) == 1


# --- announcing and agreeing --------------------------------------------------------------------


def test_every_rank_of_the_first_stage_is_told_the_tokens() -> None:
    pipeline = FakePipeline(ranks=2)
    pipeline.submit("a", 100)
    (announced,) = pipeline.of(AnnounceRequest)
    assert [(key.stage, key.rank, tokens) for key, _, tokens in announced.targets] == [
        (0, 0, True), (0, 1, True), (1, 0, False), (1, 1, False),
    ]  # fmt: skip
    assert isinstance(pipeline.outcome("a"), Finished)
    drained(pipeline)


def test_prompt_is_served_when_the_only_stage_has_several_ranks() -> None:
    pipeline = FakePipeline(stages=1, ranks=3)
    pipeline.submit("a", 100)
    assert isinstance(pipeline.outcome("a"), Finished)
    assert len(pipeline.daemons) == 3
    drained(pipeline)


@pytest.mark.parametrize("poorest", PLACES)
def test_hint_is_what_every_rank_holds_when_digests_differ(poorest: tuple[int, int]) -> None:
    pipeline = FakePipeline(ranks=2)
    cached(pipeline, 200, {poorest: 3})
    pipeline.submit("a", 200)
    asked = [action.round.prepares[0].candidate for action in pipeline.of(SendRound) if action.round.prepares]
    assert asked == [3 * BLOCK] * 4


def test_endpoint_is_the_least_of_all_ranks_when_their_votes_differ() -> None:
    pipeline = FakePipeline(ranks=2)
    cached(pipeline, 200)
    for (stage, rank), hit in zip(PLACES, (160, 96, 128, 144), strict=True):
        pipeline.daemon(stage, rank).hits["a"] = hit
    pipeline.submit("a", 200)
    revised = [
        (action.key.stage, action.key.rank, [entry.endpoint for entry in action.round.revises])
        for action in pipeline.of(SendRound)
        if action.round.revises
    ]
    # whoever fell below the candidate has committed nothing yet, the poorest included
    assert revised == [(stage, rank, [96]) for stage, rank in PLACES]
    (admitted,) = pipeline.of_request("a", Admitted)
    # a stage can reuse what its poorest rank can: 96 and 128
    assert (admitted.endpoint, admitted.limiting_stage, admitted.best_stage_hit) == (96, 0, 128)
    assert isinstance(pipeline.outcome("a"), Finished)
    drained(pipeline)


def test_everybody_lets_go_when_one_rank_has_no_room() -> None:
    pipeline = FakePipeline(ranks=2)
    short = pipeline.daemon(0, 1)
    short.short["a"] = 5
    pipeline.submit("a", 100)
    assert pipeline.state("a") == "waiting"
    assert not any(daemon.holds for daemon in pipeline.daemons.values())
    (waits,) = pipeline.machine.status().requests
    assert waits.waiting_for == "capacity on stage 0"
    del short.short["a"]
    short.seq, short.free = short.seq + 1, short.free + 5
    pipeline.post(BeatArrived(place(0, 1), Heartbeat(short.fence(0), 1, capacity=short.capacity()), pipeline.now))
    assert isinstance(pipeline.outcome("a"), Finished)
    drained(pipeline)


# --- executing ----------------------------------------------------------------------------------


def report(pipeline: FakePipeline, wave: SendWave, stage: int, rank: int, token: int = 7, void: int = 0) -> None:
    daemon = pipeline.daemon(stage, rank)
    told = daemon.report(wave, daemon.fence(wave.ordinal), void, last=stage == 1)
    told = replace(told, results=tuple(replace(result, token_id=token) for result in told.results))
    pipeline.post(ReportArrived(place(stage, rank), told, pipeline.now))


def running(count: int = 20) -> tuple[FakePipeline, SendWave]:
    """A request in one wave that nobody has reported."""
    pipeline = FakePipeline(ranks=2)
    pipeline.hold = {SendWave}
    pipeline.submit("a", count)
    (wave,) = pipeline.of(SendWave)
    assert [key for key, _ in wave.targets] == [place(*one) for one in PLACES]
    return pipeline, wave


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_token_is_that_of_rank_0_whichever_rank_reports_last(order: tuple[int, int]) -> None:
    pipeline, wave = running()
    for rank in (0, 1):
        report(pipeline, wave, 0, rank)
    report(pipeline, wave, 1, order[0], token=40 + order[0])
    assert pipeline.machine.live_requests == 1
    report(pipeline, wave, 1, order[1], token=40 + order[1])
    outcome = pipeline.outcome("a")
    assert isinstance(outcome, Finished)
    assert outcome.first_token == 40
    drained(pipeline)


def test_slot_is_taken_until_every_rank_of_the_last_stage_has_reported() -> None:
    pipeline, wave = running()
    in_flight = []
    for stage, rank in PLACES:
        report(pipeline, wave, stage, rank)
        in_flight.append(pipeline.machine.status().pipelines[0].waves_in_flight)
    assert in_flight == [1, 1, 1, 0]


@pytest.mark.parametrize("where", PLACES)
def test_request_fails_naming_the_rank_when_that_one_alone_voids_its_row(where: tuple[int, int]) -> None:
    pipeline = FakePipeline(ranks=2)
    pipeline.daemon(*where).faults["a"] = "BAD_CANARY"
    pipeline.hold = {SendWave}
    pipeline.submit("a", 100)
    pipeline.submit("b", 40, seed=1)
    pipeline.hold = set()
    pipeline.release_held()
    outcome = pipeline.outcome("a")
    assert isinstance(outcome, Failed)
    named = {"stage": str(where[0]), "rank": str(where[1]), "wave": "1", "cause": "BAD_CANARY"}
    assert (outcome.error.reason, dict(outcome.error.fields)) == ("ROW_VOIDED", named)
    assert isinstance(pipeline.outcome("b"), Finished)
    assert pipeline.of(EndFormation) == []
    drained(pipeline)


def test_formation_ends_naming_the_rank_when_it_executed_other_rows() -> None:
    pipeline, wave = running(50)
    report(pipeline, wave, 0, 0)
    pipeline.daemon(0, 1).running = b"something else"
    report(pipeline, wave, 0, 1)
    (ended,) = pipeline.of(EndFormation)
    assert ended.cause.message.startswith("stage 0 rank 1 executed other rows")
    assert dict(ended.cause.fields)["rank"] == "1"


def test_learnt_times_are_of_the_slowest_rank_and_go_with_its_place() -> None:
    model = LatencyModel()
    rows = (Row(HoldKey(RequestId("a"), Attempt(1)), 0, 1000, final=False),)
    for _ in range(20):
        for stage, rank in PLACES:
            times = StageTimes(compute_us=9000 if (stage, rank) == (0, 1) else 5000)
            model.observe(place(stage, rank), rows, 0, times)
    demand = demand_of(rows)
    assert model.believed(2)
    assert model.wave_us(2, demand) == pytest.approx(9000, rel=0.01)
    model.serve([record(0), record(1)])
    assert model.wave_us(2, demand) == pytest.approx(5000, rel=0.01)


# --- losing one ---------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", PLACES)
@pytest.mark.parametrize("silently", [True, False])
def test_stage_is_fenced_within_2_s_when_one_rank_is_lost_and_forms_again_with_it(
    lost: tuple[int, int], silently: bool
) -> None:
    pipeline = FakePipeline(ranks=2)
    pipeline.hold = {SendWave}
    pipeline.submit("a", 1000)
    begun = pipeline.now
    pipeline.deaf_places = {lost}
    if not silently:
        pipeline.lose(*lost)
    while not pipeline.of(EndFormation):
        pipeline.pass_time(0.05)
    assert pipeline.now - begun < 2.0
    outcome = pipeline.outcome("a")
    assert isinstance(outcome, Failed)
    named = dict(outcome.error.fields)
    assert (outcome.error.reason, named["stage"], named["rank"]) == ("STAGE_LOST", str(lost[0]), str(lost[1]))
    (ended,) = pipeline.of(EndFormation)
    # told: the other ranks of its stage too, and whoever is silent fences itself
    others = [place(*one) for one in PLACES if one != lost]
    assert [key for key, _ in ended.targets if key != place(*lost)] == others
    # it comes back as somebody new
    pipeline.hold.clear()
    pipeline.held.clear()
    pipeline.deaf_places = set()
    back = record(lost[0], rank=lost[1], ranks=2, incarnation=2)
    pipeline.post(MemberUp(back, pipeline.now))
    pipeline.pass_time(0.5)
    again = pipeline.of(FormPipeline)[-1]
    assert [plan.fence.incarnation for plan in again.plans] == [Incarnation(2 if one == lost else 1) for one in PLACES]
    pipeline.submit("b", 100, seed=3)
    assert isinstance(pipeline.outcome("b"), Finished)
    drained(pipeline)


def test_formation_ends_naming_the_rank_when_its_wave_failed() -> None:
    pipeline, wave = running()
    daemon = pipeline.daemon(1, 1)
    failed = WaveReport(daemon.fence(wave.ordinal), False, 0, b"", StageTimes(), error=fault("ENGINE_FAULT"))
    pipeline.post(ReportArrived(place(1, 1), failed, pipeline.now))
    assert pipeline.of(EndFormation) == []
    pipeline.pass_time(0.3)
    (ended,) = pipeline.of(EndFormation)
    assert ended.cause.message.startswith("stage 1 rank 1 of p failed wave 1")
    assert {"stage": "1", "rank": "1"}.items() <= dict(ended.cause.fields).items()


@pytest.mark.parametrize("error", ["ENGINE_FAULT", "LINK_FAULT"])
def test_lost_rank_is_named_when_the_waves_of_the_others_fail_first(error: str) -> None:
    pipeline, wave = running()
    for stage, rank in ((1, 1), (0, 0)):
        daemon = pipeline.daemon(stage, rank)
        failed = WaveReport(daemon.fence(wave.ordinal), False, 0, b"", StageTimes(), error=fault(error))
        pipeline.post(ReportArrived(place(stage, rank), failed, pipeline.now))
    pipeline.pass_time(0.1)
    pipeline.lose(1, 0)
    outcome = pipeline.outcome("a")
    assert isinstance(outcome, Failed)
    named = dict(outcome.error.fields)
    assert (outcome.error.reason, named["stage"], named["rank"]) == ("STAGE_LOST", "1", "0")


def test_only_the_rank_whose_streams_broke_is_sent_its_waves_again() -> None:
    pipeline = FlakyPipeline(ranks=2)
    pipeline.hold = {SendWave}
    pipeline.submit("a", 1000)
    before = len(pipeline.log)
    pipeline.hold.clear()
    pipeline.cut(1, rank=1)
    again = [action for action in pipeline.log[before:] if isinstance(action, SendWave)]
    assert again
    assert {key for wave in again for key, _ in wave.targets} == {place(1, 1)}
    assert all(one.ordinal < two.ordinal for one, two in pairwise(again))
    pipeline.release_held()
    assert isinstance(pipeline.outcome("a"), Finished)
    assert len(pipeline.of(FormPipeline)) == 1
    drained(pipeline)
