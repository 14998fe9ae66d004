"""What the stages of a pipeline must have alike: walked field by field, refused by name, part of every block's hash."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from tests.harness.fake_pipeline import BLOCK, PIPELINE, FakePipeline, record, tokens
from wavepp_controller.core.config import ControllerConfig
from wavepp_controller.core.events import DigestExcess, FormPipeline, LeadershipWon, MemberGone, MemberUp, WatchAgain
from wavepp_controller.core.members import AGREED
from wavepp_controller.core.verdicts import PipelineFacts
from wavepp_proto.hashing import HashScope, hash_blocks
from wavepp_proto.terms import (
    DaemonKey,
    Epoch,
    Failed,
    Incarnation,
    JoinReply,
    LinkKind,
    MemberRecord,
    ModelFacts,
    Numerics,
    StageIndex,
)
from wavepp_stage.engine.base import EngineFacts, EngineTraits

BF16 = Numerics("bfloat16", 576, "", "torch 2.9.1, transformers 5.1.0")
PARTS = {"model": ModelFacts, "numerics": Numerics}
"""Fields of a record that are records themselves."""
OTHER: dict[str, Any] = {
    "engine": "torch",
    "stages": 3,
    "ranks": 2,
    "block_tokens": 32,
    "layers": 6,
    "recurrent_layers": (3,),
    "vocabulary": 1001,
    "window": 99_999,
    "hidden": 577,
    "dtype": "float16",
    "quantization": "fp8",
    "packages": "torch 2.9.1, transformers 5.2.0",
    "fingerprint": "f2",
}
"""By name of AGREED: a value that stage 0 does not have."""
FREE = {
    "cluster": "part of the key under which it is watched",
    "key": "its own place",
    "incarnation": "its own life",
    "address": "its own",
    "link_address": "its own, and what the link is chosen by",
    "model": "field by field",
    "name": "how the operator of that host wrote the folder",
    "path": "where that host keeps it",
    "first_layer": "its own band; bands must tile the layers",
    "last_layer": "its own band; bands must tile the layers",
    "pool_blocks": "pools differ",
    "host_pool_blocks": "pools differ",
    "protocol": "compared with the controller's own",
    "groups": "follows from band and recurrent layers",
    "pid": "its own",
    "version": "of the package: `protocol` says which messages fit, `packages` whose arithmetic it is",
    "state_slots": "pools differ",
    "engine_load": "what of it differs is loaded again",
    "gpu": "its own, and what the link is chosen by",
    "numerics": "field by field",
    "adapters": "requests that name one are refused unless all have it",
}
"""Fields that may differ from stage to stage, each with the reason."""


def members(*records: MemberRecord, link: LinkKind | None = None) -> FakePipeline:
    pipeline = FakePipeline(start=False, config=ControllerConfig(link=link, wave_tokens=64, floor_blocks=0))
    pipeline.post(LeadershipWon(Epoch(1), pipeline.now))
    for one in records:
        pipeline.post(MemberUp(one, pipeline.now))
    return pipeline


def changed(base: MemberRecord, name: str) -> MemberRecord:
    for part, kind in PARTS.items():
        if name in {field.name for field in fields(kind)}:
            return replace(base, **{part: replace(getattr(base, part), **{name: OTHER[name]})})
    return replace(base, **{name: OTHER[name]})


def bf16(stage: int, **changes: Any) -> MemberRecord:
    return record(stage, **{"numerics": BF16, **changes})


# --- the walk -----------------------------------------------------------------------------------


def test_every_field_of_a_record_is_compared_or_may_differ_for_a_reason() -> None:
    known = {field.name for kind in (MemberRecord, *PARTS.values()) for field in fields(kind)}
    assert known == {*AGREED, *FREE}
    assert not AGREED.keys() & FREE.keys()
    assert AGREED.keys() == OTHER.keys()


def test_every_fact_of_a_loaded_engine_is_compared_or_may_differ_for_a_reason() -> None:
    compared = {"hidden", "loaded_layers", "groups"}
    free = {"bytes_per_block", "bytes_per_state", "device"}  # of a band as long as the stage's, on a device of its own
    assert {field.name for field in fields(EngineFacts)} == compared | free | {"wave_allowance_s"}
    reply = {field.name for field in fields(JoinReply)}
    answers = {"fence", "key", "pool_blocks", "host_pool_blocks", "state_slots", "capacity", "needs_tokens"}
    assert reply == compared | free | answers | {"engine_load", "wave_allowance_ms"}


def test_every_trait_of_an_engine_belongs_to_its_kind_or_is_in_the_record() -> None:
    of_its_kind = {"cache_thread", "needs_tokens", "eager_escrow", "collective"}
    assert {field.name for field in fields(EngineTraits)} == of_its_kind | {"adapters"}


@pytest.mark.parametrize("name", AGREED)
def test_stage_is_refused_by_name_when_it_differs_in_what_must_agree(name: str) -> None:
    pipeline = members(bf16(0), changed(bf16(1), name))
    assert pipeline.of(FormPipeline) == []
    (refused,) = pipeline.machine.status().refused
    told = dict(refused.error.fields)
    assert (refused.error.reason, refused.key.stage) == ("JOIN_REFUSED", 1)
    assert told["field"] == {"fingerprint": "model"}.get(name, name)
    assert (told["address"], told["other_stage"], told["other_address"]) == ("host1:1", "0", "host0:1")
    assert told["value"] in refused.error.message
    assert told["limit"] in refused.error.message


# --- dtype --------------------------------------------------------------------------------------


@pytest.mark.parametrize("link", [LinkKind.GLOO, LinkKind.GRPC])
@pytest.mark.parametrize("dtype", ["float16", "float32", ""])
def test_nothing_forms_when_dtypes_differ_and_a_waiting_client_learns_why(link: LinkKind, dtype: str) -> None:
    pipeline = members(bf16(0), bf16(1, numerics=replace(BF16, dtype=dtype)), link=link)
    pipeline.submit("a", 100)
    pipeline.pass_time(31.0)
    assert pipeline.of(FormPipeline) == []
    outcome = pipeline.outcome("a")
    assert isinstance(outcome, Failed)
    shown = dtype or "unknown"
    assert outcome.error.reason == "JOIN_REFUSED"  # not retryable
    assert outcome.error.message == (
        "pipeline p did not serve within 30000 ms: "
        f"stage 1 of p at host1:1: dtype is {shown}, stage 0 at host0:1 has bfloat16"
    )
    told = dict(outcome.error.fields)
    assert (told["field"], told["value"], told["limit"]) == ("dtype", shown, "bfloat16")
    assert (told["pipeline"], told["missing_stages"]) == ("p", "1")


def test_pipeline_forms_and_serves_the_waiting_when_the_stage_comes_back_alike() -> None:
    pipeline = members(bf16(0), bf16(1, numerics=replace(BF16, dtype="float16")))
    pipeline.submit("a", 100)
    pipeline.post(MemberGone(DaemonKey(PIPELINE, StageIndex(1)), Incarnation(1), pipeline.now))
    pipeline.post(MemberUp(bf16(1, incarnation=2), pipeline.now))
    assert len(pipeline.of(FormPipeline)) == 1
    assert pipeline.machine.status().refused == ()
    assert not isinstance(pipeline.outcome("a"), Failed)


def test_last_fault_is_the_refusal_while_it_is_the_reason_that_nothing_forms() -> None:
    pipeline = members(bf16(0), bf16(1))
    pipeline.lose(1)
    pipeline.post(MemberUp(bf16(1, incarnation=2, numerics=replace(BF16, dtype="float16")), pipeline.now))
    (status,) = pipeline.machine.status().pipelines
    assert status.last_fault is not None
    told = dict(status.last_fault.fields)
    assert (status.state, status.last_fault.reason, told["field"], told["address"]) == (
        "broken", "JOIN_REFUSED", "dtype", "host1:1",
    )  # fmt: skip
    pipeline.post(MemberUp(bf16(1, incarnation=3), pipeline.now))
    (status,) = pipeline.machine.status().pipelines
    assert status.last_fault is not None
    assert (status.state, status.last_fault.reason) == ("serving", "STAGE_LOST")


@pytest.mark.parametrize("field", [field.name for field in fields(Numerics)])
def test_block_hashes_differ_when_what_is_computed_differs(field: str) -> None:
    facts, other = (PipelineFacts.of([one]) for one in (bf16(0), changed(bf16(0), field)))
    assert facts.layout != other.layout
    assert facts.layout.startswith("B16 dtype='bfloat16'")


def test_queued_request_is_not_served_by_another_dtype_than_it_was_hashed_for() -> None:
    pipeline = members(bf16(0))
    pipeline.submit("a", 100)
    pipeline.post(MemberGone(DaemonKey(PIPELINE, StageIndex(0)), Incarnation(1), pipeline.now))
    float16 = replace(BF16, dtype="float16")
    for stage in (0, 1):
        pipeline.post(MemberUp(record(stage, incarnation=2, numerics=float16), pipeline.now))
    outcome = pipeline.outcome("a")
    assert isinstance(outcome, Failed)
    assert (outcome.error.reason, dict(outcome.error.fields)["field"]) == ("PIPELINE_UNAVAILABLE", "layout")


# --- what was loaded ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("made", "field", "value", "limit"),
    [({"hidden": 9}, "hidden", "9", "8"), ({"loaded_layers": (2,)}, "loaded_layers", "2:3 (1)", "2:4")],
)
def test_join_is_refused_by_name_when_what_was_loaded_does_not_fit(
    made: dict[str, Any], field: str, value: str, limit: str
) -> None:
    pipeline = FakePipeline(start=False)
    pipeline.made[1] = made
    pipeline.start()
    fault = pipeline.machine.status().pipelines[0].last_fault
    assert fault is not None
    named = dict(fault.fields)
    assert (fault.reason, named["field"], named["value"], named["limit"]) == ("JOIN_REFUSED", field, value, limit)
    assert (named["address"], pipeline.counter("joins_failed")) == ("host1:1", 1)


def test_index_counts_what_a_stage_made_when_its_pool_is_larger_than_planned() -> None:
    """The stage counted as empty for ever, and was asked for a snapshot every second."""
    pipeline = FakePipeline(start=False, members=[record(stage, pool_blocks=10) for stage in (0, 1)])
    pipeline.made[1] = {"pool_blocks": 11, "host_pool_blocks": 3}
    pipeline.start()
    hashes = hash_blocks(HashScope("f1", f"B{BLOCK}"), tokens(14 * BLOCK), BLOCK)
    pipeline.digest(0, hashes, blocks=10)
    pipeline.digest(1, hashes, blocks=14)
    pipeline.pass_time(5.0)
    first, second = pipeline.machine.status().pipelines[0].daemons
    assert [(one.digest_in_sync, one.indexed_blocks) for one in (first, second)] == [(True, 10), (True, 14)]
    assert (second.pool_blocks, second.host_pool_blocks) == (11, 3)
    assert (pipeline.counter("digest_resyncs"), pipeline.of(WatchAgain)) == (0, [])


def test_digest_of_more_than_a_stage_made_is_told_with_numbers_and_asked_for_ever_later() -> None:
    pipeline = FakePipeline(members=[record(stage, pool_blocks=10) for stage in (0, 1)])
    hashes = hash_blocks(HashScope("f1", f"B{BLOCK}"), tokens(14 * BLOCK), BLOCK)
    pipeline.digest(0, hashes, blocks=10)
    asked = []
    for _ in range(4):
        pipeline.digest(1, hashes, blocks=12)
        before = len(pipeline.of(WatchAgain))
        since = pipeline.now
        while len(pipeline.of(WatchAgain)) == before:
            pipeline.pass_time(0.05)
        asked.append(round(pipeline.now - since))
    key = DaemonKey(PIPELINE, StageIndex(1))
    assert asked == [1, 2, 4, 8]
    assert pipeline.of(DigestExcess) == [DigestExcess(key, 12, 10)] * 4
    assert pipeline.counter("digest_excesses") == 4
    pipeline.digest(1, hashes, blocks=10)  # a snapshot that fits is taken
    assert [one.indexed_blocks for one in pipeline.machine.status().pipelines[0].daemons] == [10, 10]


# --- adapters -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "taken"), [(True, True, True), (True, False, False), (False, False, False)]
)
def test_adapter_is_refused_by_name_unless_every_engine_applies_adapters(
    first: bool, second: bool, taken: bool
) -> None:
    pipeline = members(record(0, adapters=first), record(1, adapters=second))
    pipeline.submit("a", 100, adapter="legal")
    outcome = pipeline.outcome("a")
    if taken:
        assert not isinstance(outcome, Failed)
        return
    assert isinstance(outcome, Failed)
    told = dict(outcome.error.fields)
    assert (outcome.error.reason, told["field"], told["value"]) == ("INVALID_REQUEST", "adapter", "legal")
