"""A machine that lacks something: no home, no folder for temporary files, an output that is not UTF-8, hostile files in
the current folder. What is optional is gone without; what is needed is named in one line."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from wavepp._paths import cache_dir, log_folder
from wavepp.commands.gathered import build_app
from wavepp.demo.helper_process import run_module
from wavepp.local_cluster import LocalCluster, LocalPlan
from wavepp_proto.errors import EngineFault, InvalidRequest
from wavepp_proto.runtime.scratch_folder import ScratchFolder

ROOT = Path(__file__).parents[2]
PRODUCT = ("client", "controller", "stage_daemon", "simulator", "proto")


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/proc/nowhere")


@pytest.fixture
def no_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nowhere")


@pytest.mark.usefixtures("no_home")
def test_logs_go_to_the_temporary_folder_when_the_home_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    said: list[str] = []
    folder = log_folder("demo-", said.append)
    assert (folder.parent, folder.is_dir()) == (tmp_path, True)
    (line,) = said
    assert line.startswith("cannot make /proc/nowhere/.local/state/wavepp/logs/demo-")
    assert line.endswith(f": logs go to {folder}")


@pytest.mark.usefixtures("no_home", "no_temporary_folder")
def test_what_is_needed_is_named_when_logs_can_go_nowhere() -> None:
    with pytest.raises(InvalidRequest) as caught:
        log_folder("", print)
    assert caught.value.message.endswith(
        "a folder for logs is needed: HOME, XDG_STATE_HOME or TMPDIR that can be written to, or --log-dir"
    )
    assert "\n" not in caught.value.message


@pytest.mark.usefixtures("no_temporary_folder")
def test_scratch_folder_names_the_variable_when_there_is_no_place_for_it() -> None:
    with pytest.raises(InvalidRequest) as caught:
        ScratchFolder("wavepp-etcd")
    assert caught.value.fields["field"] == "TMPDIR"
    assert caught.value.message.startswith("no folder for temporary files, which wavepp-etcd needs: No usable")


def test_home_of_the_user_stands_in_for_the_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for value in ("", "relative"):
        monkeypatch.setenv("HOME", value)
        assert cache_dir().is_absolute()


def test_doctor_tells_of_a_user_without_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "")
    monkeypatch.setattr("wavepp._paths.pwd.getpwuid", nobody)
    asked = CliRunner().invoke(build_app(), ["doctor"], env={"COLUMNS": "300"})
    assert asked.exit_code == 0
    assert "this user has no home folder" in asked.stdout
    cleaned = CliRunner().invoke(build_app(), ["doctor", "--clean"])
    assert (cleaned.exit_code, cleaned.stderr.count("\n")) == (1, 1)
    assert cleaned.stderr.startswith(
        "error: INVALID_REQUEST: this user has no home folder: set HOME, or XDG_CACHE_HOME"
    )


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_output_that_cannot_hold_a_text_shows_it_as_escapes(encoding: str) -> None:
    code = (
        "import typer; from rich.console import Console; from wavepp_proto.runtime.command_line import run_app\n"
        "app = typer.Typer()\n"
        "@app.command()\n"
        "def main(): typer.echo('\\u2192'); Console().print('caf\\u00e9 \\u2192 \\ud800', highlight=False)\n"
        "run_app(app, [])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, timeout=60, env=os.environ | {"PYTHONIOENCODING": encoding}
    )
    wanted = "café → \ud800".encode(encoding, errors="backslashreplace")
    assert (done.returncode, done.stdout.splitlines()[1], done.stderr) == (0, wanted, b"")


async def test_files_in_the_current_folder_are_no_modules_of_a_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`queue.py` or `torch.py` of a user's own project, in whose folder the command is given."""
    ran = tmp_path / "ran"
    for name in ("queue", "torch", "typer", "wavepp_controller", "wavepp_stage", "wavepp"):
        (tmp_path / f"{name}.py").write_text(f"open({str(ran)!r}, 'a').write({name!r})\nraise SystemExit(9)\n")
    monkeypatch.chdir(tmp_path)
    local = LocalCluster(LocalPlan("emulated", "emulated"), tmp_path)
    for module in ("wavepp_controller", "wavepp_stage"):
        child = await local._spawn(module, module, ["--help"])
        assert (await child.process.wait(), ran.exists()) == (0, False), child.tail()
    await local.close()
    with pytest.raises(EngineFault, match=r"wavepp\.demo\.unsplit ended with status"):
        await run_module("wavepp.demo.unsplit", ["nowhere"], tmp_path / "log", print, 60.0)
    assert not ran.exists()


def test_every_python_child_of_the_product_is_started_by_module_argv() -> None:
    starts = re.compile(r"sys\.executable")
    found = {
        str(path.relative_to(ROOT))
        for package in PRODUCT
        for path in (ROOT / package).rglob("*.py")
        if starts.search(path.read_text(encoding="utf-8"))
    }
    assert found == {"proto/wavepp_proto/runtime/child.py"}


def test_text_files_of_the_product_are_utf_8_whatever_the_locale_says() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for package in PRODUCT
        for path in (ROOT / package).rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr in ("read_text", "write_text")
        and not any(given.arg == "encoding" for given in call.keywords)
    ]
    assert found == []
