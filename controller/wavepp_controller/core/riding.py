"""Short announcements that wait for the next round to one daemon, and go in front of it.

Owns which announcements may do so, and what waits of them; pure, so that every shell of the core rides alike. A
message costs more than the few KB of a short prompt's hashes, and its acknowledgement as much again: on one stream
the order says what the acknowledgement would. Long prompts are announced on a stream of their own, so that no round
ever waits behind them. Called by shells, the core itself hears only `AnnounceRides`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from wavepp_controller.core.events import AnnounceRequest
from wavepp_proto import limits
from wavepp_proto.terms import HoldKey

Part = TypeVar("Part")
"""The only frame of a request, as a shell sends it."""

SHORT_BYTES = 32 * 1024
"""Hashes and tokens of a prompt that may ride: 7,000 tokens at B = 64 where tokens are needed, else 60,000."""
MOST_BYTES = 512 * 1024
"""Of all that ride in one round: what is longer than its votes take is for the other stream."""


class Riding(Generic[Part]):
    """Announcements to one daemon by request, oldest first.

    It outlives broken streams: the core counts on what rides as if it had been acknowledged."""

    def __init__(self) -> None:
        self._parts: dict[HoldKey, tuple[Part, int]] = {}
        self._bytes = 0

    def has_room(self, size: int) -> bool:
        return len(self._parts) < limits.MAX_ANNOUNCE_FRAMES and self._bytes + size <= MOST_BYTES

    def put(self, key: HoldKey, part: Part, size: int) -> None:
        """`size`: bytes of `part`."""
        _, before = self._parts.get(key, (None, 0))
        self._bytes += size - before
        self._parts[key] = part, size

    def take(self, ended: Iterable[HoldKey]) -> list[Part]:
        """Everything that waits, but for requests that are over before any daemon heard of them."""
        if not self._parts:
            return []
        for key in ended:
            self._parts.pop(key, None)
        taken = [part for part, _ in self._parts.values()]
        self._parts.clear()
        self._bytes = 0
        return taken


def sizes(action: AnnounceRequest) -> list[int]:
    """Bytes that each target of an announcement is told: hashes, and tokens where it needs them."""
    hashes, tokens = len(action.block_hashes), len(action.request.token_ids)
    return [hashes + with_tokens * tokens for *_, with_tokens in action.targets]


def may_ride(action: AnnounceRequest, riding: Iterable[Riding[Part] | None], short_bytes: int = SHORT_BYTES) -> bool:
    """Whether an announcement waits for the next round: it is short, and every target takes it along.

    `riding` by target, None where streams are not open. What was refused or lost while riding is told on its own
    stream: whatever is not a first attempt."""
    short = len(action.block_hashes) + len(action.request.token_ids) <= short_bytes
    return (
        short
        and action.key.attempt == 1
        and all(one is not None and one.has_room(size) for one, size in zip(riding, sizes(action), strict=True))
    )
