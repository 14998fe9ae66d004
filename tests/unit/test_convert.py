"""What convert refuses, by field, value and limit; absent against zero; prompts put together from frames."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from wavepp_proto import convert, errors, limits, terms
from wavepp_proto.v1 import admission_pb2, common_pb2, control_pb2, digest_pb2, execution_pb2, prefill_pb2

FENCE = terms.Fence(terms.Epoch(1), terms.Formation(2), terms.Incarnation(3), 4)
KEY = terms.HoldKey(terms.RequestId("r"), terms.Attempt(1))
ROOM = terms.Capacity(seq=1, free_blocks=2, evictable_blocks=3)
REQUEST = terms.PrefillRequest(terms.RequestId("r"), b"\1\0\0\0" * 5)
B16 = b"\0" * 16


def refused(call: Callable[[], object], kind: type[errors.WaveppError] = errors.InvalidRequest) -> dict[str, str]:
    """Fields of the error that `call` must raise, of exactly this kind."""
    with pytest.raises(errors.WaveppError) as caught:
        call()
    assert type(caught.value) is kind
    return caught.value.fields


# --- absent and zero ----------------------------------------------------------------------------


def test_absent_differs_from_zero_when_a_field_is_optional() -> None:
    zero = convert.round_to_pb(terms.Round(FENCE, 1, releases=(terms.Release(KEY, terms.WaveOrdinal(0)),)))
    none = convert.round_to_pb(terms.Round(FENCE, 1, releases=(terms.Release(KEY, None),)))
    assert convert.round_from_pb(zero).releases[0].after_wave == 0
    assert convert.round_from_pb(none).releases[0].after_wave is None
    beat = convert.wave_response_to_pb(terms.Heartbeat(FENCE, 1, terms.WaveOrdinal(0)))
    assert convert.wave_response_from_pb(beat) == terms.Heartbeat(FENCE, 1, terms.WaveOrdinal(0))


def test_empty_values_are_present_when_they_were_sent() -> None:
    zero = terms.Fence(terms.Epoch(0), terms.Formation(0), terms.Incarnation(0))
    sent = admission_pb2.Round.FromString(convert.round_to_pb(terms.Round(zero, 0)).SerializeToString())
    assert convert.round_from_pb(sent).fence == zero


# --- malformed messages -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        lambda: convert.round_from_pb(admission_pb2.Round()),
        lambda: convert.votes_from_pb(admission_pb2.Votes()),
        lambda: convert.announce_frame_from_pb(admission_pb2.AnnounceRequest()),
        lambda: convert.announce_ack_from_pb(admission_pb2.AnnounceResponse()),
        lambda: convert.inventory_from_pb(admission_pb2.InventoryResponse()),
        lambda: convert.watch_digest_from_pb(digest_pb2.WatchDigestRequest()),
        lambda: convert.wave_request_from_pb(execution_pb2.WaveRequest()),
        lambda: convert.wave_response_from_pb(execution_pb2.WaveResponse()),
    ],
)
def test_message_is_refused_when_it_has_no_fence(call: Callable[[], object]) -> None:
    assert refused(call) == {"field": "fence"}


def test_round_is_refused_when_it_holds_too_many_entries() -> None:
    prepares = (terms.Prepare(KEY, 0),) * limits.MAX_ROUND_ENTRIES
    full = terms.Round(FENCE, 1, releases=(terms.Release(KEY),) * 100, prepares=prepares)
    assert convert.round_from_pb(convert.round_to_pb(full)) == full
    over = terms.Round(FENCE, 1, revises=(terms.Revise(KEY, 0),), prepares=prepares)
    assert refused(lambda: convert.round_from_pb(convert.round_to_pb(over))) == {
        "field": "round entries",
        "value": "33",
        "limit": "32",
    }


@pytest.mark.parametrize(
    ("key", "field"),
    [
        (common_pb2.HoldKey(attempt=1), "request_id"),
        (common_pb2.HoldKey(request_id="x" * 129, attempt=1), "request_id"),
        (common_pb2.HoldKey(request_id="x"), "attempt"),
    ],
)
def test_hold_key_is_refused_when_it_names_nothing(key: common_pb2.HoldKey, field: str) -> None:
    assert refused(lambda: convert.hold_key_from_pb(key))["field"] == field


def test_enum_is_refused_when_its_number_is_unknown() -> None:
    votes = convert.votes_to_pb(terms.Votes(FENCE, (terms.Vote(KEY, terms.VoteOutcome.LOWER, 0, 0),), ROOM))
    for number in (0, 99):
        votes.votes[0].outcome = number  # type: ignore[assignment]
        fields = refused(lambda: convert.votes_from_pb(votes))
        assert (fields["field"], fields["value"]) == ("outcome", str(number))


def digest_with(**group: Any) -> digest_pb2.Digest:
    entry = digest_pb2.GroupDigest(group=common_pb2.CACHE_GROUP_ATTENTION, **group)
    room = convert.capacity_to_pb(ROOM)
    return digest_pb2.Digest(kind=digest_pb2.DIGEST_KIND_DELTA, groups=[entry], capacity=room)


def test_digest_is_refused_when_its_packing_is_broken() -> None:
    assert refused(lambda: convert.digest_from_pb(digest_with(added=b"1234567"))) == {
        "field": "added",
        "value": "7",
        "limit": "8",
    }
    assert refused(lambda: convert.digest_from_pb(digest_with(removed=b"1" * 9)))["field"] == "removed"


def test_digest_may_exceed_a_page_but_not_a_frame_when_a_subtree_drops() -> None:
    more_than_a_page = digest_with(removed=b"\1" * 8 * (limits.MAX_DIGEST_HASHES + 1))
    assert len(convert.digest_from_pb(more_than_a_page).groups[0].removed) == 8200
    too_large = digest_with(added=b"\1" * 8, removed=b"\1" * limits.FRAME_BYTES)
    assert refused(lambda: convert.digest_from_pb(too_large), errors.MessageTooLarge)["field"] == "digest"


def test_announce_frame_is_refused_when_counts_pass_the_prompt() -> None:
    def frame(**changed: Any) -> admission_pb2.AnnounceRequest:
        whole = terms.AnnounceFrame(FENCE, KEY, 3, 0, b"h" * 32, 0, b"\1\0\0\0" * 3, True)
        out = convert.announce_frame_to_pb(whole)
        for name, value in changed.items():
            setattr(out, name, value)
        return out

    assert convert.announce_frame_from_pb(frame()).token_ids == b"\1\0\0\0" * 3
    assert refused(lambda: convert.announce_frame_from_pb(frame(block_hashes=b"h" * 33)))["limit"] == "32"
    assert refused(lambda: convert.announce_frame_from_pb(frame(token_ids=b"12345")))["limit"] == "4"
    assert refused(lambda: convert.announce_frame_from_pb(frame(first_token=1)))["field"] == "token_ids"
    assert refused(lambda: convert.announce_frame_from_pb(frame(first_block=3)))["field"] == "block_hashes"
    assert refused(lambda: convert.announce_frame_from_pb(frame(prompt_tokens=0)))["field"] == "prompt_tokens"
    huge = frame(token_ids=b"\0" * (limits.FRAME_BYTES + 4))
    assert refused(lambda: convert.announce_frame_from_pb(huge), errors.MessageTooLarge)["field"] == "announce frame"


def test_announcements_are_refused_when_more_come_than_one_message_may_hold() -> None:
    part = convert.announce_part(terms.AnnounceFrame(FENCE, KEY, 3, 0, b"", 0, b"", True))
    limit = limits.MAX_ANNOUNCE_FRAMES

    def message(parts: int) -> admission_pb2.AnnounceRequest:
        return admission_pb2.AnnounceRequest.FromString(convert.announce_message(FENCE, [part] * parts))

    assert len(convert.announce_frames_from_pb(message(limit))) == limit
    assert refused(lambda: convert.announce_frames_from_pb(message(limit + 1)))["limit"] == str(limit)
    ack = convert.announce_ack_to_pb(terms.AnnounceAck(FENCE, KEY, (KEY,) * limit))
    assert refused(lambda: convert.announce_ack_from_pb(ack))["value"] == str(limit + 1)


def test_wave_is_refused_when_its_rows_break_a_rule() -> None:
    def wave(*rows: terms.Row) -> execution_pb2.WaveRequest:
        return convert.wave_request_to_pb(terms.WaveCommand(FENCE, rows))

    good = terms.Row(KEY, 0, 4)
    assert refused(lambda: convert.wave_request_from_pb(wave()))["field"] == "rows"
    assert refused(lambda: convert.wave_request_from_pb(wave(*[good] * 129)))["limit"] == "128"
    assert refused(lambda: convert.wave_request_from_pb(wave(terms.Row(KEY, 4, 0))))["field"] == "length"
    outside = terms.Row(KEY, 4, 4, snapshots=(4,))
    assert refused(lambda: convert.wave_request_from_pb(wave(outside)))["field"] == "snapshots"
    no_body = execution_pb2.WaveRequest(fence=convert.fence_to_pb(FENCE))
    assert refused(lambda: convert.wave_request_from_pb(no_body)) == {"field": "body"}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"void_bitmap": b"\0" * 15}, "void_bitmap"),
        ({"void_bitmap": B16, "running_hash": b"short"}, "running_hash"),
        ({"void_bitmap": B16, "results": [execution_pb2.RowResult(row=128)]}, "row"),
        ({"void_bitmap": B16, "results": [execution_pb2.RowResult(logits=b"123")]}, "logits"),
        ({"void_bitmap": B16, "faults": [execution_pb2.RowFault(row=200)]}, "row"),
        ({"void_bitmap": B16, "results": [execution_pb2.RowResult()] * 129}, "results"),
    ],
)
def test_report_is_refused_when_a_part_has_another_size(change: dict[str, Any], field: str) -> None:
    report = execution_pb2.WaveReport(**change)
    response = execution_pb2.WaveResponse(fence=convert.fence_to_pb(FENCE), report=report)
    assert refused(lambda: convert.wave_response_from_pb(response))["field"] == field


JOIN = terms.JoinPlan(
    fence=FENCE, key=terms.DaemonKey(terms.PipelineId("p"), terms.StageIndex(1)), stages=2, ranks=1,
    model_fingerprint="f", first_layer=2, last_layer=4, block_tokens=16, pool_blocks=8, host_pool_blocks=0,
    floor_blocks=0, wave_tokens=64, lanes=4, link=terms.LinkKind.GRPC, link_store="", peers=(), deadline_ms=1000,
)  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stages", 0),
        ("stages", limits.MAX_STAGES + 1),
        ("ranks", 0),
        ("ranks", limits.MAX_RANKS + 1),
        ("last_layer", 2),
        ("block_tokens", 0),
        ("block_tokens", limits.MAX_BLOCK_TOKENS + 1),
        ("pool_blocks", 0),
        ("floor_blocks", 9),
        ("wave_tokens", 0),
        ("lanes", 129),
        ("heartbeat_ms", 0),
        ("silence_ms", 250),
    ],
)
def test_join_is_refused_when_no_pipeline_could_have_the_field(field: str, value: int) -> None:
    message = convert.join_plan_to_pb(JOIN)
    assert convert.join_plan_from_pb(message) == JOIN
    setattr(message, field, value)
    assert refused(lambda: convert.join_plan_from_pb(message))["field"] == field


def test_join_is_refused_when_its_stage_is_outside_the_pipeline() -> None:
    message = convert.join_plan_to_pb(JOIN)
    message.key.stage = 2
    assert refused(lambda: convert.join_plan_from_pb(message)) == {"field": "key.stage", "value": "2", "limit": "1"}


def test_join_is_refused_when_its_rank_is_outside_the_stage() -> None:
    message = convert.join_plan_to_pb(JOIN)
    message.key.rank = 1
    assert refused(lambda: convert.join_plan_from_pb(message)) == {"field": "key.rank", "value": "1", "limit": "0"}


@pytest.mark.parametrize(
    ("field", "limit"),
    [("pool_blocks", limits.MAX_POOL_BLOCKS), ("host_pool_blocks", limits.MAX_POOL_BLOCKS),
     ("state_slots", limits.MAX_STATE_SLOTS)],
)  # fmt: skip
def test_answer_to_a_join_is_refused_when_no_stage_could_have_made_so_much(field: str, limit: int) -> None:
    message = convert.join_reply_to_pb(
        terms.JoinReply(FENCE, JOIN.key, 8, False, JOIN.groups, 0, 64, terms.Capacity(1, 8, 0))
    )
    assert convert.join_reply_from_pb(message).host_pool_blocks is None  # an older daemon does not say
    setattr(message, field, limit)
    assert getattr(convert.join_reply_from_pb(message), field) == limit
    setattr(message, field, limit + 1)
    refusal = refused(lambda: convert.join_reply_from_pb(message))
    assert refusal == {"field": field, "value": str(limit + 1), "limit": str(limit)}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"message": "x" * (limits.MAX_REFUSAL_CHARS + 1)}, "error.message"),
        ({"reason": "x" * 257}, "error.reason"),
        ({"fields": {"a": "x" * 257}}, "error.fields"),
        ({"fields": {"x" * 257: "a"}}, "error.fields"),
        ({"fields": {str(number): "" for number in range(limits.MAX_REFUSAL_FIELDS + 1)}}, "error.fields"),
    ],
)
def test_refusal_of_a_stage_is_not_taken_when_it_is_more_than_a_line(change: dict[str, Any], field: str) -> None:
    error = terms.ErrorInfo("JOIN_REFUSED", "m" * limits.MAX_REFUSAL_CHARS, (("field", "dtype"),))
    for told in (error, None):
        assert convert.refuse_from_pb(convert.refuse_to_pb(FENCE, told)) == (FENCE, told)
    message = control_pb2.RefuseRequest(fence=convert.fence_to_pb(FENCE), error=common_pb2.Error(**change))
    assert refused(lambda: convert.refuse_from_pb(message))["field"] == field


# --- prompts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"request_id": ""}, "request_id"),
        ({"request_id": "x" * 129}, "request_id"),
        ({"pipeline": ""}, "pipeline"),
        ({"pipeline": "p" * 257}, "pipeline"),
        ({"deadline_ms": -1}, "deadline_ms"),
        ({"deadline_ms": limits.MAX_DEADLINE_MS + 1}, "deadline_ms"),
        ({"priority": 10}, "priority"),
        ({"priority": -10}, "priority"),
        ({"cache_salt": "s" * 257}, "cache_salt"),
        ({"adapter": "a" * 257}, "adapter"),
        ({"token_ids": b"12345"}, "token_ids"),
        ({"sampling": terms.Sampling(temperature=-0.1)}, "temperature"),
        ({"sampling": terms.Sampling(temperature=float("nan"))}, "temperature"),
        ({"sampling": terms.Sampling(temperature=float("inf"))}, "temperature"),
        ({"sampling": terms.Sampling(seed=-1)}, "seed"),
        ({"sampling": terms.Sampling(seed=2**64)}, "seed"),
        ({"sampling": terms.Sampling(top_logprobs=65)}, "top_logprobs"),
    ],
)
def test_request_is_refused_before_the_first_frame_when_a_field_breaks_a_rule(
    change: dict[str, Any], field: str
) -> None:
    request = replace(REQUEST, **change)
    assert refused(lambda: next(convert.submit_frames(request)))["field"] == field
    assert refused(lambda: convert.run_request_to_pb(request))["field"] == field


def test_prompt_is_refused_by_its_own_class_when_empty_or_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = replace(REQUEST, token_ids=b"")
    assert refused(lambda: convert.check_request(empty), errors.EmptyPrompt)["field"] == "prompt_tokens"
    monkeypatch.setattr(limits, "MAX_PROMPT_TOKENS", 4)
    assert refused(lambda: convert.check_request(REQUEST), errors.PromptTooLong) == {
        "field": "prompt_tokens",
        "value": "5",
        "limit": "4",
    }


def header(**changed: Any) -> prefill_pb2.PrefillHeader:
    out = convert.prefill_header_to_pb(REQUEST)
    for name, value in changed.items():
        setattr(out, name, value)
    return out


@pytest.mark.parametrize(
    ("changed", "kind", "field"),
    [
        ({"prompt_tokens": 0}, errors.EmptyPrompt, "prompt_tokens"),
        ({"prompt_tokens": 2**40}, errors.PromptTooLong, "prompt_tokens"),
        ({"deadline_ms": -5}, errors.InvalidRequest, "deadline_ms"),
        ({"priority": 99}, errors.InvalidRequest, "priority"),
        ({"request_id": ""}, errors.InvalidRequest, "request_id"),
    ],
)
def test_header_is_refused_when_a_peer_skips_the_checks(
    changed: dict[str, Any], kind: type[errors.WaveppError], field: str
) -> None:
    frame = prefill_pb2.SubmitRequest(header=header(**changed), token_ids=b"\0" * 20, last=True)
    assert refused(lambda: convert.PromptAssembler().add(frame), kind)["field"] == field


def test_assembler_keeps_no_byte_when_more_comes_than_the_header_says() -> None:
    assembler = convert.PromptAssembler()
    assert assembler.add(prefill_pb2.SubmitRequest(header=header(), token_ids=b"\0" * 16)) is None
    more = prefill_pb2.SubmitRequest(token_ids=b"\0" * 8)
    assert refused(lambda: assembler.add(more)) == {"field": "prompt_tokens", "value": "6", "limit": "5"}


def test_assembler_refuses_when_less_came_than_the_header_says() -> None:
    short = prefill_pb2.SubmitRequest(header=header(), token_ids=b"\0" * 16, last=True)
    fields = refused(lambda: convert.PromptAssembler().add(short))
    assert fields == {"field": "prompt_tokens", "value": "4", "limit": "5"}


def test_assembler_refuses_when_frames_are_out_of_form() -> None:
    assembler = convert.PromptAssembler()
    headless = prefill_pb2.SubmitRequest(token_ids=b"\0" * 4)
    assert refused(lambda: assembler.add(headless)) == {"field": "header"}
    assembler.add(prefill_pb2.SubmitRequest(header=header()))
    assert refused(lambda: assembler.add(prefill_pb2.SubmitRequest(header=header())))["field"] == "header"
    odd = prefill_pb2.SubmitRequest(token_ids=b"\0" * 3)
    assert refused(lambda: assembler.add(odd)) == {"field": "token_ids", "value": "3", "limit": "4"}
    large = prefill_pb2.SubmitRequest(token_ids=b"\0" * (limits.FRAME_BYTES + 4))
    assert refused(lambda: assembler.add(large), errors.MessageTooLarge)["field"] == "token_ids"


def test_run_is_refused_when_the_prompt_needs_frames() -> None:
    long = replace(REQUEST, token_ids=b"\0" * (limits.FRAME_BYTES + 4))
    assert refused(lambda: convert.run_request_to_pb(long), errors.MessageTooLarge)["field"] == "token_ids"


def test_event_is_refused_when_its_kind_is_unknown() -> None:
    assert refused(lambda: convert.prefill_event_from_pb(prefill_pb2.PrefillEvent(request_id="r"))) == {
        "field": "event"
    }


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_logprob_is_refused_when_it_is_not_finite(value: float) -> None:
    """It would be printed as JSON, which has no words for it."""
    result = terms.RowResult(0, 1, (terms.TokenLogprob(1, value),))
    report = terms.WaveReport(FENCE, True, 0, bytes(32), terms.StageTimes(), (result,))
    message = convert.wave_response_to_pb(report)
    assert refused(lambda: convert.wave_response_from_pb(message))["field"] == "logprob"
