"""What the controller told this stage about requests, ahead of their rounds.

Owns frames being gathered, complete announcements, the keys whose frames are refused, and tombstones
of requests that are over: their announcement may still be on its way. Bounded in count and bytes: a
newcomer displaces the oldest request that holds nothing, and is refused when there is none. Does not
own holds (block_cache.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from wavepp_proto import limits
from wavepp_proto.errors import InternalError, InvalidRequest, MessageTooLarge, QueueFull, WaveppError
from wavepp_proto.hashing import HASH_BYTES, TOKEN_BYTES, full_blocks
from wavepp_proto.terms import AnnounceFrame, HoldKey, Sampling, TraceContext
from wavepp_stage.core.block_hashes import BlockHashes

MAX_ANNOUNCED = 2 * limits.MAX_QUEUED_REQUESTS
"""Requests described at once, gathered ones included: the queue and what is admitted."""
MAX_ANNOUNCED_BYTES = 8 * limits.MAX_QUEUED_TOKENS
"""Tokens, and their hashes at B >= 8 (512 MiB)."""


@dataclass(frozen=True, slots=True, eq=False)
class Announcement:
    """A request as this stage knows it."""

    key: HoldKey
    prompt_tokens: int
    hashes: BlockHashes
    """Of every full block of the prompt."""
    token_ids: npt.NDArray[np.int32] | None
    """Shape [prompt_tokens], or None on stages that get no tokens."""
    sampling: Sampling
    trace: TraceContext
    size: int
    """Bytes, for the bound."""


@dataclass(slots=True)
class _Gathered:
    """Frames so far of one request."""

    first: AnnounceFrame
    hashes: bytearray = field(default_factory=bytearray)
    tokens: bytearray = field(default_factory=bytearray)

    @property
    def size(self) -> int:
        return len(self.hashes) + len(self.tokens)


class Announcements:
    """Complete announcements by hold key, oldest first."""

    def __init__(self, is_held: Callable[[HoldKey], bool], most: int = MAX_ANNOUNCED) -> None:
        """`most` requests are described at once."""
        self._is_held = is_held
        self._most = most
        self._gathered: dict[HoldKey, _Gathered] = {}
        self._complete: dict[HoldKey, Announcement] = {}
        self._refused: dict[HoldKey, None] = {}
        """Refused in a frame that was not the last: what follows of it tells nothing new. Bounded."""
        self._tombstones: dict[HoldKey, None] = {}
        """Requests that are over here. Bounded: the oldest go first, as the controller forgets ids."""
        self._bytes = 0

    def get(self, key: HoldKey) -> Announcement | None:
        return self._complete.get(key)

    def __len__(self) -> int:
        return len(self._complete)

    def keys(self) -> tuple[HoldKey, ...]:
        return tuple(self._complete)

    def add(self, frame: AnnounceFrame, block_tokens: int) -> bool:
        """Take a frame; True once the request is complete (again, if it was already).

        The first frame sent again starts over. Frames of a cancelled request vanish, and those behind a
        refused one up to the last. Raises InvalidRequest, MessageTooLarge or QueueFull: the request is
        refused, and the frames so far are forgotten."""
        if frame.key in self._tombstones or self._is_refused(frame):
            return False
        if frame.key in self._complete:
            return frame.last
        try:
            gathered = self._gather(frame)
            if frame.last:
                self._finish(gathered, frame, block_tokens)
        except WaveppError:
            self._drop_gathered(frame.key)
            if not frame.last:
                _remember(self._refused, frame.key)
            raise
        return frame.last

    def _is_refused(self, frame: AnnounceFrame) -> bool:
        """True for frames behind a refused one; its last frame, or a fresh start, closes the matter."""
        if frame.key not in self._refused:
            return False
        fresh = not frame.first_block and not frame.first_token
        if fresh or frame.last:
            del self._refused[frame.key]
        return not fresh

    def forget(self, key: HoldKey) -> None:
        """The request is over here: a copy of its announcement that comes later finds a tombstone."""
        known = self._complete.pop(key, None)
        if known is not None:
            self._bytes -= known.size
        self._drop_gathered(key)
        self._refused.pop(key, None)
        _remember(self._tombstones, key)

    def clear(self) -> None:
        """A formation ended: nothing that was announced in it is mentioned again."""
        self._gathered.clear()
        self._complete.clear()
        self._refused.clear()
        self._tombstones.clear()
        self._bytes = 0

    def check(self) -> None:
        """Verify bounds and counts; raises InternalError."""
        size = sum(known.size for known in self._complete.values()) + sum(part.size for part in self._gathered.values())
        if size != self._bytes:
            raise InternalError(
                "announced bytes are the sum over requests", field="bytes", value=self._bytes, limit=size
            )
        over = self._tombstones.keys() & (self._complete.keys() | self._gathered.keys() | self._refused.keys())
        if over or self._complete.keys() & self._gathered.keys() or self._refused.keys() & self._gathered.keys():
            raise InternalError("a request is announced in one way only", field="announced", value=len(over))

    def _gather(self, frame: AnnounceFrame) -> _Gathered:
        _check_frame(frame)
        gathered = self._gathered.get(frame.key)
        if gathered is not None and _starts_over(frame, gathered):
            self._drop_gathered(frame.key)
            gathered = None
        size = len(frame.block_hashes) + len(frame.token_ids)
        self._make_room(size, gathered is None)
        if gathered is None:
            gathered = self._gathered[frame.key] = _Gathered(frame)
        _check_order(frame, gathered)
        gathered.hashes += frame.block_hashes
        gathered.tokens += frame.token_ids
        self._bytes += size
        return gathered

    def _finish(self, gathered: _Gathered, frame: AnnounceFrame, block_tokens: int) -> None:
        hashes, tokens = len(gathered.hashes) // HASH_BYTES, len(gathered.tokens) // TOKEN_BYTES
        wanted = full_blocks(frame.prompt_tokens, block_tokens)
        if hashes != wanted:
            raise InvalidRequest("wrong number of block hashes", field="block_hashes", value=hashes, limit=wanted)
        if tokens not in (0, frame.prompt_tokens):
            raise InvalidRequest("wrong number of tokens", field="token_ids", value=tokens, limit=frame.prompt_tokens)
        del self._gathered[frame.key]
        self._complete[frame.key] = Announcement(
            frame.key,
            frame.prompt_tokens,
            BlockHashes.unpack(bytes(gathered.hashes)),
            np.frombuffer(bytes(gathered.tokens), dtype="<i4") if tokens else None,
            gathered.first.sampling,
            gathered.first.trace,
            gathered.size,
        )

    def _make_room(self, size: int, newcomer: bool) -> None:
        """Displace the oldest requests that hold nothing until `size` more bytes fit."""
        most = self._most - newcomer
        while len(self._complete) + len(self._gathered) > most or self._bytes + size > MAX_ANNOUNCED_BYTES:
            oldest = next((key for key in self._complete if not self._is_held(key)), None)
            if oldest is None:
                raise QueueFull("too many requests are announced", field="announced", value=len(self._complete))
            self._bytes -= self._complete.pop(oldest).size

    def _drop_gathered(self, key: HoldKey) -> None:
        gathered = self._gathered.pop(key, None)
        if gathered is not None:
            self._bytes -= gathered.size


def _remember(keys: dict[HoldKey, None], key: HoldKey) -> None:
    """Add `key`; beyond the bound the oldest one goes."""
    keys[key] = None
    if len(keys) > limits.MAX_TOMBSTONES:
        del keys[next(iter(keys))]


def _check_frame(frame: AnnounceFrame) -> None:
    size = len(frame.block_hashes) + len(frame.token_ids)
    if size > limits.FRAME_BYTES:
        raise MessageTooLarge("announce frame too large", field="frame", value=size, limit=limits.FRAME_BYTES)
    if len(frame.block_hashes) % HASH_BYTES or len(frame.token_ids) % TOKEN_BYTES:
        raise InvalidRequest("an announce frame splits a hash or a token", field="frame", value=size)
    if not 0 < frame.prompt_tokens <= limits.MAX_PROMPT_TOKENS:
        raise InvalidRequest(
            "prompt length out of range",
            field="prompt_tokens",
            value=frame.prompt_tokens,
            limit=limits.MAX_PROMPT_TOKENS,
        )


def _starts_over(frame: AnnounceFrame, gathered: _Gathered) -> bool:
    """A stream that broke begins again: from 0, with something we have already."""
    known = (frame.block_hashes and gathered.hashes) or (frame.token_ids and gathered.tokens)
    return bool(known) and not frame.first_block and not frame.first_token


def _check_order(frame: AnnounceFrame, gathered: _Gathered) -> None:
    """Frames are contiguous and say the same length; tokens or hashes may be absent from a frame."""
    blocks, tokens = len(gathered.hashes) // HASH_BYTES, len(gathered.tokens) // TOKEN_BYTES
    if frame.block_hashes and frame.first_block != blocks:
        raise InvalidRequest("announce frames out of order", field="first_block", value=frame.first_block, limit=blocks)
    if frame.token_ids and frame.first_token != tokens:
        raise InvalidRequest("announce frames out of order", field="first_token", value=frame.first_token, limit=tokens)
    if frame.prompt_tokens != gathered.first.prompt_tokens:
        raise InvalidRequest("announce frames disagree", field="prompt_tokens", value=frame.prompt_tokens)
    total = (blocks + len(frame.block_hashes) // HASH_BYTES, tokens + len(frame.token_ids) // TOKEN_BYTES)
    if max(total) > frame.prompt_tokens:
        raise InvalidRequest("more announced than the prompt holds", field="frame", value=max(total))
