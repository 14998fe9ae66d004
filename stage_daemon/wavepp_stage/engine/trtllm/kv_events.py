"""What a TensorRT-LLM manager's events say, in terms of our block hashes.

Owns the names of blocks (the manager's key and our short hash of the same prefix) and which of them are resident on
which tier; tells the digest feed. The manager's keys are computed once for each prompt, from its tokens and namespace:
our hashes cannot be computed here, for a stage is not told what they are salted with. `cache.py` is the only caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wavepp_proto.terms import CacheGroup
from wavepp_stage.core.block_hashes import Shorts
from wavepp_stage.core.digest_feed import DigestFeed
from wavepp_stage.engine.trtllm.plain import CacheEvent

DEVICE = 0


@dataclass(slots=True)
class _Name:
    short: int
    holders: int = 0
    """Prompts at work whose block this is: its name must be known when the block is stored."""


class Residents:
    """Resident blocks as the events told them."""

    def __init__(self, feed: DigestFeed) -> None:
        self._feed = feed
        self._names: dict[str, _Name] = {}
        self._tier: dict[int, int] = {}
        """Tier of each resident block, by short hash."""
        self._last: int | None = None
        """Number of the last event; None before the first."""
        self.evicted = 0
        self.offloaded = 0
        self.onboarded = 0
        feed.replaced((CacheGroup.ATTENTION,))

    def __len__(self) -> int:
        return len(self._tier)

    def shorts(self) -> Shorts:
        return np.fromiter(self._tier, dtype=np.uint64, count=len(self._tier))

    def on_device(self, shorts: Shorts) -> int:
        """How many of these blocks are resident on the device."""
        return sum(self._tier.get(short) == DEVICE for short in shorts.tolist())

    def on_host(self, shorts: Shorts) -> int:
        return sum(self._tier.get(short, DEVICE) != DEVICE for short in shorts.tolist())

    # --- names ------------------------------------------------------------------------------------

    def name(self, keys: Sequence[str], shorts: Shorts) -> None:
        """A prompt whose full blocks are called so is at work."""
        for key, short in zip(keys, shorts.tolist(), strict=True):
            self._names.setdefault(key, _Name(short)).holders += 1

    def forget(self, keys: Sequence[str]) -> None:
        """That prompt is over: a block that did not become resident needs no name any more."""
        for key in keys:
            known = self._names.get(key)
            if known is not None:
                known.holders -= 1
                self._drop_unused(key, known)

    def _drop_unused(self, key: str, known: _Name) -> None:
        if known.holders <= 0 and known.short not in self._tier:
            del self._names[key]

    # --- events -----------------------------------------------------------------------------------

    def apply(self, events: Sequence[CacheEvent]) -> bool:
        """False if events were lost: what is resident is not known then, and must be forgotten on both sides."""
        for event in events:
            if self._last is not None and event.number != self._last + 1:
                self._last = None
                return False
            self._last = event.number
            if event.stored:
                self._store(event.stored)
            if event.removed:
                self._remove(event.removed)
            if event.moved is not None:
                self._move(*event.moved)
        return True

    def lose(self) -> None:
        """Nothing is known to be resident any more."""
        self._tier.clear()
        for key, known in list(self._names.items()):
            self._drop_unused(key, known)
        self._last = None
        self._feed.replaced()

    def _store(self, blocks: Sequence[tuple[str, int]]) -> None:
        """Blocks without a name are trailing partial ones, which nobody reuses."""
        fresh = []
        for key, tier in blocks:
            known = self._names.get(key)
            if known is not None:
                if known.short not in self._tier:
                    fresh.append(known.short)
                self._tier[known.short] = tier
        if fresh:
            self._feed.added({CacheGroup.ATTENTION: np.array(fresh, dtype=np.uint64)})

    def _remove(self, keys: Sequence[str]) -> None:
        gone = []
        for key in keys:
            known = self._names.get(key)
            if known is not None and self._tier.pop(known.short, None) is not None:
                gone.append(known.short)
                self._drop_unused(key, known)
        self.evicted += len(gone)
        if gone:
            self._feed.removed({CacheGroup.ATTENTION: np.array(gone, dtype=np.uint64)})

    def _move(self, key: str, tier: int) -> None:
        known = self._names.get(key)
        if known is None or known.short not in self._tier:
            return
        before = self._tier[known.short]
        self._tier[known.short] = tier
        self.offloaded += before == DEVICE and tier != DEVICE
        self.onboarded += before != DEVICE and tier == DEVICE
