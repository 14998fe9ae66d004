"""Short announcements that wait for the next round to one daemon, and go in front of it.

Owns which announcements may do so, and the parts that wait. A message costs more than the few KB of a short
prompt's hashes, and its acknowledgement as much again: on one stream the order says what the acknowledgement would.
Long prompts are announced on a stream of their own, so that no round ever waits behind them. Called by `daemon_link`.
"""

from __future__ import annotations

from collections.abc import Iterable

from wavepp_proto import limits
from wavepp_proto.terms import HoldKey

SHORT_BYTES = 32 * 1024
"""Hashes and tokens of a prompt that may ride: 7,000 tokens at B = 64 where tokens are needed, else 60,000."""
MOST_BYTES = 512 * 1024
"""Of all that ride in one round: what is longer than its votes take is for the other stream."""


class RidingParts:
    """Announcements by request, oldest first."""

    def __init__(self) -> None:
        self._parts: dict[HoldKey, bytes] = {}
        self._bytes = 0

    def has_room(self, size: int) -> bool:
        return len(self._parts) < limits.MAX_ANNOUNCE_FRAMES and self._bytes + size <= MOST_BYTES

    def put(self, key: HoldKey, part: bytes) -> None:
        """`part`: the only frame of a request, as `convert.announce_part` makes it."""
        self._bytes += len(part) - len(self._parts.get(key, b""))
        self._parts[key] = part

    def take(self, ended: Iterable[HoldKey]) -> list[bytes]:
        """Everything that waits, but for requests that are over before any daemon heard of them."""
        if not self._parts:
            return []
        for key in ended:
            self._parts.pop(key, None)
        taken = list(self._parts.values())
        self._parts.clear()
        self._bytes = 0
        return taken
