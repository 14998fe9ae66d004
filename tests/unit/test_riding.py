"""Announcements that go in front of the next round, instead of on a stream of their own."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from tests.conformance.test_serving import B, oracle, prompt
from tests.harness.cluster import Cluster
from tests.harness.fake_pipeline import FakePipeline
from tests.harness.stage_core import join_plan
from wavepp_controller.core.events import AnnounceRequest, AnnounceRides, SendRound
from wavepp_controller.core.riding import MOST_BYTES, Riding, may_ride
from wavepp_proto import convert, limits
from wavepp_proto.errors import InvalidRequest
from wavepp_proto.terms import AnnounceFrame, Attempt, HoldKey, Prepare, RequestId, Round
from wavepp_proto.v1 import admission_pb2 as pb

PLAN = join_plan()


def key(name: str, attempt: int = 1) -> HoldKey:
    return HoldKey(RequestId(name), Attempt(attempt))


def part(name: str) -> bytes:
    return convert.announce_part(AnnounceFrame(PLAN.fence, key(name), 40, 0, bytes(32), 0, bytes(160), True))


def round_with(*names: str) -> pb.Round:
    round_ = Round(replace(PLAN.fence, ordinal=7), 1000, prepares=(Prepare(key("a"), 32),))
    return pb.Round.FromString(
        convert.round_message(round_.fence, convert.round_body(round_), [part(name) for name in names])
    )


def test_parts_leave_with_one_round_when_several_wait() -> None:
    riders = Riding[bytes]()
    riders.put(key("a"), b"1", 1)
    riders.put(key("b"), b"2", 1)
    assert riders.take([]) == [b"1", b"2"]
    assert riders.take([]) == []


def test_part_is_dropped_when_its_request_is_released_before_it_left() -> None:
    riders = Riding[bytes]()
    riders.put(key("a"), b"1", 1)
    riders.put(key("b"), b"2", 1)
    assert riders.take([key("a"), key("never announced")]) == [b"2"]


@pytest.mark.parametrize(("count", "size"), [(limits.MAX_ANNOUNCE_FRAMES, 1), (8, MOST_BYTES // 8)])
def test_no_more_parts_are_taken_when_a_round_would_carry_too_much(count: int, size: int) -> None:
    riders = Riding[bytes]()
    for number in range(count):
        assert riders.has_room(size)
        riders.put(key(str(number)), b"", size)
    assert not riders.has_room(1)
    riders.take([])
    assert riders.has_room(MOST_BYTES)


def test_round_carries_its_announcements_when_it_crosses_the_wire() -> None:
    message = round_with("a", "b")
    assert convert.round_from_pb(message).prepares == (Prepare(key("a"), 32),)
    frames = convert.round_announces_from_pb(message)
    assert [frame.key for frame in frames] == [key("a"), key("b")]
    assert {frame.fence for frame in frames} == {replace(PLAN.fence, ordinal=7)}
    assert all(len(frame.token_ids) == 160 and frame.last for frame in frames)


def test_round_is_refused_when_it_announces_too_much() -> None:
    names = [str(number) for number in range(limits.MAX_ANNOUNCE_FRAMES + 1)]
    with pytest.raises(InvalidRequest) as refused:
        convert.round_announces_from_pb(round_with(*names))
    assert (refused.value.fields["value"], refused.value.fields["limit"]) == ("33", "32")


def test_request_is_prepared_without_acknowledgements_when_its_announcement_rides() -> None:
    pipeline = FakePipeline(stages=2)
    pipeline.hold = {AnnounceRequest, SendRound}
    pipeline.submit("a", 40)
    (announced,) = pipeline.of(AnnounceRequest)
    assert pipeline.of(SendRound) == []
    pipeline.post(AnnounceRides(announced.key, tuple(target for target, *_ in announced.targets), pipeline.now))
    assert [[p.key for p in sent.round.prepares] for sent in pipeline.of(SendRound)] == [[announced.key]] * 2


def test_nothing_happens_when_what_rides_is_about_an_earlier_attempt_or_a_request_that_ended() -> None:
    pipeline = FakePipeline(stages=1)
    pipeline.hold = {AnnounceRequest}
    pipeline.submit("a", 40)
    (announced,) = pipeline.of(AnnounceRequest)
    targets = tuple(target for target, *_ in announced.targets)
    pipeline.post(AnnounceRides(key("a", attempt=2), targets, pipeline.now))
    pipeline.post(AnnounceRides(key("gone"), targets, pipeline.now))
    assert pipeline.of(SendRound) == []


async def test_short_prompts_ride_and_long_ones_do_not_when_a_cluster_serves_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("wavepp_controller.runtime.dispatch.may_ride", partial(may_ride, short_bytes=4 * B))
    written = 0
    plain = convert.announce_message

    def counted(*arguments: object) -> bytes:
        nonlocal written
        written += 1
        return plain(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(convert, "announce_message", counted)
    async with Cluster(stages=2) as cluster:
        short, long = prompt(B // 2, 1), prompt(8 * B, 2)
        assert (await cluster.client.prefill(short)).first_token == oracle(short)
        assert written == 0
        assert (await cluster.client.prefill(long)).first_token == oracle(long)
        assert written == 2


async def test_request_is_announced_again_when_what_rode_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = Riding.take
    monkeypatch.setattr(Riding, "take", lambda self, ended: taken(self, ended)[:0])
    async with Cluster(stages=2) as cluster:
        tokens = prompt(40, 1)
        result = await cluster.client.prefill(tokens)
        assert result.first_token == oracle(tokens)
        assert result.attempt == 2
        assert cluster.controller.machine.status().counters["not_announced"] == 1
