"""Announcements on their way to one daemon, several in a message.

Owns what waits to be written on one Announce stream, and how much goes together: a message costs more
than the frames in it. Called by `daemon_link`, one per opening of the stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from wavepp_proto import convert, limits
from wavepp_proto.terms import Fence

GATHER_S = 0.004
"""Time to the next message, for each frame in the last: the denser they come, the more go together."""
MOST_GATHERS = 4
"""So no announcement waits longer than 16 ms, and the first after a pause leaves at once."""


class AnnounceQueue:
    """Frames in, messages out."""

    def __init__(self, fence: Fence) -> None:
        self._fence = fence
        self._parts: asyncio.Queue[bytes] = asyncio.Queue()

    def put(self, parts: Sequence[bytes]) -> None:
        """Frames of one request, as `convert.announce_part` makes them."""
        for part in parts:
            self._parts.put_nowait(part)

    async def messages(self) -> AsyncIterator[bytes]:
        """Serialised AnnounceRequests without end, each with what queued up since the one before."""
        while True:
            parts = [await self._parts.get()]
            size = len(parts[0])
            while size < limits.FRAME_BYTES and len(parts) < limits.MAX_ANNOUNCE_FRAMES and self._parts.qsize():
                parts.append(self._parts.get_nowait())
                size += len(parts[-1])
            yield convert.announce_message(self._fence, parts)
            if self._parts.empty():
                await asyncio.sleep(GATHER_S * min(len(parts), MOST_GATHERS))
