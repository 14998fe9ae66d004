"""Collects what a MemberWatch tells, in a task of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from wavepp_proto.runtime.membership import MemberChange, MemberGone, MemberUp, MemberWatch
from wavepp_proto.runtime.store import MembershipStore

RELIST_S = 0.3
"""Short, so that tests need not wait for a listing that is due."""


class Seen:
    """`changes` grows in order; `story` is the same as short words: `up 0/1` = stage 0, incarnation 1."""

    def __init__(self, watch: MemberWatch) -> None:
        self.watch = watch
        self.changes: list[MemberChange] = []

    @property
    def story(self) -> list[str]:
        return [_word(change) for change in self.changes]


@contextlib.asynccontextmanager
async def watching(store: MembershipStore, cluster: str = "test", relist_s: float = RELIST_S) -> AsyncIterator[Seen]:
    """A running watch over `cluster`."""
    seen = Seen(MemberWatch(store, cluster, relist_s=relist_s))

    async def collect() -> None:
        async for change in seen.watch.changes():
            seen.changes.append(change)

    task = asyncio.create_task(collect(), name="collect-members")
    try:
        yield seen
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _word(change: MemberChange) -> str:
    if isinstance(change, MemberUp):
        return f"up {change.record.key.stage}/{change.record.incarnation}"
    assert isinstance(change, MemberGone)
    return f"gone {change.key.stage}/{change.incarnation}"
