"""What the emulated engine's devices take, on a clock of the test's own; and presets with a profile."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.harness.emulated_pipeline import B, plan_of, row_of, tokens_of, wave_of
from wavepp_proto.errors import EngineFault, InvalidRequest
from wavepp_proto.profile import Profile, StageCosts, StageProfile
from wavepp_proto.terms import CacheGroup
from wavepp_stage.engine.emulated import EmulatedEngine, emulated_model_facts
from wavepp_stage.engine.emulated_device import LATE_S, Pace, Stream, Wire
from wavepp_stage.engine.emulated_model import parse_preset
from wavepp_stage.runtime.engines import as_profiled
from wavepp_stage.runtime.settings import StageSettings

COSTS = StageCosts(c_us=1_000.0, b_us=10.0, a_us=0.5, g_us=2.0)
PROFILE = Profile(
    "tiny", (StageProfile(COSTS, 40, 20, 6, 3.0), StageProfile(replace(COSTS, c_us=2_000.0), 50, 0, 7)), B, 64, 32,
    lanes=9, window=999, layers=6, attention_every=2, link_us=50.0, link_us_per_token=2.0,
)  # fmt: skip


class Clock:
    """Time that only moves when somebody waits, each wait a little too long."""

    def __init__(self, oversleep: float = 0.0) -> None:
        self.now = 100.0
        self.oversleep = oversleep

    def read(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.now += seconds + self.oversleep
        return False

    def stream(self) -> Stream:
        return Stream(threading.Event(), self.read, self.wait)


def at(seconds: float) -> Any:
    """So long after the clock began."""
    return pytest.approx(100.0 + seconds, abs=1e-6)


def test_deadlines_accumulate_when_every_timer_and_every_start_is_late() -> None:
    clock = Clock(oversleep=0.003)
    stream = clock.stream()
    for _ in range(5_000):
        clock.now += 0.002  # the executor, between two waves
        stream.take(clock.now, 0.01, ready_at=50.0)
    assert clock.now == at(0.002 + 5_000 * 0.01 + 0.003)


def test_wave_starts_with_its_executor_when_it_came_to_an_idle_device() -> None:
    clock = Clock()
    stream = clock.stream()
    stream.take(clock.now, 0.01, ready_at=99.0)
    clock.now += 0.005
    stream.take(clock.now, 0.01, ready_at=clock.now - 0.001)
    assert clock.now == at(0.01 + 0.005 + 0.01)


def test_stall_counts_when_the_executor_is_later_than_a_device_can_hide() -> None:
    clock = Clock()
    stream = clock.stream()
    stream.take(clock.now, 0.01, ready_at=99.0)
    clock.now += 0.5
    stream.take(clock.now, 1.0, ready_at=99.0)
    assert clock.now == at(0.01 + 0.5 - LATE_S + 1.0)


def test_start_is_the_threads_when_nobody_says_when_the_work_came() -> None:
    clock = Clock()
    stream = clock.stream()
    stream.take(clock.now, 0.01)
    clock.now += 0.0005
    stream.take(clock.now, 0.01)
    assert clock.now == at(0.02)
    clock.now += 0.0015
    stream.take(clock.now, 0.01)
    assert clock.now == at(0.0315)


def test_take_says_so_when_the_engine_was_closed() -> None:
    closed = threading.Event()
    stream = Stream(closed)
    assert stream.take(0.0, 0.0)
    closed.set()
    assert not stream.take(0.0, 0.0)
    assert not stream.take(100.0, 3600.0)


def test_wire_carries_waves_one_after_the_other_when_they_leave_together() -> None:
    wire = Wire(Pace(COSTS, link_us=50.0, link_us_per_token=2.0, speedup=2.0))
    assert wire.arrival(10.0, 1_000) == pytest.approx(10.0 + 0.001 + 0.000025, abs=1e-9)
    assert wire.arrival(10.0, 1_000) == pytest.approx(10.0 + 0.002 + 0.000025, abs=1e-9)
    assert wire.arrival(11.0, 500) == pytest.approx(11.0 + 0.0005 + 0.000025, abs=1e-9)


def test_wire_holds_nothing_when_it_has_no_length() -> None:
    assert Wire(Pace(COSTS)).arrival(10.0, 1_000) == 0.0


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.json"
    path.write_text(PROFILE.to_json())
    return path


def test_preset_takes_model_and_pace_from_its_profile_when_it_names_one(file: Path) -> None:
    preset = parse_preset(f"emulated:profile={file},speedup=4,vocabulary=97")
    assert (preset.layers, preset.attention_every, preset.window, preset.vocabulary) == (6, 2, 999, 97)
    assert preset.recurrent_layers == (0, 2, 4)
    assert preset.pace(0, 2) == Pace(COSTS, 3.0, 50.0, 2.0, 4.0)
    assert preset.pace(1, 2).costs.c_us == 2_000.0
    assert preset.pace(0, 2).seconds(1_000.0) == 0.00025


def test_fingerprint_is_that_of_the_model_when_only_the_device_differs(file: Path) -> None:
    plain = emulated_model_facts("emulated:layers=6,attention_every=2,window=999")
    assert emulated_model_facts(f"emulated:profile={file}").fingerprint == plain.fingerprint
    assert emulated_model_facts(f"emulated:profile={file},speedup=10").fingerprint == plain.fingerprint


@pytest.mark.parametrize(
    ("settings", "field"),
    [("layers=3", "layers"), ("token_us=1", "token_us"), ("window=5", "window"), ("copy_us=1", "copy_us")],
)
def test_preset_is_refused_by_name_when_it_contradicts_its_profile(file: Path, settings: str, field: str) -> None:
    with pytest.raises(EngineFault, match="the profile says") as error:
        parse_preset(f"emulated:profile={file},{settings}")
    assert error.value.fields["field"] == field


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "fast", ""])
def test_speedup_is_refused_when_it_is_no_factor(value: str) -> None:
    with pytest.raises(EngineFault, match="speedup must be a number above 0"):
        parse_preset(f"emulated:speedup={value}")


def test_preset_is_refused_when_its_profile_cannot_be_read_or_is_none(tmp_path: Path) -> None:
    with pytest.raises(EngineFault, match="cannot read the profile"):
        parse_preset(f"emulated:profile={tmp_path / 'none.json'}")
    (tmp_path / "wrong.json").write_text("{}")
    with pytest.raises(InvalidRequest, match="not a device profile"):
        parse_preset(f"emulated:profile={tmp_path / 'wrong.json'}")


def test_engine_refuses_its_profile_when_the_pipeline_has_other_stages(file: Path) -> None:
    with pytest.raises(EngineFault, match="has 2 stages, the pipeline 3") as error:
        EmulatedEngine().load(plan_of(0, 3, f"emulated:profile={file}"), lambda done, total: None)
    assert error.value.fields["field"] == "stages"


def test_wave_costs_what_the_profile_says_when_rows_have_prefixes(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows, one behind four cached tokens; a void row and a refused one cost nothing."""
    taken: list[Any] = []
    monkeypatch.setattr(Stream, "take", lambda self, started, seconds, ready_at=0.0: taken.append((seconds, ready_at)))
    engine = EmulatedEngine()
    preset = f"emulated:profile={file},speedup=2,vocabulary=97"
    plan = replace(plan_of(1, 2, preset), stage=0, first_layer=1, last_layer=2)
    facts = engine.load(plan, lambda done, total: None)
    assert facts.groups == (CacheGroup.ATTENTION,)
    first, second = tokens_of(8, seed=1), tokens_of(6, seed=2)
    engine.run(wave_of(row_of(first, 0, 4, [0])), None)
    rows = (
        row_of(first, 4, 8, [0, 1]), row_of(second, 0, 6, [2, 3]), row_of(second, 0, 6, [4, 5], void=True),
        row_of(second, 4, 6, [7, 8]),
    )  # fmt: skip
    outcome = engine.run(replace(wave_of(*rows), ready_at=7.0), None)
    assert set(outcome.faults) == {3}
    expected = 1_000 + (10 * 4 + 0.5 * (4 * 4 + 8) + 2 * 4) + (10 * 6 + 0.5 * 18)
    assert taken[1] == (pytest.approx(expected / 1e6 / 2), 7.0)


def test_settings_are_the_profiles_when_the_preset_names_one(file: Path) -> None:
    asked = StageSettings(1, 2, f"emulated:profile={file}", "emulated", pool_blocks=1, block_tokens=16)
    got = as_profiled(asked)
    assert (got.block_tokens, got.pool_blocks, got.host_pool_blocks, got.state_slots) == (B, 50, 0, 7)
    assert (got.wave_tokens, got.lanes) == (64, 9)
    plain = replace(asked, model="emulated:layers=8")
    assert as_profiled(plain) is plain
    with pytest.raises(EngineFault, match="has 2 stages, the pipeline 3"):
        as_profiled(replace(asked, stages=3))


@pytest.mark.parametrize("speedup", [1e-300, 5e-324])
def test_work_without_end_is_ended_by_close_when_a_device_is_endlessly_slow(speedup: float) -> None:
    closed = threading.Event()
    stream = Stream(closed)
    closed.set()
    assert not stream.take(0.0, Pace(COSTS, speedup=speedup).seconds(COSTS.c_us))
