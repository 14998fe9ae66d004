"""One stage of one, with a real executor, whose rounds go through the cache's door: no network, no controller.

Owns the engine's gate (a wave runs only when the test lets it) and the order in which things happened on
whichever thread. The emulated engine stands for one that owns its cache.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from tests.harness.stage_core import B, StageDriver, join_plan
from wavepp_proto.terms import HoldKey, Prepare, Row
from wavepp_stage.core.events import Action, Announced, Event, JoinAsked, RoundArrived, WaveQueued
from wavepp_stage.core.machine import MakeCache, StageMachine, block_cache
from wavepp_stage.core.work import WaveWork
from wavepp_stage.engine.base import EnginePlan, EngineTraits
from wavepp_stage.engine.emulated import EmulatedEngine
from wavepp_stage.runtime.cache_door import CacheDoor
from wavepp_stage.runtime.copier import Copier
from wavepp_stage.runtime.core_shell import CoreShell
from wavepp_stage.runtime.executor import Executor
from wavepp_stage.runtime.running_formation import Report

MODEL = "emulated:layers=4,vocabulary=100,window=4096"
PATIENCE_S = 30.0


class RecordingCore(CoreShell):
    """Notes each round as it is handled, and on which thread."""

    handled: list[RoundArrived]
    order: list[str]
    threads: list[str]

    def post(self, event: Event) -> list[Action]:
        if isinstance(event, RoundArrived):
            self.order.append(f"round {event.round.fence.ordinal}")
            self.threads.append(threading.current_thread().name)
            self.handled.append(event)
        return super().post(event)


class EngineThread:
    """A stage that has joined formation 1."""

    def __init__(self, cache_thread: str, make_cache: MakeCache) -> None:
        plan = join_plan(stages=1, pool_blocks=64)
        self.events = StageDriver(StageMachine(plan.fence.incarnation, make_cache), plan)
        self.core = RecordingCore(self.events.machine, lambda: None)
        self.core.handled, self.core.order, self.core.threads = [], [], []
        self.order = self.core.order
        """What happened: `wave n` when the engine begins it, `round n` when the core handles it."""
        self._permits = threading.Semaphore(0)
        self.engine = EmulatedEngine(gate=self._gate)
        self.copier = Copier(self.core, self.engine, lambda *_: None, "copier-test")
        self.core.start_copies = self.copier.start
        self.reports: list[Report] = []
        self.executor = Executor(self.core, self.engine, self.copier, self.reports.append, "executor-test")
        self.door = CacheDoor(self.core, self.executor, EngineTraits(cache_thread=cache_thread))
        engine_plan = EnginePlan(MODEL, 0, 1, 0, 4, B, 64, 1024, 8)
        self.executor.call(lambda engine: engine.load(engine_plan, lambda *_: None)).result(PATIENCE_S)
        self.core.post(JoinAsked(plan, time.monotonic()))
        self.executor.begin(plan, None, 0)

    def _gate(self, wave: WaveWork) -> None:
        self.order.append(f"wave {wave.ordinal}")
        assert self._permits.acquire(timeout=PATIENCE_S)

    def let(self, waves: int) -> None:
        """Let that many waves through the gate."""
        self._permits.release(waves)

    def announce(self, name: str, tokens: int) -> HoldKey:
        frame = self.events.frame(name, range(tokens))
        self.core.post(Announced(frame, time.monotonic()))
        return frame.key

    def round(self, *holds: HoldKey) -> RoundArrived:
        """The next round, which prepares these."""
        return self.events.next_round(prepares=[Prepare(hold, 0) for hold in holds])

    def send_chunks(self, hold: HoldKey, chunks: int, limit_ms: int = 0) -> None:
        """One wave for each block of the prompt, which has `chunks` of them, each with that limit."""
        for at in range(chunks):
            row = Row(hold, at * B, B, final=at == chunks - 1)
            for action in self.core.post(self.events.next_wave(row)):
                assert isinstance(action, WaveQueued)
                self.executor.enqueue(1, replace(action.command, limit_ms=limit_ms))

    def close(self) -> None:
        self.let(1000)
        self.executor.close()
        assert self.executor.join(PATIENCE_S)


@contextmanager
def engine_thread(cache_thread: str = "engine", make_cache: MakeCache = block_cache) -> Iterator[EngineThread]:
    """A stage, closed at the end; its core's invariants hold then."""
    stage = EngineThread(cache_thread, make_cache)
    try:
        yield stage
        stage.core.read(lambda machine: machine.check())
    finally:
        stage.close()
