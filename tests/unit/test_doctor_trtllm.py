"""What `wavepp doctor --engine trtllm` says and answers, on hosts that lack one thing or another."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from typer.testing import CliRunner

from tests.harness.installed_package import PACKAGE, STAND_IN
from wavepp.commands.gathered import build_app
from wavepp_stage.engine.trtllm import inspection

Row = tuple[bool, str]


def _doctor(monkeypatch: pytest.MonkeyPatch, folder: Path) -> tuple[int, dict[str, Row]]:
    """Status and rows, with the package of this folder."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    asked = CliRunner().invoke(build_app(), ["doctor", "--engine", "trtllm", "--json"])
    rows = json.loads(asked.stdout)
    found = {row["what"]: (row["ok"], row["detail"]) for row in rows}
    assert len(found) == len(rows)
    return asked.exit_code, found


def _package(folder: Path, source: str) -> Path:
    (folder / PACKAGE).mkdir()
    (folder / PACKAGE / "__init__.py").write_text(f"{source}\n")
    return folder


def test_doctor_answers_whatever_the_package_prints_while_it_is_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From Python, from native code, from a child process; in bytes that are no text as well."""
    shutil.copytree(STAND_IN / PACKAGE, tmp_path / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / PACKAGE / "__init__.py").open("a") as file:
        file.write("import os\nprint('[]')\nos.write(1, b'\\xff[]\\n')\nos.system('echo []')\n")
    _, rows = _doctor(monkeypatch, tmp_path)
    assert rows["package"] == (True, "tensorrt_llm 1.4.0rc4+fake; 1.3.0rc26 and newer are served")
    assert rows["names"][0]


def test_doctor_says_that_the_import_ended_the_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = "import os\nos.write(2, b'\\xff\\nno such library\\n')\nos._exit(7)"
    status, rows = _doctor(monkeypatch, _package(tmp_path, source))
    assert (status, rows) == (1, {"inspection": (False, "ended with status 7: no such library")})


def test_doctor_has_one_row_for_the_package_when_it_is_broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status, rows = _doctor(monkeypatch, _package(tmp_path, "import no_such_dependency"))
    said = "its import breaks: ModuleNotFoundError: No module named 'no_such_dependency'"
    assert status == 1
    assert rows["package"] == (False, f"tensorrt_llm is installed, but {said}")
    assert "names" not in rows


def test_doctor_refuses_a_version_that_has_every_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shutil.copytree(STAND_IN / PACKAGE, tmp_path / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / PACKAGE / "__init__.py").open("a") as file:
        file.write("__version__ = '1.0.0'\n")
    status, rows = _doctor(monkeypatch, tmp_path)
    assert status == 1
    assert not rows["package"][0]
    assert rows["package"][1].startswith("tensorrt_llm 1.0.0 is not served")
    assert "1.3.0rc26 and newer are served" in rows["package"][1]
    assert rows["names"][0]


@pytest.mark.parametrize(
    ("count", "visible", "said"),
    [(0, None, None), (1, None, None), (2, None, "(of 0,1)"), (2, "5,7", "(of 5,7)")],
)
def test_several_gpus_are_a_note_that_says_what_to_do(
    count: int, visible: str | None, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "import_module", _torch_with(count))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    findings = {finding.what: finding for finding in inspection._gpus()}
    assert all(finding.ok for finding in findings.values()) is (count > 0)
    note = findings.get("one GPU a daemon")
    assert (note is not None) is (said is not None)
    if note is not None and said is not None:
        assert f"CUDA_VISIBLE_DEVICES {said}" in note.detail


def _torch_with(count: int) -> Callable[[str], ModuleType]:
    torch = ModuleType("torch")
    vars(torch).update(
        __version__="2.13.0",
        version=SimpleNamespace(cuda="13.0"),
        cuda=SimpleNamespace(device_count=lambda: count, get_device_name=lambda index: f"GPU {index}"),
    )
    return {"torch": torch}.__getitem__
