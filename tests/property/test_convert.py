"""Every term of the wire survives serialisation, field for field, whatever its values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from google.protobuf.message import DecodeError, Message
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness.wire_terms import (
    ACK,
    ANNOUNCE,
    CAPACITY,
    COMMAND,
    DAEMON_KEY,
    DIGEST,
    ERROR,
    EVENT,
    FENCE,
    HEARTBEAT,
    HOLD_KEY,
    INVENTORY,
    REPLY,
    REPORT,
    REQUEST,
    ROUND,
    SAMPLING,
    TIMES,
    TIMINGS,
    TRACE,
    U64,
    VOTES,
    join_plan,
    optional,
)
from wavepp_proto import convert, errors, limits, terms
from wavepp_proto.v1 import admission_pb2, common_pb2, control_pb2, digest_pb2, execution_pb2, prefill_pb2

Pair = tuple[st.SearchStrategy[Any], Callable[[Any], Message], Callable[[Any], Any], type[Message]]
PAIRS: dict[str, Pair] = {
    "fence": (FENCE, convert.fence_to_pb, convert.fence_from_pb, common_pb2.Fence),
    "daemon_key": (DAEMON_KEY, convert.daemon_key_to_pb, convert.daemon_key_from_pb, common_pb2.DaemonKey),
    "hold_key": (HOLD_KEY, convert.hold_key_to_pb, convert.hold_key_from_pb, common_pb2.HoldKey),
    "trace": (TRACE, convert.trace_to_pb, convert.trace_from_pb, common_pb2.TraceContext),
    "sampling": (SAMPLING, convert.sampling_to_pb, convert.sampling_from_pb, common_pb2.Sampling),
    "error": (ERROR, convert.error_to_pb, convert.error_from_pb, common_pb2.Error),
    "capacity": (CAPACITY, convert.capacity_to_pb, convert.capacity_from_pb, common_pb2.Capacity),
    "stage_times": (TIMES, convert.stage_times_to_pb, convert.stage_times_from_pb, common_pb2.StageTimes),
    "timings": (TIMINGS, convert.timings_to_pb, convert.timings_from_pb, prefill_pb2.Timings),
    "prefill_event": (EVENT, convert.prefill_event_to_pb, convert.prefill_event_from_pb, prefill_pb2.PrefillEvent),
    "run_request": (REQUEST, convert.run_request_to_pb, convert.run_request_from_pb, prefill_pb2.RunRequest),
    "announce_frame": (
        ANNOUNCE,
        convert.announce_frame_to_pb,
        convert.announce_frame_from_pb,
        admission_pb2.AnnounceRequest,
    ),
    "announce_ack": (ACK, convert.announce_ack_to_pb, convert.announce_ack_from_pb, admission_pb2.AnnounceResponse),
    "round": (ROUND, convert.round_to_pb, convert.round_from_pb, admission_pb2.Round),
    "votes": (VOTES, convert.votes_to_pb, convert.votes_from_pb, admission_pb2.Votes),
    "inventory_request": (
        FENCE,
        convert.inventory_request_to_pb,
        convert.inventory_request_from_pb,
        admission_pb2.InventoryRequest,
    ),
    "inventory": (INVENTORY, convert.inventory_to_pb, convert.inventory_from_pb, admission_pb2.InventoryResponse),
    "digest": (DIGEST, convert.digest_to_pb, convert.digest_from_pb, digest_pb2.Digest),
    "wave_request": (
        COMMAND | HEARTBEAT,
        convert.wave_request_to_pb,
        convert.wave_request_from_pb,
        execution_pb2.WaveRequest,
    ),
    "wave_response": (
        REPORT | HEARTBEAT,
        convert.wave_response_to_pb,
        convert.wave_response_from_pb,
        execution_pb2.WaveResponse,
    ),
    "join_plan": (join_plan(), convert.join_plan_to_pb, convert.join_plan_from_pb, control_pb2.JoinRequest),
    "join_reply": (REPLY, convert.join_reply_to_pb, convert.join_reply_from_pb, control_pb2.JoinResponse),
    "watch_digest": (
        st.tuples(FENCE, U64),
        lambda pair: convert.watch_digest_to_pb(*pair),
        convert.watch_digest_from_pb,
        digest_pb2.WatchDigestRequest,
    ),
    "end_formation": (
        st.tuples(FENCE, optional(ERROR)),
        lambda pair: convert.end_formation_to_pb(*pair),
        convert.end_formation_from_pb,
        control_pb2.EndFormationRequest,
    ),
    "drain_stage": (
        st.tuples(FENCE, U64),
        lambda pair: convert.drain_stage_to_pb(*pair),
        convert.drain_stage_from_pb,
        control_pb2.DrainStageRequest,
    ),
}


def over_the_wire(message: Message) -> Message:
    return type(message).FromString(message.SerializeToString())


@pytest.mark.parametrize("name", PAIRS)
@settings(max_examples=30)
@given(data=st.data())
def test_term_is_the_same_when_it_crossed_the_wire(name: str, data: st.DataObject) -> None:
    strategy, to_pb, from_pb, _ = PAIRS[name]
    term = data.draw(strategy)
    assert from_pb(over_the_wire(to_pb(term))) == term


@settings(max_examples=40)
@given(request=REQUEST, tokens=st.integers(1, 40), frame=st.integers(1, 9))
def test_prompt_is_the_same_when_it_came_in_frames(request: terms.PrefillRequest, tokens: int, frame: int) -> None:
    whole = replace(request, token_ids=bytes(range(4 * tokens)))
    assembler = convert.PromptAssembler()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "FRAME_BYTES", 4 * frame)
        results = [assembler.add(type(pb).FromString(pb.SerializeToString())) for pb in convert.submit_frames(whole)]
    assert results[:-1] == [None] * (len(results) - 1)
    assert results[-1] == whole
    assert assembler.header == replace(whole, token_ids=b"")


@settings(max_examples=40)
@given(blocks=st.integers(0, 9), tokens=st.integers(0, 60), frame=st.integers(1, 4), fence=FENCE)
def test_announcement_is_whole_and_small_when_it_came_in_frames(
    blocks: int, tokens: int, frame: int, fence: terms.Fence
) -> None:
    hashes, ids = bytes(range(blocks)) * 32, bytes(range(tokens)) * 4
    key, fence = terms.HoldKey(terms.RequestId("r"), terms.Attempt(1)), replace(fence, ordinal=7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "FRAME_BYTES", 32 * frame)
        frames = list(convert.announce_frames(fence, key, 1000, hashes, ids))
        assert all(len(item.block_hashes) + len(item.token_ids) <= 32 * frame for item in frames)
    assert b"".join(item.block_hashes for item in frames) == hashes
    assert b"".join(item.token_ids for item in frames) == ids
    assert [item.last for item in frames] == [False] * (len(frames) - 1) + [True]
    assert [item.fence.ordinal for item in frames] == list(range(7, 7 + len(frames)))
    hash_at = token_at = 0
    for item in frames:
        assert (item.first_block * 32, item.first_token * 4) == (hash_at, token_at)
        hash_at, token_at = hash_at + len(item.block_hashes), token_at + len(item.token_ids)


@given(st.lists(ANNOUNCE, min_size=1, max_size=5), FENCE)
def test_frames_come_in_order_under_one_fence_when_sent_together(
    frames: list[terms.AnnounceFrame], fence: terms.Fence
) -> None:
    data = convert.announce_message(fence, [convert.announce_part(frame) for frame in frames])
    message = admission_pb2.AnnounceRequest.FromString(data)
    assert convert.announce_frames_from_pb(message) == tuple(replace(frame, fence=fence) for frame in frames)


@st.composite
def damaged(draw: st.DrawFn, name: str) -> bytes:
    """A valid message with a few bytes changed, or cut short: most of these still parse."""
    strategy, to_pb, _, _ = PAIRS[name]
    raw = bytearray(to_pb(draw(strategy)).SerializeToString())
    for _ in range(draw(st.integers(1, 4)) if raw else 0):
        raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    return bytes(raw[: draw(st.integers(0, len(raw)))] if draw(st.booleans()) else raw)


@pytest.mark.parametrize("name", PAIRS)
@settings(max_examples=60)
@given(data=st.data())
def test_damaged_message_is_a_term_or_a_typed_refusal_when_it_parses(name: str, data: st.DataObject) -> None:
    _, _, from_pb, message_type = PAIRS[name]
    try:
        message = message_type.FromString(data.draw(damaged(name)))
    except DecodeError:
        return
    with contextlib.suppress(errors.InvalidRequest):
        from_pb(message)
