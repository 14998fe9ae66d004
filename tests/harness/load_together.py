"""Emulated stages that load together, as TensorRT-LLM's do: whoever does not come keeps the others waiting.

Owns the store where they meet and, for each engine, what it
was asked to load and what is to fail. `install` makes the daemons of a test's cluster use them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from wavepp_proto.errors import EngineFault
from wavepp_stage.engine.base import EngineFacts, EnginePlan, Payload, StageGroup, WaveOutcome, WaveWork
from wavepp_stage.engine.emulated import EmulatedEngine, emulated_model_facts, emulated_traits
from wavepp_stage.engine.meeting import gather
from wavepp_stage.runtime import daemon
from wavepp_stage.runtime.engines import Equipment
from wavepp_stage.runtime.settings import StageSettings

LINK_ADDRESS = "127.0.0.1:9"
"""Nobody listens there: the test's links are gRPC."""


class SharedStore:
    """What a torch.distributed store does for a meeting."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: set[str] = set()

    def set(self, key: str, value: str) -> None:
        with self._lock:
            self._keys.add(key)

    def check(self, keys: list[str]) -> bool:
        with self._lock:
            return self._keys.issuperset(keys)


class TogetherEngine(EmulatedEngine):
    """An emulated engine that is loaded with others."""

    def __init__(self, store: SharedStore) -> None:
        super().__init__()
        self._store = store
        self.loads: list[StageGroup] = []
        self.fails: set[str] = set()
        """What fails once: `early` a load before the others are met, `late` one after, `wave` the next wave."""

    def load(self, plan: EnginePlan, progress: Callable[[int, int], None]) -> EngineFacts:
        assert plan.group is not None
        self.loads.append(plan.group)
        if self._fails("early"):
            raise EngineFault("no such library")
        gather(self._store, plan.group, plan.place)
        if self._fails("late"):
            raise EngineFault("no memory on the device")
        return super().load(plan, progress)

    def _fails(self, what: str) -> bool:
        failing = what in self.fails
        self.fails.discard(what)
        return failing

    def run(self, wave: WaveWork, payload: Payload | None) -> WaveOutcome:
        if self._fails("wave"):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return super().run(wave, payload)


def install(monkeypatch: pytest.MonkeyPatch) -> dict[int, TogetherEngine]:
    """Engines by stage, as daemons are started from now on."""
    store, engines = SharedStore(), dict[int, TogetherEngine]()

    def equip(settings: StageSettings, advertise_host: str) -> Equipment:
        engine = engines[settings.stage] = TogetherEngine(store)
        traits = replace(emulated_traits(settings.model), collective=True)
        return Equipment(engine, emulated_model_facts(settings.model), None, LINK_ADDRESS, traits)

    monkeypatch.setattr(daemon, "equip", equip)
    return engines
