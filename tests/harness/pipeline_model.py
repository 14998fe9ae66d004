"""A pipeline as pure arithmetic: stages in series, first in first out, wave times from StageCosts.

Owns the makespan of given waves, and a small closed loop around a real Policy: clients that send their next prompt when
the last one has finished, lanes in order of arrival, a ring of 2P waves, reports to the policy. No core, no cache, no
round: for tests of planners and for exhaustive search. One loop, one answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush

from tests.harness.planning import daemon
from wavepp_controller.core.planner import Lane
from wavepp_controller.core.planning import InFlight, PlanView, Policy
from wavepp_proto.profile import Chunk, StageCosts
from wavepp_proto.terms import Attempt, HoldKey, RequestId, Row, StageTimes, WaveOrdinal

Prompt = tuple[int, int]
"""(cached, length) in tokens."""


def makespan_us(stages: Sequence[StageCosts], waves: Sequence[Sequence[Chunk]]) -> float:
    """When the last stage is done with the last wave, all of them waiting at time 0."""
    free = [0.0] * len(stages)
    for wave in waves:
        arrived = 0.0
        for place, costs in enumerate(stages):
            arrived = free[place] = max(free[place], arrived) + costs.wave_us(wave)
    return free[-1]


@dataclass
class Loop:
    """Times in seconds."""

    stages: Sequence[StageCosts]
    policy: Policy
    wave_tokens: int = 16_384
    block_tokens: int = 64
    return_s: float = 0.010
    """From the end of a prompt to its client's next one being ready to be prepared."""
    round_s: float = 0.003
    """One round after the other; what becomes ready meanwhile shares the next. 0: everybody is admitted at once."""
    hop_s: float = 0.0005
    noise: Callable[[int, int], float] = lambda ordinal, stage: 1.0
    """Factor on the time of a wave on a stage."""
    now: float = 0.0
    lanes: dict[HoldKey, Lane] = field(default_factory=dict)
    flying: dict[WaveOrdinal, InFlight] = field(default_factory=dict)
    waves: list[tuple[Row, ...]] = field(default_factory=list)
    finished: list[tuple[float, float, Prompt]] = field(default_factory=list)
    """(arrived, finished, prompt)."""
    _heap: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _free: list[float] = field(default_factory=list)
    _planned: int = 0
    _ready: list[int] = field(default_factory=list)
    _round_open: bool = False
    _begun: dict[HoldKey, tuple[float, Prompt, int]] = field(default_factory=dict)
    _left: int = 0
    _asked: set[float] = field(default_factory=set)
    _clients: list[Iterator[Prompt]] = field(default_factory=list)

    def run(self, clients: Sequence[Iterator[Prompt]], prompts: int) -> Loop:
        """Until so many prompts have finished."""
        self._free, self._clients, self._left = [0.0] * len(self.stages), list(clients), prompts
        self._ready = list(range(len(clients)))
        self._admit()
        self._pump()
        while len(self.finished) < prompts:
            self.now, _, work = heappop(self._heap)
            work()
            self._pump()
        return self

    def seconds_for(self, skip: int) -> float:
        """From the end of prompt number `skip` to that of the last."""
        ends = [end for _, end, _ in self.finished]
        return ends[-1] - ends[skip - 1] if skip else ends[-1]

    def _at(self, when: float, work: Callable[[], None]) -> None:
        self._planned += 1
        heappush(self._heap, (when, self._planned, work))

    def _begin_round(self, client: int) -> None:
        self._ready.append(client)
        if not self._round_open:
            self._round()

    def _round(self) -> None:
        entries, self._ready = self._ready, []
        self._round_open = bool(entries)
        if entries:
            self._at(self.now + self.round_s, lambda: self._end_round(entries))

    def _end_round(self, entries: list[int]) -> None:
        for client in entries:
            self._arrive(client)
        self._round()

    def _admit(self) -> None:
        entries, self._ready = self._ready, []
        for client in entries:
            self._arrive(client)

    def _arrive(self, client: int) -> None:
        prompt = next(self._clients[client], None)
        if prompt is None:
            return
        key = HoldKey(RequestId(f"r{len(self._begun)}"), Attempt(1))
        self._begun[key] = (self.now, prompt, client)
        self.lanes[key] = Lane(key, *prompt)

    def _pump(self) -> None:
        while self.lanes and len(self.flying) < 2 * len(self.stages):
            decision = self.policy.plan(
                PlanView(
                    self.now,
                    list(self.lanes.values()),
                    tuple(self.flying.values()),
                    len(self.stages),
                    2 * len(self.stages),
                    self.wave_tokens,
                    self.block_tokens,
                    128,
                    self._round_open,
                )
            )
            if not decision.rows:
                assert self.flying
                assert decision.wait_until is not None
                assert decision.wait_until > self.now
                if decision.wait_until not in self._asked:
                    self._asked.add(decision.wait_until)
                    self._at(decision.wait_until, lambda: None)
                return
            self._send(decision.rows)

    def _send(self, rows: tuple[Row, ...]) -> None:
        assert 0 < sum(row.length for row in rows) <= self.wave_tokens
        for row in rows:
            lane = self.lanes[row.key]
            assert (row.start, row.final) == (lane.start, row.start + row.length == lane.prompt_tokens)
            if row.final:
                del self.lanes[row.key]
            else:
                self.lanes[row.key] = Lane(row.key, row.start + row.length, lane.prompt_tokens)
        self.waves.append(rows)
        ordinal = WaveOrdinal(len(self.waves))
        self.flying[ordinal] = InFlight(ordinal, rows, self.now)
        chunks = [(row.start, row.length) for row in rows]
        arrived = self.now + self.hop_s
        for place, costs in enumerate(self.stages):
            took = costs.wave_us(chunks) * self.noise(ordinal, place) / 1e6
            arrived = self._free[place] = max(self._free[place], arrived) + took
            self._at(arrived + self.hop_s, partial(self._report, ordinal, rows, place, took))

    def _report(self, ordinal: WaveOrdinal, rows: tuple[Row, ...], stage: int, took: float) -> None:
        self.policy.observe(daemon(stage), rows, 0, StageTimes(compute_us=round(took * 1e6)), self.now)
        if stage < len(self.stages) - 1:
            return
        del self.flying[ordinal]
        for row in rows:
            if row.final:
                began, prompt, client = self._begun[row.key]
                self.finished.append((began, self.now, prompt))
                self._at(self.now + self.return_s, partial(self._begin_round, client))
