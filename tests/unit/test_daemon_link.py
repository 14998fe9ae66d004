"""What the controller's link to a daemon writes on its announcement stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.harness.stage_core import join_plan
from wavepp_controller.runtime import daemon_link
from wavepp_controller.runtime.daemon_link import DaemonLink
from wavepp_proto import convert, limits
from wavepp_proto.runtime.channels import PLAIN_CLIENT
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
    link = DaemonLink(PLAN, "127.0.0.1:1", PLAIN_CLIENT, lambda event: None)
    try:
        link.announce([part("a"), part("b")])
        link.announce([part("c")])
        messages = link._announcements()
        assert names(await anext(messages)) == ["a", "b", "c"]
    finally:
        await link.close()


async def test_announcements_are_parted_when_one_message_would_hold_too_much() -> None:
    link = DaemonLink(PLAN, "127.0.0.1:1", PLAIN_CLIENT, lambda event: None)
    whole_frame = limits.FRAME_BYTES // 32
    try:
        link.announce([part("long", whole_frame), *(part(str(number)) for number in range(40))])
        messages = link._announcements()
        sizes = [len(names(await anext(messages))) for _ in range(3)]
        assert sizes == [1, limits.MAX_ANNOUNCE_FRAMES, 40 - limits.MAX_ANNOUNCE_FRAMES]
    finally:
        await link.close()


async def test_announcement_waits_for_company_when_one_has_just_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_link, "GATHER_S", 0.05)
    link = DaemonLink(PLAN, "127.0.0.1:1", PLAIN_CLIENT, lambda event: None)
    try:
        messages = link._announcements()
        link.announce([part("a")])
        assert names(await anext(messages)) == ["a"]
        following = asyncio.create_task(_next(messages))
        await asyncio.sleep(0)
        link.announce([part("b")])
        await asyncio.sleep(0)
        link.announce([part("c")])
        assert names(await following) == ["b", "c"]
    finally:
        await link.close()
