"""When all of a wave had come, as an engine that models a device's queue must know it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from wavepp_proto.terms import JoinPlan, WaveOrdinal
from wavepp_stage.core.events import WavePrepared
from wavepp_stage.runtime import running_formation
from wavepp_stage.runtime.running_formation import RunningFormation

FIRST, SECOND = WaveOrdinal(1), WaveOrdinal(2)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> RunningFormation:
    monkeypatch.setattr(running_formation, "time", SimpleNamespace(monotonic=lambda: 9.0))
    return RunningFormation(cast(JoinPlan, None), None, 0, came={FIRST: 1.0, SECOND: 2.0})


def prepared() -> WavePrepared:
    return cast(WavePrepared, cast(Any, object()))


def test_preparing_does_not_count_when_nothing_held_the_wave_up(current: RunningFormation) -> None:
    current.prepare(FIRST, prepared())
    assert current.came == {FIRST: 1.0, SECOND: 2.0}
    assert set(current.prepared) == {FIRST}


def test_wave_came_with_its_last_copy_when_it_waited_for_copies(current: RunningFormation) -> None:
    current.held_up.add(SECOND)
    current.prepare(SECOND, prepared())
    assert current.came == {FIRST: 1.0, SECOND: 9.0}
    assert not current.held_up
