"""The real clock's half of the paper's report: which cells, what is kept, how records become a run, the rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.bench.paper_cells import COMBINATIONS, ORACLE, profile_of
from tests.bench.paper_real import PREFIX, plan_of, played_of
from tests.bench.paper_real_all import RealHalf
from tests.bench.paper_real_cells import REAL_CELLS, RealTask, expected_s, real_tasks
from tests.bench.paper_real_report import RealRow, cells, findings, markdown, rows, section, standing
from tests.bench.paper_report import RIVAL, WINNER, Tables
from tests.bench.paper_rounds import rounds
from wavepp.bench.cells import Cell as BenchCell
from wavepp.bench.measure import Sample
from wavepp.bench.window import Window
from wavepp_proto import workload
from wavepp_proto.runtime import span_names as names
from wavepp_proto.runtime.timeline_layout import AttributeValue, CollectedSpan
from wavepp_proto.workload import Cell

SUFFIX = Cell("suffix4k", None, 8)
BOUND = 1_000_000.0


def test_real_cells_are_cells_of_the_paper_in_two_ways() -> None:
    tasks = real_tasks(["glm", "minimax", "k3"])
    for model, chosen in REAL_CELLS.items():
        assert set(chosen) <= {*workload.cells(model)} | {SUFFIX}
    assert len({task.name for task in tasks}) == len(tasks) == 2 * sum(map(len, REAL_CELLS.values()))
    assert [(task.mode, task.policy) for task in tasks[:2]] == [("overlapped", "adaptive"), ("lockstep", "fixed")]


def test_all_cells_together_fit_into_an_hour() -> None:
    assert sum(map(expected_s, real_tasks(["glm", "minimax", "k3"]))) < 0.85 * 3600


def test_a_result_is_of_one_state_of_the_code_and_one_way_of_measuring() -> None:
    task = RealTask("glm", SUFFIX, "overlapped", "adaptive")
    others = (
        RealTask("glm", SUFFIX, "overlapped", "adaptive", seconds=1.0),
        RealTask("glm", SUFFIX, "lockstep", "fixed"),
        RealTask("glm", Cell("suffix4k", None, 32), "overlapped", "adaptive"),
        RealTask("k3", SUFFIX, "overlapped", "adaptive"),
    )
    assert task.key == RealTask("glm", SUFFIX, "overlapped", "adaptive").key
    assert len({task.key, *(other.key for other in others)}) == 5


@pytest.mark.parametrize("model", ["glm", "k3"])
def test_a_cluster_has_the_profiles_devices_and_settings(model: str) -> None:
    profile = profile_of(model)
    plan = plan_of(RealTask(model, SUFFIX, "lockstep", "fixed"), profile)
    assert (plan.policy, plan.mode, plan.fills, plan.min_wave_tokens) == ("fixed", "lockstep", profile.fills, 8192)
    assert plan.model.endswith(".json,speedup=1")
    assert tuple(plan.pool_blocks) == tuple(stage.pool_blocks for stage in profile.stages)
    assert plan.snapshot_tokens == profile.snapshot_tokens


# --- records of a cell become a run ------------------------------------------------------------------


class Measured:
    """What `played_of` reads of a `RunningCell`."""

    def __init__(self, began_ns: int) -> None:
        self.began_ns = began_ns
        self.window = Window()


def span(
    stage: int, wave: int, request: str, start: int, length: int, at_ms: tuple[int, int], void: bool = False
) -> CollectedSpan:
    began = 5_000_000_000
    told: dict[str, AttributeValue] = {
        names.REQUEST_ID: request, names.STAGE: stage, names.WAVE_ORDINAL: wave, names.CHUNK_START: start,
        names.CHUNK_LENGTH: length, names.VOID: void,
    }  # fmt: skip
    return CollectedSpan(
        names.EXECUTE, "1", "2", None, began + at_ms[0] * 1_000_000, began + at_ms[1] * 1_000_000, told
    )


def test_rows_of_a_wave_are_one_wave_and_other_peoples_are_left_out() -> None:
    cell = Measured(5_000_000_000)
    cell.window.file(Sample(0, "warm", 0.0, 0.0, 0.3, 129_088, 124_992, 124_992, 20.0), cell.window.warmup)
    cell.window.open(0.3)
    cell.window.file(Sample(1, "warm", 0.0, 0.0, 0.5, 129_088, 124_992, 124_992, 30.0), cell.window.measured)
    cell.window.close(0.5)
    spans = [
        span(0, 2, f"{PREFIX}1", 124_992, 4096, (200, 400)),
        span(0, 1, f"{PREFIX}0", 124_992, 4096, (100, 200)),
        span(0, 2, f"{PREFIX}7", 124_992, 4096, (200, 400)),
        span(0, 3, f"{PREFIX}8", 124_992, 4096, (400, 500), void=True),
        span(0, 1, "preloaded", 0, 16_384, (-90, -80)),
        CollectedSpan(names.COPY, "1", "3", None, 0, 1, {names.BLOCKS: 5}),
    ]
    played = played_of(spans, cell, RealTask("glm", SUFFIX, "overlapped", "fixed"))  # type: ignore[arg-type]
    waves = [(wave.start_s, wave.end_s, wave.ordinal, wave.tokens, len(wave.rows)) for wave in played.ran["p0/0.0"]]
    assert waves == [(0.1, 0.2, 1, 4096, 1), (0.2, 0.4, 2, 8192, 2)]
    assert (played.start, played.end, played.copied_blocks) == (0.3, 0.5, 5)
    assert [(one.ended_at, one.cached_tokens) for one in played.measured] == [(0.5, 124_992)]
    assert played.asked.keys() == {f"{PREFIX}{number}" for number in (0, 1, 7)}  # 7 was given up


# --- what is kept and shown --------------------------------------------------------------------------


def result(share: float, mode: str, policy: str, cell: Cell = SUFFIX, **more: Any) -> dict[str, Any]:
    found = {
        "work_of_bound": share, "requests": 24, "measured_s": 30.0, "completion_s": {"p50": 1.0, "p95": 2.0},
        "admission_ms": {"p50": 8.0, "p95": 9.0}, "stage_busy": {"p0/0.0": 0.9},
        "waves": {"count": 10, "milliseconds": {"mean": 200.0}},
    }  # fmt: skip
    return {
        "name": f"glm-suffix4k-c8-{mode}-{policy}", "model": "glm", "cell": cell._asdict(), "mode": mode,
        "policy": policy, "bound": BOUND, "tokens_per_s": share * BOUND, "failures": {},
        "requests": {"warmup": 8, "measured": 24, "tail": 0}, "phases_ms": {"hash": 1.3},
        "usage": {"ours": 0.2, "others": 0.01, "cores": {"controller": 0.1, "client": 0.05}}, "result": found, **more,
    }  # fmt: skip


def tables(oracle: float = 0.9) -> Tables:
    told = {
        "model": "glm", "cell": SUFFIX._asdict(), "mode": ORACLE[0], "policy": ORACLE[1], "round_ms": 2.8,
        "bound": BOUND, "tokens_per_s": oracle * BOUND, "result": {"work_of_bound": oracle},
    }  # fmt: skip
    return Tables([told])


def shown(real: float, virtual: float, rival: float = 0.5, oracle: float = 0.9) -> list[RealRow]:
    winner, lockstep = COMBINATIONS[-1], COMBINATIONS[1]
    found = [(result(real, *winner), result(virtual, *winner)), (result(rival, *lockstep), None)]
    return rows(found, tables(oracle))


def test_a_row_stands_beside_its_twin_the_oracle_and_its_rival() -> None:
    winner, rival = shown(0.88, 0.88)
    assert (winner.how, rival.how) == (WINNER, RIVAL)
    assert (winner.agreement, rival.agreement) == (1.0, None)
    assert winner.of_oracle == pytest.approx(0.88 / 0.9)
    assert winner.over == pytest.approx(0.88 / 0.5)
    assert rival.over is None
    assert findings([winner, rival]) == []
    assert cells(winner)[:4] == ["suffix4k", "129,088", "8", WINNER]


@pytest.mark.parametrize(
    ("real", "virtual", "rival", "words"),
    [
        (0.88, 0.92, 0.5, "95.7 % of virtual time"),
        (0.88, 0.84, 0.5, "104.8 % of virtual time"),
        (0.80, 0.80, 0.5, "88.9 % of the oracle"),
        (0.88, 0.88, 0.9, "97.8 % of lockstep+fixed"),
    ],
)
def test_a_missed_bar_is_told_with_what_the_machine_did(real: float, virtual: float, rival: float, words: str) -> None:
    (told,) = findings(shown(real, virtual, rival))
    assert words in told
    assert "others took 1% of the CPU" in told


def test_both_ways_of_showing_hold_every_measurement() -> None:
    found = shown(0.88, 0.90)
    text, page = markdown(found, ["a note"]), section(found, ["a note"])
    assert text.count("| suffix4k |") == page.count("<td>suffix4k</td>") == 2
    assert standing(found) in text
    assert "within 3% in 1 of 1 measurements" in text
    assert "Nothing was measured" in markdown([], [])


def test_what_was_measured_with_this_code_is_not_measured_again(tmp_path: Path) -> None:
    half = RealHalf(tmp_path, {"glm": 2.8}, "glm-suffix4k-c8-", 30.0, 1.0)
    assert [task.name for task in half.missing] == [task.name for task in half.tasks]
    winner, rival = half.tasks
    for task, failures in ((winner, {}), (rival, {"TOO_LATE": 1})):
        told = result(0.8, task.mode, task.policy, failures=failures)
        (tmp_path / f"{task.name}.json").write_text(json.dumps({"key": task.key, **told}))
    assert half.missing == [rival]  # it has failures
    path = tmp_path / f"{winner.name}.json"
    path.write_text(path.read_text().replace(winner.key, "0" * 16))
    assert half.missing == [winner, rival]
    assert half.note == (
        "2 of 2 measurements are there, 1 of them of another state of the code; "
        "0 of their twins, 0 of them of another state."
    )
    assert [row.twin for row in half.rows(tables())] == [None, None]


def test_a_twin_has_as_many_requests_as_were_measured(tmp_path: Path) -> None:
    half = RealHalf(tmp_path, {"glm": 2.8}, "glm-suffix4k-c8-", 30.0, 1.0)
    winner, rival = half.tasks
    for task, measured in ((winner, 24), (rival, 40)):
        told = result(0.8, task.mode, task.policy)
        (tmp_path / f"{task.name}.json").write_text(json.dumps({"key": task.key, **told}))
        twin = {"key": "of another state", "measured": measured, "result": told["result"]}
        (tmp_path / f"{task.name}.twin.json").write_text(json.dumps(twin))
    assert [row.agreement for row in half.rows(tables())] == [1.0, None]
    assert half.note.endswith("2 of their twins, 2 of them of another state.")


# --- the round of virtual time -----------------------------------------------------------------------


def test_a_round_is_what_bench_admission_stored_for_as_many_stages(tmp_path: Path) -> None:
    stored = tmp_path / "admission.json"
    parts = [{"stages": stages, "round_ms": {"p50": ms, "p99": 9.0, "n": 100}} for stages, ms in ((4, 2.512), (8, 4.2))]
    stored.write_text(json.dumps({"rounds": parts}))
    found = rounds(["glm", "k3"], str(stored))
    assert found.by_model == {"glm": 2.5, "k3": 4.2}
    assert str(stored) in found.source
    assert rounds(["glm"], "3.5").by_model == {"glm": 3.5}
    stored.write_text(json.dumps({"rounds": parts[:1]}))
    with pytest.raises(ValueError, match="stages of k3"):
        rounds(["glm", "k3"], str(stored))


def test_without_a_stored_round_the_simulators_own_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert rounds(["glm"], None).by_model == {"glm": pytest.approx(2.8)}
    (tmp_path / "bench-results").mkdir()
    (tmp_path / "bench-results" / "admission.json").write_text("")  # cut short
    assert rounds(["glm"], None).by_model == {"glm": pytest.approx(2.8)}


def test_the_bench_measures_the_prompts_that_virtual_time_plays() -> None:
    task = RealTask("k3", Cell("short_cold", 131_072, 8), "overlapped", "adaptive")
    bench = BenchCell(family="short_cold", lengths="k3", prompt_tokens=131_072, concurrency=8)
    assert [bench.source().prompt(number) for number in range(8)] == [task.family.prompt(number) for number in range(8)]
