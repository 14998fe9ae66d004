"""What the controller writes on an announcement stream: several announcements in a message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.harness.stage_core import join_plan
from wavepp_controller.runtime import announcing
from wavepp_controller.runtime.announcing import AnnounceQueue
from wavepp_proto import convert, limits
from wavepp_proto.terms import AnnounceFrame, Attempt, HoldKey, RequestId
from wavepp_proto.v1 import admission_pb2

PLAN = join_plan()


def part(name: str, hashes: int = 1) -> bytes:
    key = HoldKey(RequestId(name), Attempt(1))
    return convert.announce_part(AnnounceFrame(PLAN.fence, key, 40_000, 0, bytes(32 * hashes), 0, b"", True))


def names(message: bytes) -> list[str]:
    frames = convert.announce_frames_from_pb(admission_pb2.AnnounceRequest.FromString(message))
    assert {frame.fence for frame in frames} == {PLAN.fence}
    return [frame.key.request_id for frame in frames]


async def _next(messages: AsyncIterator[bytes]) -> bytes:
    return await anext(messages)


async def test_announcements_go_together_when_they_queued_up() -> None:
    queue = AnnounceQueue(PLAN.fence)
    queue.put([part("a"), part("b")])
    queue.put([part("c")])
    assert names(await anext(queue.messages())) == ["a", "b", "c"]


async def test_announcements_are_parted_when_one_message_would_hold_too_much() -> None:
    queue = AnnounceQueue(PLAN.fence)
    whole_frame = limits.FRAME_BYTES // 32
    queue.put([part("long", whole_frame), *(part(str(number)) for number in range(40))])
    messages = queue.messages()
    sizes = [len(names(await anext(messages))) for _ in range(3)]
    assert sizes == [1, limits.MAX_ANNOUNCE_FRAMES, 40 - limits.MAX_ANNOUNCE_FRAMES]


async def test_announcement_waits_for_company_when_one_has_just_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcing, "GATHER_S", 0.05)
    queue = AnnounceQueue(PLAN.fence)
    messages = queue.messages()
    queue.put([part("a")])
    assert names(await anext(messages)) == ["a"]
    following = asyncio.create_task(_next(messages))
    await asyncio.sleep(0)
    queue.put([part("b")])
    await asyncio.sleep(0)
    queue.put([part("c")])
    assert names(await following) == ["b", "c"]
