"""The report of the paper's tables: who is ahead, what is missed and why, and both ways of showing it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.bench import paper
from tests.bench.paper_cells import COMBINATIONS, ORACLE, Task, code, tasks
from tests.bench.paper_findings import ablation, findings, level, shown
from tests.bench.paper_html import page
from tests.bench.paper_markdown import markdown
from tests.bench.paper_report import Place, Tables, paper_figures
from wavepp_proto.workload import Cell

BOUND = 1_000_000.0
WAVE = [-0.5, -0.1, 8192, 2]


def result(share: float, mode: str, policy: str, cell: Cell, p95: float = 1.0) -> dict[str, Any]:
    found: dict[str, Any] = {"work_of_bound": share}
    if mode != ORACLE[0]:
        found |= {
            "completion_s": {"p95": p95},
            "admission_ms": {"p95": 8.0},
            "stage_busy": {"p0/0.0": 0.9, "p0/1.0": 0.8},
            "waves": {"count": 10, "tokens": {"mean": 8192.0}, "rows_mean": 2.0},
            "timeline": {"p0/0.0": [WAVE, [-0.1, 0.0, 64, 1]], "p0/1.0": [WAVE]},
        }
    return {
        "name": "n", "model": "glm", "cell": cell._asdict(), "mode": mode, "policy": policy, "round_ms": 2.8,
        "bound": BOUND, "tokens_per_s": share * BOUND, "took_s": 0.1, "result": found,
    }  # fmt: skip


def tables(adaptive: float, lockstep: float = 0.5, family: str = "suffix4k", p95: float = 1.0) -> Tables:
    cell = Cell(family, None, 8)
    shares = {("overlapped", "adaptive"): adaptive, ("lockstep", "fixed"): lockstep, ORACLE: 0.9}
    every = (*COMBINATIONS, ORACLE)
    late = ("overlapped", "adaptive")
    return Tables(result(shares.get(one, 0.5), *one, cell, p95 if one == late else 1.0) for one in every)


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict"),
    [
        (0.5001, 0.5, "ahead"), (0.5, 0.5, "behind"), (0.4999, 0.5, "behind"),
        (0.9991, 0.9995, "level"), (0.9995, 0.9991, "level"), (0.9999, 0.9951, "ahead"), (0.9951, 0.9999, "behind"),
        (0.9951, 0.9949, "ahead"), (0.9949, 0.9951, "behind"),
    ],
)  # fmt: skip
def test_a_cell_is_level_only_when_both_stand_at_the_bound(ours: float, theirs: float, verdict: str) -> None:
    found = tables(ours, theirs)
    assert [row.verdict for row in found.rows] == [verdict]
    assert len(found.behind()) == (verdict == "behind")


def test_a_level_cell_is_listed_with_its_timeline_and_is_no_missed_bar() -> None:
    found = tables(0.9991, 0.9995)
    ((title, timeline),) = level(found)
    assert "level, 99.910 % of the bound against 99.950 % (-0.040 %): nothing is left to win" in title
    assert timeline["p0/0.0"]
    assert findings(found) == []
    assert "## Level at the bound" in markdown(found, [])
    assert "<h2>Level at the bound</h2>" in page(found, [])


def test_a_missed_bar_is_told_with_its_cause_and_its_waves() -> None:
    found = tables(0.49)
    told = findings(found)
    assert any("behind" in line and "10 waves of 8,192 tokens" in line for line in told)
    assert any("of the oracle" in line for line in told)
    assert [title.rpartition(", ")[2] for title, _ in shown(found)] == [
        "overlapped+adaptive", "lockstep+fixed", "overlapped+mpu", "overlapped+fixed",
    ]  # fmt: skip


def test_nothing_is_told_when_every_bar_is_met() -> None:
    assert findings(tables(0.89)) == []
    assert shown(tables(0.89)) == []


def test_a_longer_tail_of_a_mixed_cell_is_told() -> None:
    assert findings(tables(0.89, family="mixed", p95=1.5)) == [
        "glm mixed 260000 c=8: p95 completion 1.50 s, fixed 1.00 s"
    ]


def test_the_papers_figures_stand_beside_ours() -> None:
    assert paper_figures(Place("glm", "suffix4k", 129_088, 8)) == {"trtllm": 497_230, "wavepp": 503_184}
    text = markdown(tables(0.6), ["a note"])
    assert "| suffix4k | 129088 | 8 | 497,230 | 503,184 | 50.3 % |" in text
    assert "a note" in text
    assert "+20.00 %" in text


def test_the_page_needs_nothing_from_elsewhere() -> None:
    told = page(tables(0.49), [])
    assert "http" not in told
    assert told.count("<svg") == 1 + 4


def test_the_ablation_is_a_geometric_mean_over_cells() -> None:
    one, two = Cell("suffix4k", None, 8), Cell("suffix4k", None, 16)
    shares = ((one, 0.1), (two, 0.4))
    _, rows = ablation(Tables(result(share, *how, cell) for cell, share in shares for how in COMBINATIONS))
    assert rows == [["glm", "suffix4k", "2", "200,000", *["200,000 (1.00 x)"] * 4]]


def test_every_cell_is_played_in_every_way() -> None:
    every = tasks(dict.fromkeys(["glm", "minimax", "k3"]))
    assert len(every) == 68 * 6
    assert len({task.name for task in every}) == len(every)
    first = [(task.mode, task.policy) for task in every[: 2 * 68]]
    assert set(first) == {("overlapped", "adaptive"), ("lockstep", "fixed")}


def test_a_planners_code_is_no_business_of_other_policies() -> None:
    digests = {policy: code("overlapped", policy) for policy in ("fixed", "mpu", "adaptive")}
    assert len(set(digests.values())) == 3
    assert code("lockstep", "fixed") == digests["fixed"]


def test_a_run_goes_on_where_it_was_cut_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Results of this state of the code are kept; a result of another state is said to be one."""
    folder = tmp_path / "virtual"
    folder.mkdir()
    kept = [task for task in tasks({"glm": 2.8}) if task.name.startswith("glm-suffix4k-c8-")]
    for task in kept:
        share = 0.9 if task.policy == "adaptive" else 0.5
        told = result(share, task.mode, task.policy, task.cell)
        (folder / f"{task.name}.json").write_text(json.dumps({"key": task.key, **told}))
    command = [
        "--virtual",
        "--models",
        "glm",
        "--only",
        "glm-suffix4k-c8-",
        "--out",
        str(tmp_path),
        "--round-ms",
        "2.8",
    ]
    assert paper.main(command) == 0
    assert "6 of 6 results are there, 0 of them of another state" in (tmp_path / "report.md").read_text()
    stale = folder / f"{kept[0].name}.json"
    stale.write_text(stale.read_text().replace(kept[0].key, "0" * 16))
    assert paper.main([*command, "--report-only"]) == 0
    assert "1 of them of another state" in (tmp_path / "report.md").read_text()


def test_a_task_is_named_by_its_length_where_the_table_has_several() -> None:
    assert (
        Task("k3", Cell("short_cold", 65_536, 4), "drain", "fixed", None).name == "k3-short_cold-65536-c4-drain-fixed"
    )
