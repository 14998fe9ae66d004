"""Limits that must agree with each other, or a peer finds out in production."""

from __future__ import annotations

from dataclasses import replace

from wavepp_proto import convert, limits, terms
from wavepp_proto.runtime import channels, etcd_client, membership

FENCE = terms.Fence(terms.Epoch(2**63), terms.Formation(2**63), terms.Incarnation(2**63), 2**63)
KEY = terms.HoldKey(terms.RequestId("\U0001f30a" * limits.MAX_REQUEST_ID_CHARS), terms.Attempt(2**32 - 1))


def test_client_pings_less_often_than_the_server_allows_when_idle() -> None:
    assert limits.SERVER_MIN_PING_INTERVAL_MS < limits.CLIENT_KEEPALIVE_TIME_MS
    assert limits.CLIENT_KEEPALIVE_TIMEOUT_MS <= limits.CLIENT_KEEPALIVE_TIME_MS
    channels.check_keepalive(limits.CHANNEL_OPTIONS, limits.SERVER_OPTIONS)


def test_both_ends_allow_the_same_message_when_they_send() -> None:
    for options in (dict(limits.CHANNEL_OPTIONS), dict(limits.SERVER_OPTIONS)):
        assert options["grpc.max_send_message_length"] == limits.MAX_MESSAGE_BYTES
        assert options["grpc.max_receive_message_length"] == limits.MAX_MESSAGE_BYTES


def test_silence_spans_several_beats_when_a_daemon_is_healthy() -> None:
    assert limits.SILENCE_MS >= 4 * limits.HEARTBEAT_MS
    assert limits.SILENCE_MS < 2000  # lost, fenced and answered in less than 2 s
    assert limits.ROUND_DEADLINE_MS < limits.SILENCE_MS


def test_time_limits_nest_when_one_waits_for_another() -> None:
    assert limits.CAPACITY_RETRY_MS < limits.ROUND_DEADLINE_MS <= limits.CALL_DEADLINE_MS
    assert limits.DEFAULT_DEADLINE_MS <= limits.MAX_DEADLINE_MS
    assert limits.PIPELINE_WAIT_MS < limits.DEFAULT_DEADLINE_MS
    assert limits.SILENCE_MS < limits.WAVE_TIMEOUT_MS
    assert limits.CONTROLLER_ABSENCE_MS < limits.PIPELINE_WAIT_MS < limits.DEFAULT_DEADLINE_MS
    assert limits.MIN_PRIORITY == -limits.MAX_PRIORITY


def test_silent_connection_to_etcd_is_found_while_a_request_still_waits() -> None:
    """A listing comes due and its call goes unanswered; or a ping does. The rest of the wait is for forming."""
    found_ms = limits.RELIST_MS + limits.STORE_CALL_MS
    pinged_ms = limits.ETCD_KEEPALIVE_TIME_MS + limits.ETCD_KEEPALIVE_TIMEOUT_MS
    assert max(found_ms, pinged_ms) + limits.FORMING_MS < limits.PIPELINE_WAIT_MS
    assert (membership.RELIST_S, etcd_client.CALL_TIMEOUT_S) == (limits.RELIST_MS / 1e3, limits.STORE_CALL_MS / 1e3)


def test_bitmap_holds_every_lane_when_a_wave_is_full() -> None:
    assert limits.MAX_LANES == 128
    assert limits.MAX_LANES <= 8 * 16


def test_frames_hold_whole_hashes_and_tokens_when_full() -> None:
    assert limits.FRAME_BYTES % 32 == 0
    assert 8 * limits.MAX_DIGEST_HASHES <= limits.FRAME_BYTES
    assert 8 * limits.DIGEST_BACKLOG_HASHES <= limits.FRAME_BYTES


def test_largest_frames_fit_one_message_when_serialised() -> None:
    sampling = terms.Sampling(1.5, 2**64 - 1, limits.MAX_TOP_LOGPROBS, True)
    names = "\U0001f30a" * limits.MAX_NAME_CHARS
    request = terms.PrefillRequest(
        KEY.request_id, b"\0" * limits.FRAME_BYTES, terms.PipelineId(names), limits.MAX_DEADLINE_MS, 9, names, names,
        sampling,
    )  # fmt: skip
    assert convert.run_request_to_pb(request).ByteSize() <= limits.MAX_MESSAGE_BYTES
    (frame,) = convert.announce_frames(FENCE, KEY, limits.MAX_PROMPT_TOKENS, b"\1" * limits.FRAME_BYTES, b"", sampling)
    assert convert.announce_frame_to_pb(frame).ByteSize() <= limits.MAX_MESSAGE_BYTES


def test_full_logits_fit_one_message_when_the_vocabulary_is_the_largest() -> None:
    top = (terms.TokenLogprob(2**32 - 1, -1.0),) * limits.MAX_TOP_LOGPROBS
    result = terms.RowResult(127, 2**32 - 1, top, b"\1" * 4 * limits.MAX_VOCABULARY)
    report = terms.WaveReport(FENCE, True, 2**128 - 1, b"h" * 32, terms.StageTimes(), (result,))
    assert convert.wave_response_to_pb(report).ByteSize() <= limits.MAX_MESSAGE_BYTES
    assert convert.wave_response_from_pb(convert.wave_response_to_pb(report)) == report


def test_fullest_round_and_wave_fit_one_message_when_names_are_longest() -> None:
    prepares = (terms.Prepare(KEY, limits.MAX_PROMPT_TOKENS),) * limits.MAX_ROUND_ENTRIES
    round_ = terms.Round(FENCE, 2**32 - 1, (terms.Release(KEY, terms.WaveOrdinal(2**63)),) * 1024, (), prepares)
    assert convert.round_to_pb(round_).ByteSize() <= limits.MAX_MESSAGE_BYTES
    rows = (replace(terms.Row(KEY, limits.MAX_PROMPT_TOKENS - 1, 1), final=True),) * limits.MAX_LANES
    assert convert.wave_request_to_pb(terms.WaveCommand(FENCE, rows)).ByteSize() <= limits.MAX_MESSAGE_BYTES
