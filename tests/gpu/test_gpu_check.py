"""scripts/gpu-check itself: it says that there is no GPU, its items hold where they can run, and a failure counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu import check
from tests.gpu.items import Host, Skip

CUDA_ONLY = {"copies beside waves", "compute time", "memory", "link nccl", "link nccl on one device"}


def verdicts(file: Path) -> dict[str, str]:
    return {item["item"]: item["verdict"] for item in json.loads(file.read_text())["items"]}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nothing_is_checked_and_it_says_so_when_there_is_no_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.main(["--json", str(tmp_path / "found.json")]) == 3
    assert capsys.readouterr().out.startswith("no GPU: ")
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["status"], found["items"]) == (3, [])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_script_ends_with_three_when_there_is_no_gpu() -> None:
    """In this environment: the one that it would make of itself takes minutes."""
    script = Path(__file__).parents[2] / "scripts" / "gpu-check"
    environment = os.environ | {"WAVEPP_GPU_PYTHON": sys.executable}
    ended = subprocess.run([script], env=environment, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout[:8]) == (3, "no GPU: "), ended.stderr


@pytest.mark.processes
@pytest.mark.slow
def test_every_item_that_needs_no_gpu_passes_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = check.main(["--device", "cpu", "--json", str(tmp_path / "found.json")])
    assert status == 0, capsys.readouterr().out
    found = verdicts(tmp_path / "found.json")
    assert list(found) == list(check.ITEMS)
    skipped = {name for name, verdict in found.items() if verdict == "skipped"}
    assert skipped == CUDA_ONLY | {name for name in found if name.startswith("trtllm")}


def test_a_failure_is_told_and_counts_beside_other_verdicts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(host: Host) -> str:
        raise AssertionError("logits differ by 3")

    def elsewhere(host: Host) -> str:
        raise Skip("needs two of them")

    monkeypatch.setattr(check, "ITEMS", {"good": lambda host: "fine", "wrong": wrong, "elsewhere": elsewhere})
    assert check.main(["--device", "cpu", "--json", str(tmp_path / "found.json")]) == 1
    assert verdicts(tmp_path / "found.json") == {"good": "pass", "wrong": "fail", "elsewhere": "skipped"}
    said = capsys.readouterr().out
    assert "AssertionError: logits differ by 3 (test_gpu_check.py:" in said
    assert "1 pass, 1 fail, 1 skipped on cpu" in said


@pytest.mark.gpu
@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
def test_every_item_passes_on_the_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["--json", str(tmp_path / "found.json")]) == 0, capsys.readouterr().out
