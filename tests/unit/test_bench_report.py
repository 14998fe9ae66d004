"""How a bench's document is shown: rows of its tables, the page, and the wave timeline read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wavepp.bench import plots
from wavepp.bench.measure import Sample, summarise
from wavepp.bench.page import write_page
from wavepp.bench.report import COLUMNS, kind_rows, print_tables, rows, setting_of, stage_rows, tables
from wavepp.bench.running import speed_up_of
from wavepp.bench.store import Document
from wavepp.bench.timeline import GAP, WAVE, Bar, StageBars, read_timeline, settled
from wavepp_proto.errors import InvalidRequest
from wavepp_proto.runtime import span_names
from wavepp_proto.runtime.timeline import CollectedSpan, write_timeline


def cell(name: str = "mixed-c8", concurrency: int | None = 8, **more: Any) -> Document:
    samples = [
        Sample(number, kind, 0.0, 0.0, 1.0 + number, 1000, 900, 900, 2.5) for number, kind in ((0, "warm"), (1, "cold"))
    ]
    summary = summarise(samples, 2.0)
    document = {
        "name": name, "row": name.rpartition("-")[0], "interrupted": False, "stopped_early": False, "failed": {},
        "foreign_requests": 0,
        "settings": {"concurrency": concurrency, "rate": None, "model": "<m>", "stages": 2, "policy": "mpu",
                     "mode": "drain", "wave_tokens": 128, "block_tokens": 16},
        "summary": {field: getattr(summary, field) for field in summary.__slots__},
        "bound": {"input_tokens_per_s": 4000.0, "fraction": 0.25, "fraction_as_hit": 0.5},
        "waves": {"count": 7, "tokens_per_wave": 28.6},
        "stages": [{"stage": 1, "rank": 0, "waves": 7, "seconds": 2.0, "shares": dict.fromkeys(
            ("compute", "activation_wait", "admission_wait", "preparing", "idle"), 0.2)}],
        "usage": {"ours": 0.5, "others": 0.25, "idle": 0.25, "processes": 3},
        "samples": {"columns": list(Sample._fields), "measured": [list(one) for one in samples]},
    }  # fmt: skip
    return document | more


def whole(*cells: Document) -> Document:
    machine = {"host": "here", "cores": 2}
    about = {"command": ["wavepp", "bench", "<&>"], "began": "then", "ended": "now", "versions": {"controller": "1"}}
    return about | {"machine": machine, "cells": list(cells)}


def test_row_says_every_number_of_a_cell() -> None:
    assert rows(whole(cell())) == [
        ["mixed-c8", "1,000", "100", "2", "1,000", "2,000", "2,000", "2.5", "2.5", "2.5", "100.0%", "25.0%",
         "7", "29", "25.0%", "0"],
    ]  # fmt: skip
    assert len(COLUMNS) == 16


def test_row_says_what_went_wrong_and_what_is_not_known() -> None:
    nothing = summarise([], 0.0)
    summary = {field: getattr(nothing, field) for field in nothing.__slots__}
    unknown: Document = dict.fromkeys(("bound", "waves", "stages", "usage"))
    broken = cell(summary=summary, stopped_early=True, failed={"DRAINING": 100, "TOO_LATE": 1}, **unknown)
    (row,) = rows(whole(broken))
    assert row[0] == "mixed-c8 (ended early)"
    assert row[4:15] == ["-"] * 11
    assert row[15] == "100 DRAINING, 1 TOO_LATE"
    assert stage_rows(whole(broken)) == []
    assert rows(whole(cell(interrupted=True)))[0][0] == "mixed-c8 (interrupted)"
    assert rows(whole(cell(foreign_requests=3)))[0][0] == "mixed-c8 (3 requests of others)"


def test_kinds_and_stages_have_rows_of_their_own() -> None:
    document = whole(cell())
    assert [row[:2] for row in kind_rows(document)] == [["mixed-c8", "cold"], ["mixed-c8", "warm"]]
    assert stage_rows(document) == [["mixed-c8", "1", "7", *["20.0%"] * 5]]
    assert [len(columns) - len(lines[0]) for _, columns, lines in tables(document)] == [0, 0, 0]


def test_page_escapes_what_others_wrote_and_loads_nothing(tmp_path: Path) -> None:
    page = write_page(whole(cell(), cell("mixed-c16", 16)), tmp_path).read_text()
    assert "&lt;m&gt;" in page
    assert "<m>" not in page
    assert "&lt;&amp;&gt;" in page
    assert page.count("<img") == page.count('src="data:image/png;base64,') == 2


def test_throughput_is_a_line_for_each_family_and_its_bound() -> None:
    figure = plots.throughput(whole(cell("mixed-c16", 16), cell(), cell("suffix4k-c8", bound=None)))
    assert figure is not None
    left, right = figure.axes
    assert [np.asarray(line.get_xdata()).tolist() for line in left.lines] == [[8.0, 16.0], [8.0, 16.0], [8.0]]
    assert [line.get_label() for line in right.lines] == ["mixed", "suffix4k"]


def test_what_cannot_be_plotted_is_left_out() -> None:
    assert plots.throughput(whole(cell("talk-x1", None))) is None
    empty = {"columns": list(Sample._fields), "measured": []}
    assert plots.completion(whole(cell(samples=empty))) is None


def test_completion_has_a_panel_for_each_family_and_a_step_for_each_request() -> None:
    figure = plots.completion(whole(cell(), cell("mixed-c16", 16), cell("suffix4k-c8")))
    assert figure is not None
    mixed, suffix = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title(loc="left") for axes in (mixed, suffix)] == ["mixed", "suffix4k"]
    assert [np.asarray(line.get_xdata()).tolist() for line in mixed.lines] == [[1.0, 1.0, 2.0]] * 2
    assert np.asarray(mixed.lines[0].get_ydata()).tolist() == [0.0, 0.5, 1.0]


def _wave(ordinal: int, stage: int, start_ms: int, end_ms: int, waited_ms: int) -> CollectedSpan:
    attributes: dict[str, str | int] = {
        span_names.PIPELINE: "p", span_names.STAGE: stage, span_names.RANK: 0, span_names.WAVE_ORDINAL: ordinal,
        span_names.ACTIVATION_WAIT_US: 1000 * waited_ms,
    }  # fmt: skip
    return CollectedSpan(
        name=span_names.WAVE, trace_id=f"{ordinal:032x}", span_id=f"{10 * ordinal + stage:016x}", parent_span_id=None,
        start_ns=start_ms * 1_000_000, end_ns=end_ms * 1_000_000, attributes=attributes,
    )  # fmt: skip


def test_timeline_is_read_back_from_the_file_that_a_pipeline_writes(tmp_path: Path) -> None:
    path = tmp_path / "up.trace.json"
    write_timeline([_wave(1, 0, 0, 10, 0), _wave(1, 1, 12, 20, 0), _wave(2, 1, 25, 30, 5)], path)
    stages = read_timeline(path)
    assert stages == [
        StageBars("stage 0", [Bar("wave 1", WAVE, 0.0, 0.01)]),
        StageBars(
            "stage 1",
            [
                Bar("wave 1", WAVE, 0.012, 0.008),
                Bar("waiting for activations", GAP, 0.02, 0.005),
                Bar("wave 2", WAVE, 0.025, 0.005),
            ],
        ),
    ]
    page = write_page(whole(cell()), tmp_path, path).read_text()
    assert page.count("<img") == 3
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_page_has_no_timeline_when_the_pipeline_has_run_no_wave_yet(tmp_path: Path) -> None:
    path = tmp_path / "up.trace.json"
    write_timeline([], path)
    assert read_timeline(path) == []
    assert write_page(whole(cell()), tmp_path, path).read_text().count("<img") == 2


def test_running_pipeline_s_timeline_is_waited_for_until_it_is_quiet(tmp_path: Path) -> None:
    """Its last waves are written after the load has ended; a file that an earlier run left is not waited for long."""
    path = tmp_path / "up.trace.json"
    write_timeline([], path)
    written_s = path.stat().st_mtime
    assert settled(path, since=written_s - 1) is True
    assert settled(path, since=written_s, within_s=0.1) is False


@pytest.mark.parametrize("text", ["", "[]", "{}", json.dumps({"traceEvents": [{"ph": "X"}, {}]})])
def test_file_that_is_no_timeline_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(InvalidRequest):
        read_timeline(path)


def test_narrow_terminal_shows_fewer_columns_and_no_terminal_those_without_a_value(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = {}
    for columns in ("80", "200"):
        monkeypatch.setenv("COLUMNS", columns)
        print_tables(whole(cell(bound=None)))
        shown[columns] = capsys.readouterr().out
    assert "mixed-c8" in shown["80"]
    assert ["tok/wave" in shown[columns] for columns in ("80", "200")] == [False, True]
    assert ["bound" in shown[columns] for columns in ("80", "200")] == [False, False]


def test_no_number_is_cut_or_wrapped_when_the_terminal_is_narrow(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document = whole(cell("short_reuse-131072-c128"))
    for columns in (60, 80, 100, 120, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        print_tables(document)
        out = capsys.readouterr().out
        assert "\u2026" not in out
        assert max(map(len, out.splitlines())) <= columns
        (line,) = [line.split() for line in out.splitlines() if "1,000" in line][:1]
        assert line[:2] == ["short_reuse-131072-c128", "1,000"]
        assert line[-1] == "0"


def test_the_mode_is_told_when_results_are_shown() -> None:
    assert "(policy mpu, mode drain, waves of 128 tokens, blocks of 16)" in setting_of(whole(cell()))


@pytest.mark.parametrize(
    ("model", "factor"),
    [("emulated:profile=x,speedup=4", 4.0), ("emulated:layers=2", 1.0), ("/models/speedup=4", 1.0), ("emulated", 1.0)],
)
def test_the_bound_is_as_much_faster_as_the_models_name_says(model: str, factor: float) -> None:
    assert speed_up_of(model) == factor
