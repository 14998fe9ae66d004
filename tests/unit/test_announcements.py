"""Announcements: frames in order, sizes checked, bounds and tombstones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.harness.stage_core import B, StageDriver, join_plan, key, packed_hashes
from wavepp_proto import limits
from wavepp_proto.errors import InvalidRequest, MessageTooLarge, QueueFull, StaleMessage, from_info
from wavepp_proto.hashing import HASH_BYTES
from wavepp_proto.terms import AnnounceFrame, HoldKey, Sampling, TraceContext, VoteOutcome
from wavepp_stage.core import announcements as module
from wavepp_stage.core import events as ev
from wavepp_stage.core.announcements import Announcements
from wavepp_stage.core.machine import StageMachine

TOKENS = list(range(10))


class Stage:
    def __init__(self, most: int = module.MAX_ANNOUNCED) -> None:
        self.held: set[HoldKey] = set()
        self.known = Announcements(self.held.__contains__, most)

    def add(self, *frames: AnnounceFrame) -> list[bool]:
        return [self.known.add(frame, B) for frame in frames]


@pytest.fixture
def stage() -> Stage:
    return Stage()


def whole(name: str = "a", tokens: list[int] = TOKENS) -> AnnounceFrame:
    plan = join_plan()
    return StageDriver(StageMachine(plan.fence.incarnation), plan).frame(name, tokens)


def split(frame: AnnounceFrame, at_block: int, at_token: int) -> tuple[AnnounceFrame, AnnounceFrame]:
    """The same announcement in two frames."""
    first = replace(
        frame,
        block_hashes=frame.block_hashes[: at_block * HASH_BYTES],
        token_ids=frame.token_ids[: at_token * 4],
        last=False,
        sampling=Sampling(seed=3),
        trace=TraceContext("parent"),
    )
    second = replace(
        frame,
        first_block=at_block,
        first_token=at_token,
        block_hashes=frame.block_hashes[at_block * HASH_BYTES :],
        token_ids=frame.token_ids[at_token * 4 :],
    )
    return first, second


@pytest.mark.parametrize(("at_block", "at_token"), [(1, 4), (2, 0), (0, 10), (1, 0), (2, 10)])
def test_announcement_is_whole_when_it_came_in_two_frames(stage: Stage, at_block: int, at_token: int) -> None:
    assert stage.add(*split(whole(), at_block, at_token)) == [False, True]
    known = stage.known.get(key("a"))
    assert known is not None
    assert known.hashes.full.tobytes() == packed_hashes(TOKENS)
    assert known.hashes.shorts.tolist() == np.frombuffer(packed_hashes(TOKENS), "<u8")[::4].tolist()
    assert known.token_ids is not None
    assert known.token_ids.tolist() == TOKENS
    assert (known.prompt_tokens, known.sampling.seed, known.trace.traceparent) == (10, 3, "parent")


def test_announcement_needs_no_tokens_when_the_stage_gets_none(stage: Stage) -> None:
    assert stage.add(replace(whole(), token_ids=b"")) == [True]
    known = stage.known.get(key("a"))
    assert known is not None
    assert known.token_ids is None


def test_announcement_is_acknowledged_again_when_it_is_sent_again(stage: Stage) -> None:
    assert stage.add(whole(), *split(whole(), 1, 4)) == [True, False, True]
    assert len(stage.known) == 1


def test_frames_start_over_when_a_stream_broke_between_them(stage: Stage) -> None:
    first, second = split(whole(), 1, 4)
    assert stage.add(first, first, second) == [False, False, True]
    assert stage.known._bytes == 2 * HASH_BYTES + 40


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"first_block": 1}, "first_block"),
        ({"first_token": 1}, "first_token"),
        ({"block_hashes": packed_hashes(TOKENS)[:HASH_BYTES]}, "block_hashes"),
        ({"block_hashes": packed_hashes(TOKENS)[:-1]}, "frame"),
        ({"token_ids": b"\0" * 36}, "token_ids"),
        ({"token_ids": b"\0" * 44}, "frame"),
        ({"prompt_tokens": 0}, "prompt_tokens"),
        ({"prompt_tokens": limits.MAX_PROMPT_TOKENS + 1}, "prompt_tokens"),
    ],
)
def test_frame_is_refused_by_name_when_a_field_is_wrong(stage: Stage, change: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        stage.add(replace(whole(), **change))  # type: ignore[arg-type]
    assert caught.value.fields["field"] == field
    assert (len(stage.known), stage.known._bytes, stage.known._gathered) == (0, 0, {})
    assert stage.add(whole()) == [True]


def test_frames_so_far_are_dropped_when_a_later_one_is_wrong(stage: Stage) -> None:
    first, second = split(whole(), 1, 4)
    stage.add(first)
    with pytest.raises(InvalidRequest):
        stage.add(replace(second, prompt_tokens=11))
    assert stage.known._bytes == 0
    with pytest.raises(InvalidRequest):
        stage.add(second)
    assert stage.add(first, second) == [False, True]


def test_frames_are_ignored_up_to_the_last_when_an_earlier_one_was_refused(stage: Stage) -> None:
    first, second = split(whole(), 1, 4)
    middle = replace(second, block_hashes=b"", token_ids=second.token_ids[:8], last=False)
    with pytest.raises(InvalidRequest):
        stage.add(replace(first, block_hashes=b"short"))
    assert stage.add(middle, second) == [False, False]  # told once
    with pytest.raises(InvalidRequest):
        stage.add(second)  # the matter is closed: this is a new announcement, without its beginning
    assert stage.known._refused == {}


def test_refused_announcement_is_taken_when_it_starts_afresh(stage: Stage) -> None:
    first, second = split(whole(), 1, 4)
    with pytest.raises(InvalidRequest):
        stage.add(replace(first, block_hashes=b"short"))
    assert stage.add(first, second) == [False, True]
    stage.known.check()


def test_frames_behind_a_refusal_vanish_when_their_request_is_cancelled(stage: Stage) -> None:
    first, second = split(whole(), 1, 4)
    with pytest.raises(InvalidRequest):
        stage.add(replace(first, block_hashes=b"short"))
    stage.known.forget(key("a"))
    stage.known.check()
    assert stage.add(first, second) == [False, False]


def test_refused_keys_are_bounded_when_refusals_storm(stage: Stage) -> None:
    first = replace(split(whole(), 1, 4)[0], block_hashes=b"short")
    for index in range(limits.MAX_TOMBSTONES + 100):
        with pytest.raises(InvalidRequest):
            stage.add(replace(first, key=key(str(index))))
    assert len(stage.known._refused) == limits.MAX_TOMBSTONES
    stage.known.check()


def test_frame_is_refused_when_it_exceeds_the_wire_limit(stage: Stage) -> None:
    with pytest.raises(MessageTooLarge):
        stage.add(replace(whole(), token_ids=bytes(limits.FRAME_BYTES + 4), prompt_tokens=1 << 20))


def test_oldest_request_that_holds_nothing_makes_room_when_the_count_is_full() -> None:
    stage = Stage(most=3)
    stage.held.add(key("a"))
    stage.add(*(whole(name) for name in "abcd"))
    assert stage.known.keys() == (key("a"), key("c"), key("d"))
    stage.held |= {key("c"), key("d")}
    with pytest.raises(QueueFull):
        stage.add(whole("e"))


def test_bytes_are_bounded_when_prompts_are_long(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 2 * HASH_BYTES + 40
    monkeypatch.setattr(module, "MAX_ANNOUNCED_BYTES", 2 * size + 10)
    stage.add(*(whole(name) for name in "abc"))
    assert stage.known.keys() == (key("b"), key("c"))
    assert stage.known._bytes == 2 * size


def test_bytes_return_to_zero_when_everything_is_forgotten(stage: Stage) -> None:
    stage.add(whole("a"), *split(whole("b"), 1, 4))
    stage.add(split(whole("c"), 1, 4)[0])
    for name in "abc":
        stage.known.forget(key(name))
    assert (len(stage.known), stage.known._bytes, stage.known._gathered) == (0, 0, {})


def test_rest_of_the_frames_vanishes_when_the_cancel_came_between_them(stage: Stage) -> None:
    first, second = split(whole(), 1, 4)
    stage.add(first)
    stage.known.forget(key("a"))
    assert stage.add(second, first, second) == [False, False, False]
    assert len(stage.known) == 0


def test_second_copy_vanishes_when_its_request_is_over(stage: Stage) -> None:
    """field bug 40, the other way round: it was known, and is announced again behind its release."""
    stage.add(whole())
    stage.known.forget(key("a"))
    assert stage.add(whole(), *split(whole(), 1, 4)) == [False, False, False]
    assert (len(stage.known), stage.known._bytes) == (0, 0)


def test_tombstones_are_bounded_when_cancels_storm(stage: Stage) -> None:
    for index in range(limits.MAX_TOMBSTONES + 100):
        stage.known.forget(key(str(index)))
    assert len(stage.known._tombstones) == limits.MAX_TOMBSTONES
    assert stage.add(whole("99"), whole("100")) == [True, False]


def test_only_its_own_request_fails_when_an_announcement_is_refused() -> None:
    """The stream goes on: others are acknowledged, and may be prepared."""
    stage = StageDriver.joined()
    first, second = split(stage.frame("a", TOKENS), 1, 4)
    wrong = stage.one(ev.Announced(replace(first, first_block=1), 0.0), ev.SendAck).ack
    assert (wrong.key, wrong.refused and wrong.refused.reason) == (key("a"), "INVALID_REQUEST")
    assert stage.post(ev.Announced(second, 0.0)) == []
    assert stage.one(ev.Announced(stage.frame("b", TOKENS), 0.0), ev.SendAck).ack.refused is None
    assert stage.prepare(key("a")).outcome is VoteOutcome.NOT_ANNOUNCED
    assert stage.prepare(key("b")).outcome is VoteOutcome.COMMITTED


@pytest.mark.parametrize(("most", "most_bytes"), [(1, module.MAX_ANNOUNCED_BYTES), (module.MAX_ANNOUNCED, 110)])
def test_refusal_may_be_tried_again_when_the_stage_is_full(
    monkeypatch: pytest.MonkeyPatch, most: int, most_bytes: int
) -> None:
    monkeypatch.setattr(module, "MAX_ANNOUNCED_BYTES", most_bytes)
    plan = join_plan()
    stage = StageDriver.joined(plan, StageMachine(plan.fence.incarnation, most_announced=most))
    a = stage.announce("a", TOKENS)
    stage.prepare(a)
    refused = stage.one(ev.Announced(stage.frame("b", TOKENS), 0.0), ev.SendAck).ack.refused
    assert refused is not None
    assert refused.reason == "QUEUE_FULL"
    assert from_info(refused).retryable
    stage.release(a, ended=True)
    assert stage.one(ev.Announced(stage.frame("b", TOKENS), 0.0), ev.SendAck).ack.refused is None


def test_announcement_is_stale_and_not_refused_when_its_fence_is_old() -> None:
    stage = StageDriver.joined()
    frame = stage.frame("a", TOKENS)
    stage.rejoin(join_plan(formation=2))
    with pytest.raises(StaleMessage):
        stage.post(ev.Announced(frame, 0.0))
