"""Who comes to a pipeline, and why (DESIGN.md): what `plan_adaptive` believes of requests not there yet.

Owns two observations: how many of the requests that ended somebody new followed within a moment, one for one, as
clients in a loop do; and how often requests come and how much work they are. Pure numbers, fed at every decision
and every end. Does not own what follows from them.
"""

from __future__ import annotations

from collections import deque

from wavepp_proto.profile import Chunk, StageCosts

MOMENT_S = 0.05
"""Who comes within this after an end, or after another one who came so, came because of it..."""
MOMENT_PART = 1 / 6
"""...or within this part of the time that requests take, if that is longer: the way back leads through client,
hashing, announcement and round, on a busy machine as well. Of N requests by chance, as many as there are clients in
a loop of N, fewer than LOOPED would follow so soon unless N > 8; with more, waves are full whatever is believed."""
ENDS = 16
"""So many ends are remembered: each one moves the belief by one part of them."""
LOOPED = 0.75
"""Part of the ends that must be followed for clients to be believed in a loop. Before there were any all count as
followed: one that nobody follows proves nothing, five in a row do."""
REQUESTS = 32
"""Requests over which rate and work are averaged."""
LEAST_REQUESTS = 4
MOST_LOAD = 0.95
"""Where more comes than can be done, what is there grows, and says by itself how full a wave should be."""


class Arrivals:
    def __init__(self) -> None:
        self._returned = 1.0
        """Part of the last ends that somebody followed."""
        self._open: deque[float] = deque()
        """When requests ended that nobody has followed yet; moved along by those that are followed."""
        self._lately: deque[tuple[float, Chunk]] = deque(maxlen=REQUESTS)
        self._took_s = 0.0
        """How long requests take here, on average."""

    @property
    def looped(self) -> bool:
        """Who ended comes back, as far as is known."""
        return self._returned >= LOOPED

    def took(self, seconds: float) -> None:
        """One request, from when it was first seen to its end."""
        self._took_s += (seconds - self._took_s) / ENDS if self._took_s else seconds

    def ended(self, requests: int, now: float) -> None:
        self._open.extend([now] * requests)

    def came(self, chunks: list[Chunk], now: float, *, dated: bool) -> None:
        """New requests, each as one chunk; unless `dated`, they came at any time since the last decision."""
        if dated:
            self._expire(now)
        followed = min(len(chunks), len(self._open))
        for _ in range(followed):
            self._open.popleft()
            self._note(1.0)
        if followed and self._open:
            self._open = deque([now] * len(self._open))  # they come in a row
        self._expire(now)
        self._lately.extend([(now, chunk) for chunk in chunks])

    def later(self, work_us: float, costs: StageCosts, now: float) -> float:
        """Requests expected before `work_us` of the slowest stage, and what comes meanwhile, is done."""
        if len(self._lately) < LEAST_REQUESTS:
            return 0.0
        span_us = max(1.0, (now - self._lately[0][0]) * 1e6)
        load = sum([costs.c_us + costs.chunk_us(*chunk) for _, chunk in self._lately]) / span_us
        return work_us * len(self._lately) / span_us / (1.0 - min(MOST_LOAD, load))

    def _expire(self, now: float) -> None:
        moment_s = max(MOMENT_S, MOMENT_PART * self._took_s)
        while self._open and now - self._open[0] > moment_s:
            self._open.popleft()
            self._note(0.0)

    def _note(self, followed: float) -> None:
        self._returned += (followed - self._returned) / ENDS
