"""Forming a pipeline: who fits, who is refused by name, and how it is tried again."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from tests.harness.fake_pipeline import PIPELINE, FakePipeline, fault, record
from wavepp_controller.core.config import ControllerConfig
from wavepp_controller.core.events import (
    EndFormation,
    FormPipeline,
    Joined,
    JoinFailed,
    LeadershipWon,
    MemberGone,
    MembershipFrozen,
    MemberUp,
    ReformAsked,
    RefuseReform,
    SendRound,
    SendWave,
    StageShape,
)
from wavepp_controller.core.members import Members
from wavepp_proto import limits
from wavepp_proto.terms import (
    CacheGroup,
    Capacity,
    DaemonKey,
    Epoch,
    Failed,
    Finished,
    Incarnation,
    JoinReply,
    LinkKind,
    MemberRecord,
    ModelFacts,
    PipelineId,
    Rank,
    StageIndex,
)


def register(*records: MemberRecord, config: ControllerConfig | None = None) -> FakePipeline:
    pipeline = FakePipeline(config=config, start=False)
    pipeline.post(LeadershipWon(Epoch(1), pipeline.now))
    for one in records:
        pipeline.post(MemberUp(one, pipeline.now))
    return pipeline


def formed(pipeline: FakePipeline) -> list[list[tuple[int, int]]]:
    """(stage, incarnation) of each formation's daemons."""
    return [[(p.key.stage, p.fence.incarnation) for p in action.plans] for action in pipeline.of(FormPipeline)]


def gone(pipeline: FakePipeline, stage: int, incarnation: int = 1) -> None:
    place = DaemonKey(PIPELINE, StageIndex(stage))
    pipeline.post(MemberGone(place, Incarnation(incarnation), pipeline.now))


def status(pipeline: FakePipeline) -> tuple[str, int]:
    (found,) = pipeline.machine.status().pipelines
    return found.state, found.formation


# --- who fits -----------------------------------------------------------------------------------

OTHER_MODEL = ModelFacts("m", "f2", layers=4, vocabulary=1000, window=100_000)


@pytest.mark.parametrize(
    ("changes", "field", "value", "limit"),
    [
        ({"model": OTHER_MODEL}, "model", "m (f2)", "m (f1)"),
        ({"block_tokens": 32}, "block_tokens", "32", "16"),
        ({"protocol": 99}, "protocol", "99", "1"),
        ({"stages": 3}, "stages", "3", "2"),
        ({"ranks": 2}, "ranks", "2", "1"),
        ({"pool_blocks": 0}, "pool_blocks", "0", "1"),
        ({"first_layer": 1}, "first_layer", "1", "2"),
        ({"last_layer": 3}, "last_layer", "3", "4"),
    ],
)
def test_member_is_refused_by_name_when_it_does_not_fit(
    changes: dict[str, Any], field: str, value: str, limit: str
) -> None:
    pipeline = register(record(0), replace(record(1), **changes))
    assert formed(pipeline) == []
    (refused,) = pipeline.machine.status().refused
    assert (refused.key.stage, refused.address, refused.error.reason) == (1, "host1:1", "JOIN_REFUSED")
    named = dict(refused.error.fields)
    assert (named["field"], named["value"], named["limit"]) == (field, value, limit)
    (found,) = pipeline.machine.status().pipelines
    assert [key.stage for key in found.missing] == [1]


def test_pipeline_forms_when_the_refused_member_is_replaced_by_one_that_fits() -> None:
    pipeline = register(record(0), record(1, block_tokens=32))
    gone(pipeline, 1)
    pipeline.post(MemberUp(record(1, incarnation=2), pipeline.now))
    assert formed(pipeline) == [[(0, 1), (1, 2)]]
    assert pipeline.machine.status().refused == ()


def test_refused_member_is_judged_again_when_what_it_differed_from_is_gone() -> None:
    pipeline = register(record(0, model=OTHER_MODEL), record(1))
    gone(pipeline, 0)
    pipeline.post(MemberUp(record(0, incarnation=2), pipeline.now))
    assert formed(pipeline) == [[(0, 2), (1, 1)]]


def test_every_rank_is_waited_for_when_a_stage_has_several() -> None:
    def ranked(stage: int, rank: int) -> MemberRecord:
        return replace(record(stage, ranks=2), key=DaemonKey(PIPELINE, StageIndex(stage), Rank(rank)))

    pipeline = register(ranked(0, 0), ranked(1, 0), ranked(1, 1))
    assert formed(pipeline) == []
    pipeline.post(MemberUp(ranked(0, 1), pipeline.now))
    assert formed(pipeline) == [[(0, 1), (0, 1), (1, 1), (1, 1)]]
    pipeline.submit("a", 100)
    assert isinstance(pipeline.outcome("a"), Finished)


def test_nothing_forms_when_this_controller_does_not_lead() -> None:
    pipeline = FakePipeline(start=False)
    for stage in (0, 1):
        pipeline.post(MemberUp(record(stage), pipeline.now))
    assert formed(pipeline) == []
    pipeline.post(LeadershipWon(Epoch(4), pipeline.now))
    assert formed(pipeline) == [[(0, 1), (1, 1)]]


def test_pipeline_forms_anew_when_leadership_is_won_again() -> None:
    pipeline = FakePipeline()
    pipeline.post(LeadershipWon(Epoch(2), pipeline.now))
    plans = pipeline.of(FormPipeline)[-1].plans
    assert {(plan.fence.epoch, plan.fence.formation) for plan in plans} == {(2, 2)}
    pipeline.submit("a", 40)
    assert pipeline.of(SendRound)[0].round.fence.ordinal == 1  # round ordinals begin again with an epoch
    assert isinstance(pipeline.outcome("a"), Finished)


def test_plan_names_the_first_round_when_a_formation_follows_another() -> None:
    pipeline = FakePipeline()
    pipeline.submit("a", 40)
    sent = {action.key: action.round.fence.ordinal for action in pipeline.of(SendRound)}
    pipeline.post(ReformAsked(PIPELINE, (), None, None, pipeline.now))
    plans = pipeline.of(FormPipeline)[-1].plans
    assert {plan.key: plan.first_round for plan in plans} == {key: last + 1 for key, last in sent.items()}
    assert {plan.first_round for plan in pipeline.of(FormPipeline)[0].plans} == {1}


# --- what is agreed -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stages", "links", "forced", "expected"),
    [
        (1, ["x:1"], None, LinkKind.NONE),
        (1, ["x:1"], LinkKind.GRPC, LinkKind.NONE),
        (2, ["x:1", "y:1"], None, LinkKind.GLOO),
        (2, ["x:1", ""], None, LinkKind.GRPC),
        (2, ["x:1", "y:1"], LinkKind.GRPC, LinkKind.GRPC),
        (2, ["x:1", "y:1"], LinkKind.NCCL, LinkKind.NCCL),
    ],
)
def test_link_is_what_every_daemon_can_when_none_is_forced(
    stages: int, links: list[str], forced: LinkKind | None, expected: LinkKind
) -> None:
    records = [record(stage, stages, link_address=link) for stage, link in enumerate(links)]
    pipeline = register(*records, config=ControllerConfig(link=forced))
    (form,) = pipeline.of(FormPipeline)
    assert {plan.link for plan in form.plans} == {expected}
    stored = expected in (LinkKind.GLOO, LinkKind.NCCL)
    assert {plan.link_store for plan in form.plans} == {links[0] if stored else ""}


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (("GPU-a", "GPU-b"), LinkKind.NCCL),
        (("GPU-a", "GPU-a"), LinkKind.GLOO),  # NCCL refuses a group in which two share a device
        (("GPU-a", ""), LinkKind.GLOO),
    ],
)
def test_link_is_nccl_when_every_daemon_has_a_gpu_of_its_own(gpus: tuple[str, str], expected: LinkKind) -> None:
    pipeline = register(*(record(stage, gpu=gpu) for stage, gpu in enumerate(gpus)))
    (form,) = pipeline.of(FormPipeline)
    assert {plan.link for plan in form.plans} == {expected}


def test_plans_tell_every_stage_what_the_others_hold_and_have_loaded() -> None:
    pipeline = register(record(0, engine_load=11), record(1, engine_load=12))
    (form,) = pipeline.of(FormPipeline)
    told = {
        tuple((p.first_layer, p.last_layer, p.engine_load, p.pool_blocks) for p in plan.peers) for plan in form.plans
    }
    assert told == {((0, 2, 11, 10_000), (2, 4, 12, 10_000))}


@pytest.mark.parametrize(("incarnation", "known"), [(1, 77), (2, 1)], ids=["same", "another"])
def test_load_of_an_answer_is_known_before_its_record_comes(incarnation: int, known: int) -> None:
    members = Members()
    members.up(record(0, incarnation=incarnation, engine_load=1))
    members.joined(record(0, incarnation=1, engine_load=1), 77)
    (found,) = members.roster({}, 0.0).records.values()
    assert found.engine_load == known


def test_pipeline_is_broken_with_a_reason_when_the_forced_link_cannot_be() -> None:
    records = [record(0), record(1, link_address="")]
    pipeline = register(*records, config=ControllerConfig(link=LinkKind.GLOO))
    assert formed(pipeline) == []
    (found,) = pipeline.machine.status().pipelines
    assert found.state == "broken"
    assert found.last_fault is not None
    assert dict(found.last_fault.fields)["field"] == "link"


@pytest.mark.parametrize(("asked", "used"), [(64, 64), (100, 96), (16, 16), (7, 16)])
def test_wave_tokens_are_rounded_to_blocks_when_the_plan_is_drawn_up(asked: int, used: int) -> None:
    pipeline = register(record(0), record(1), config=ControllerConfig(wave_tokens=asked))
    (form,) = pipeline.of(FormPipeline)
    assert {plan.wave_tokens for plan in form.plans} == {used}
    (found,) = pipeline.machine.status().pipelines
    assert found.wave_tokens == used


# --- groups and tiers ---------------------------------------------------------------------------

HYBRID = ModelFacts("m", "f1", layers=4, vocabulary=1000, window=100_000, recurrent_layers=(1, 2, 3))
"""Stage 0 has both groups, stage 1 recurrent layers alone."""
BOTH = (CacheGroup.ATTENTION, CacheGroup.RECURRENT)


def hybrid(*slots: int, **fields: Any) -> list[MemberRecord]:
    return [record(stage, model=HYBRID, state_slots=count, **fields) for stage, count in enumerate(slots)]


def test_plan_names_groups_tiers_and_slots_when_bands_differ() -> None:
    pipeline = register(*hybrid(8, 6, host_pool_blocks=70))
    (form,) = pipeline.of(FormPipeline)
    assert [plan.groups for plan in form.plans] == [BOTH, (CacheGroup.RECURRENT,)]
    assert [(plan.state_slots, plan.host_pool_blocks) for plan in form.plans] == [(8, 70), (6, 70)]
    daemons = pipeline.machine.status().pipelines[0].daemons
    assert [(daemon.groups, daemon.state_slots, daemon.host_pool_blocks) for daemon in daemons] == [
        (BOTH, 8, 70),
        ((CacheGroup.RECURRENT,), 6, 70),
    ]


def test_plan_has_no_slots_when_the_band_has_no_recurrent_layer() -> None:
    pipeline = register(record(0, state_slots=9), record(1))
    (form,) = pipeline.of(FormPipeline)
    assert [(plan.state_slots, plan.groups) for plan in form.plans] == [(0, (CacheGroup.ATTENTION,))] * 2


def test_groups_follow_the_bands_when_a_reform_moves_them() -> None:
    pipeline = register(*hybrid(8, 6))
    reform(pipeline, StageShape(0, 0, 1), StageShape(1, 1, 4))
    plans = pipeline.of(FormPipeline)[-1].plans
    assert [(plan.groups, plan.state_slots) for plan in plans] == [
        ((CacheGroup.ATTENTION,), 0),
        ((CacheGroup.RECURRENT,), 6),
    ]
    assert status(pipeline) == ("serving", 2)


@pytest.mark.parametrize("slots", [0, 1])
def test_member_is_refused_by_name_when_it_has_recurrent_layers_and_too_few_slots(slots: int) -> None:
    pipeline = register(*hybrid(8, slots))
    assert formed(pipeline) == []
    (refused,) = pipeline.machine.status().refused
    named = dict(refused.error.fields)
    assert (named["field"], named["value"], named["limit"], named["stage"]) == ("state_slots", str(slots), "2", "1")


def test_reform_is_refused_when_a_stage_would_get_recurrent_layers_and_has_no_slots() -> None:
    model = replace(HYBRID, recurrent_layers=(3,))
    pipeline = register(record(0, model=model), record(1, model=model, state_slots=4))
    reform(pipeline, StageShape(0, 0, 2), StageShape(1, 2, 4))
    assert status(pipeline) == ("serving", 2)
    other = replace(HYBRID, recurrent_layers=(2, 3))
    pipeline = register(record(0, model=other), record(1, model=other, state_slots=4))
    reform(pipeline, StageShape(0, 0, 3), StageShape(1, 3, 4))
    (refusal,) = pipeline.of(RefuseReform)
    assert dict(refusal.error.fields)["field"] == "state_slots"
    assert status(pipeline) == ("serving", 1)


def test_join_is_refused_by_name_when_a_daemon_has_other_groups_than_its_band() -> None:
    pipeline = FakePipeline(start=False)
    pipeline.hold = {FormPipeline}
    pipeline.post(LeadershipWon(Epoch(1), pipeline.now))
    for one in hybrid(8, 6):
        pipeline.post(MemberUp(one, pipeline.now))
    (form,) = pipeline.of(FormPipeline)
    plan = form.plans[0]
    reply = JoinReply(plan.fence, plan.key, 10_000, False, (CacheGroup.ATTENTION,), 8, 64, Capacity(1, 9, 0))
    pipeline.post(Joined(plan.key, form.formation, reply, pipeline.now))
    (ended,) = pipeline.of(EndFormation)
    named = dict(ended.cause.fields)
    assert (ended.cause.reason, named["field"], named["value"]) == ("JOIN_REFUSED", "groups", "attention")
    assert (named["limit"], named["address"]) == ("attention recurrent", "host0:1")
    assert pipeline.counter("joins_failed") == 1


@pytest.mark.parametrize(
    ("floor", "pools", "expected"), [(None, (10_000, 9_000), 16), (None, (40, 9_000), 10), (7, (40, 9_000), 7)]
)
def test_headroom_is_left_alone_when_no_floor_is_chosen(
    floor: int | None, pools: tuple[int, int], expected: int
) -> None:
    records = [record(stage, pool_blocks=blocks) for stage, blocks in enumerate(pools)]
    pipeline = register(*records, config=ControllerConfig(wave_tokens=64, floor_blocks=floor))
    (form,) = pipeline.of(FormPipeline)
    assert {plan.floor_blocks for plan in form.plans} == {expected}


# --- two incarnations of one place --------------------------------------------------------------


def test_second_incarnation_waits_visibly_when_the_first_is_healthy_elsewhere() -> None:
    pipeline = FakePipeline()
    pipeline.post(MemberUp(record(1, incarnation=2, address="other:1"), pipeline.now))
    assert formed(pipeline) == [[(0, 1), (1, 1)]]
    (refused,) = pipeline.machine.status().refused
    assert (refused.key.stage, refused.incarnation) == (1, 2)
    assert dict(refused.error.fields)["field"] == "incarnation"


def test_second_incarnation_takes_over_when_the_first_is_lost() -> None:
    pipeline = FakePipeline()
    pipeline.post(MemberUp(record(1, incarnation=2, address="other:1"), pipeline.now))
    pipeline.lose(1)
    pipeline.pass_time(0.2)
    assert formed(pipeline) == [[(0, 1), (1, 1)], [(0, 1), (1, 2)]]
    assert status(pipeline) == ("serving", 2)


def test_later_incarnation_takes_over_at_once_when_it_registers_at_the_same_address() -> None:
    pipeline = FakePipeline()
    pipeline.hold = {SendWave}
    pipeline.submit("a", 1000)
    began = pipeline.now
    pipeline.post(MemberUp(record(1, incarnation=2), pipeline.now))
    assert pipeline.reason("a") == "STAGE_LOST"
    (ended,) = pipeline.of(EndFormation)
    assert (dict(ended.cause.fields)["stage"], dict(ended.cause.fields)["incarnation"]) == ("1", "1")
    assert formed(pipeline) == [[(0, 1), (1, 1)], [(0, 1), (1, 2)]]
    assert (status(pipeline), pipeline.now) == (("serving", 2), began)
    pipeline.hold, pipeline.held = set(), []
    pipeline.submit("b", 40, seed=1)
    assert isinstance(pipeline.outcome("b"), Finished)
    gone(pipeline, 1, incarnation=1)  # the lease of the old life runs out last
    assert status(pipeline) == ("serving", 2)
    assert pipeline.counter("incarnations_replaced") == 1


def test_request_runs_again_on_the_later_incarnation_when_an_attempt_is_left() -> None:
    pipeline = FakePipeline(config=ControllerConfig(wave_tokens=64, attempts=2))
    pipeline.hold = {SendWave}
    pipeline.submit("a", 1000)
    pipeline.hold, pipeline.held = set(), []
    pipeline.post(MemberUp(record(1, incarnation=2), pipeline.now))
    finished = pipeline.outcome("a")
    assert isinstance(finished, Finished)
    assert finished.attempt == 2
    assert pipeline.nothing_held()


def test_later_incarnation_is_asked_when_the_earlier_one_had_not_joined_yet() -> None:
    pipeline = FakePipeline(start=False)
    pipeline.deaf = {1}
    pipeline.start()
    assert status(pipeline) == ("forming", 1)
    pipeline.deaf = set()
    pipeline.post(MemberUp(record(1, incarnation=2), pipeline.now))
    assert formed(pipeline)[1:] == [[(0, 1), (1, 2)]]
    assert status(pipeline) == ("serving", 2)


def test_formation_ends_once_when_the_last_incarnations_of_every_stage_are_replaced_in_turn() -> None:
    pipeline = FakePipeline(stages=3)
    for stage in range(3):
        pipeline.post(MemberUp(record(stage, 3, incarnation=2), pipeline.now))
    assert formed(pipeline)[-1] == [(0, 2), (1, 2), (2, 2)]
    assert status(pipeline) == ("serving", 4)
    assert pipeline.machine.status().refused == ()


def test_nothing_ends_when_the_standing_incarnation_puts_its_record_again() -> None:
    pipeline = FakePipeline()
    pipeline.post(MemberUp(record(1), pipeline.now))
    assert pipeline.of(EndFormation) == []


def test_pipeline_forms_again_when_a_lost_stage_registers_again() -> None:
    pipeline = FakePipeline()
    pipeline.lose(1)
    pipeline.pass_time(1.0)
    assert status(pipeline) == ("broken", 1)
    pipeline.post(MemberUp(record(1, incarnation=2), pipeline.now))
    assert formed(pipeline)[1:] == [[(0, 1), (1, 2)]]
    pipeline.submit("a", 40)
    assert isinstance(pipeline.outcome("a"), Finished)


def test_lost_incarnation_is_left_alone_until_it_must_be_alive_when_it_stays_registered() -> None:
    pipeline = FakePipeline()
    pipeline.lose(1)
    pipeline.pass_time(14.9)
    assert len(formed(pipeline)) == 1
    pipeline.pass_time(0.2)
    assert formed(pipeline)[1:] == [[(0, 1), (1, 1)]]


def test_standing_member_serves_on_when_only_its_registration_is_gone() -> None:
    pipeline = FakePipeline()
    gone(pipeline, 1)
    assert status(pipeline) == ("serving", 1)
    pipeline.submit("a", 40)
    assert isinstance(pipeline.outcome("a"), Finished)
    pipeline.lose(0)  # now that the formation ended, the one that is gone counts no more
    pipeline.post(MemberUp(record(0, incarnation=2), pipeline.now))
    pipeline.pass_time(1.0)
    assert len(formed(pipeline)) == 1
    pipeline.post(MemberUp(record(1), pipeline.now))
    assert formed(pipeline)[1:] == [[(0, 2), (1, 1)]]


def test_member_is_kept_when_it_put_its_record_again() -> None:
    pipeline = FakePipeline()
    gone(pipeline, 1)
    pipeline.post(MemberUp(record(1), pipeline.now))
    pipeline.lose(0)
    pipeline.post(MemberUp(record(0, incarnation=2), pipeline.now))
    assert formed(pipeline)[1:] == [[(0, 2), (1, 1)]]


# --- tries --------------------------------------------------------------------------------------


def test_pipeline_backs_off_and_tries_again_when_a_join_fails() -> None:
    pipeline = FakePipeline(start=False)
    pipeline.hold = {FormPipeline}
    pipeline.start()
    tries = []
    began = pipeline.now
    for _ in range(5):
        (form,) = pipeline.held
        assert isinstance(form, FormPipeline)
        tries.append(round(pipeline.now - began, 2))
        pipeline.held.clear()
        place = form.plans[1].key
        pipeline.post(JoinFailed(place, form.formation, fault("JOIN_REFUSED"), pipeline.now))
        assert pipeline.of(EndFormation)[-1].formation == form.formation
        while not pipeline.held:
            pipeline.pass_time(0.05)
    pauses = [later - earlier for earlier, later in pairwise(tries)]
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8], abs=0.06)
    assert pipeline.counter("joins_failed") == 5


def test_request_waits_no_longer_than_for_a_pipeline_when_every_join_fails() -> None:
    pipeline = FakePipeline(start=False)
    pipeline.hold = {FormPipeline}
    pipeline.start()
    pipeline.submit("a", 40, deadline_ms=120_000)
    for _ in range(700):
        for form in list(pipeline.held):
            assert isinstance(form, FormPipeline)
            pipeline.held.clear()
            key = form.plans[1].key
            pipeline.post(JoinFailed(key, form.formation, fault("JOIN_REFUSED"), pipeline.now))
        if pipeline.machine.live_requests:
            pipeline.pass_time(0.05)
    outcome = pipeline.outcome("a")
    assert isinstance(outcome, Failed)
    assert outcome.error.reason == "PIPELINE_UNAVAILABLE"
    assert outcome.error.message == "pipeline p did not serve within 30000 ms: made-up JOIN_REFUSED"


def test_formation_ends_naming_who_is_late_when_a_join_takes_too_long() -> None:
    config = ControllerConfig(wave_tokens=64, join_deadline_ms=2000)
    pipeline = FakePipeline(config=config, start=False)
    pipeline.deaf = {1}
    pipeline.start()
    pipeline.pass_time(1.9)
    assert pipeline.of(EndFormation) == []  # joining is a grace state: nobody is silent yet
    pipeline.pass_time(0.2)
    (ended,) = pipeline.of(EndFormation)
    assert ended.cause.reason == "FORMATION_ENDED"
    assert dict(ended.cause.fields)["stages"] == "1"


# --- reform -------------------------------------------------------------------------------------


def reform(pipeline: FakePipeline, *shapes: StageShape, **fields: Any) -> None:
    given: dict[str, Any] = {"link": None, "wave_tokens": None} | fields
    pipeline.post(ReformAsked(PIPELINE, shapes, now=pipeline.now, **given))


def test_pipeline_forms_at_once_with_other_bands_when_asked() -> None:
    pipeline = FakePipeline()
    reform(pipeline, StageShape(0, 0, 1, 500), StageShape(1, 1, 4), link=LinkKind.GRPC, wave_tokens=32)
    assert formed(pipeline) == [[(0, 1), (1, 1)]] * 2
    plans = pipeline.of(FormPipeline)[-1].plans
    assert [(p.first_layer, p.last_layer, p.pool_blocks) for p in plans] == [(0, 1, 500), (1, 4, 10_000)]
    assert {(p.link, p.wave_tokens) for p in plans} == {(LinkKind.GRPC, 32)}
    pipeline.submit("a", 40)
    assert [row.length for rows in pipeline.waves() for row in rows] == [32, 8]
    pipeline.lose(1)  # the overrides outlive the formation
    pipeline.post(MemberUp(record(1, incarnation=2), pipeline.now))
    assert pipeline.of(FormPipeline)[-1].plans[1].first_layer == 1


@pytest.mark.parametrize(
    ("shapes", "fields", "field"),
    [
        ([StageShape(0, 0, 1)], {}, "first_layer"),
        ([StageShape(1, 2, 3)], {}, "last_layer"),
        ([StageShape(0, 0, 4), StageShape(1, 4, 4)], {}, "last_layer"),
        ([StageShape(2, 0, 1)], {}, "stage"),
        ([StageShape(0, 0, 1), StageShape(0, 0, 2)], {}, "shapes"),
        ([StageShape(0, pool_blocks=0)], {}, "pool_blocks"),
        ([StageShape(0, pool_blocks=limits.MAX_POOL_BLOCKS + 1)], {}, "pool_blocks"),
        ([StageShape(1, pool_blocks=2**64 - 1)], {}, "pool_blocks"),
        ([], {"wave_tokens": 40}, "wave_tokens"),
        ([], {"wave_tokens": 8}, "wave_tokens"),
    ],
)
def test_reform_is_refused_and_nothing_ends_when_the_shape_does_not_fit(
    shapes: list[StageShape], fields: dict[str, Any], field: str
) -> None:
    pipeline = FakePipeline()
    reform(pipeline, *shapes, **fields)
    (refusal,) = pipeline.of(RefuseReform)
    assert dict(refusal.error.fields)["field"] == field
    assert status(pipeline) == ("serving", 1)


def test_reform_over_nccl_is_refused_by_name_when_a_daemon_is_not_on_cuda() -> None:
    pipeline = FakePipeline()
    pipeline.devices = {0: "cuda:0", 1: "cpu"}
    reform(pipeline)
    reform(pipeline, link=LinkKind.NCCL)
    (refusal,) = pipeline.of(RefuseReform)
    named = dict(refusal.error.fields)
    assert (named["field"], named["value"], named["stage"], named["device"]) == ("link", "nccl", "1", "cpu")
    assert status(pipeline) == ("serving", 2)


def test_reform_over_nccl_forms_when_every_daemon_is_on_cuda() -> None:
    pipeline = FakePipeline()
    pipeline.devices = {0: "cuda:0", 1: "cuda:1"}
    reform(pipeline)
    reform(pipeline, link=LinkKind.NCCL)
    assert status(pipeline) == ("serving", 3)
    assert {plan.link for plan in pipeline.of(FormPipeline)[-1].plans} == {LinkKind.NCCL}


def test_reform_is_refused_when_the_pipeline_is_unknown() -> None:
    pipeline = FakePipeline()
    pipeline.post(ReformAsked(PipelineId("q"), (), None, None, pipeline.now))
    (refusal,) = pipeline.of(RefuseReform)
    assert refusal.error.reason == "UNKNOWN_PIPELINE"


def test_frozen_membership_is_shown_when_the_store_does_not_answer() -> None:
    pipeline = FakePipeline()
    pipeline.post(MembershipFrozen(True, pipeline.now))
    assert pipeline.machine.status().membership_frozen
    pipeline.submit("a", 40)
    assert isinstance(pipeline.outcome("a"), Finished)
