"""scripts/_env.sh on machines that lack something: it names the package and stops; and its stamp saves a second run."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with nothing but the script."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "_env.sh", tmp_path / "scripts")
    return tmp_path


def run(checkout: Path, body: str, python: Path) -> subprocess.CompletedProcess[str]:
    """Run shell code after sourcing _env.sh, with this file as the only interpreter to try."""
    return subprocess.run(
        ["bash", "-c", f"source scripts/_env.sh\n{body}"],
        cwd=checkout,
        env=os.environ | {"WAVEPP_PYTHON": str(python)},
        capture_output=True,
        text=True,
        timeout=60,
    )


def fake_python(checkout: Path, body: str) -> Path:
    path = checkout / "python"
    path.write_text(f"#!/usr/bin/env bash\n{body}\n")
    path.chmod(0o755)
    return path


def test_missing_python_is_named_when_no_interpreter_is_new_enough(checkout: Path) -> None:
    result = run(checkout, "make_venv .venv", fake_python(checkout, "exit 1"))
    assert result.returncode == 2
    assert "apt-get install python3 python3-venv python3-pip" in result.stderr


def test_missing_venv_package_is_named_when_ensurepip_cannot_be_imported(checkout: Path) -> None:
    result = run(checkout, "make_venv .venv", fake_python(checkout, '[[ "$*" != *ensurepip* ]]'))
    assert result.returncode == 2
    assert "apt-get install python3-venv" in result.stderr


def test_missing_pip_package_is_named_when_the_environment_has_none(checkout: Path) -> None:
    result = run(checkout, "make_venv .venv", fake_python(checkout, "exit 0"))
    assert result.returncode == 2
    assert "apt-get install python3-pip" in result.stderr


def test_install_runs_once_when_its_inputs_stay_the_same(checkout: Path) -> None:
    (checkout / "env" / "bin").mkdir(parents=True)
    shutil.copy(fake_python(checkout, "exit 0"), checkout / "env" / "bin" / "python")
    body = "stamped env key-1 echo installing; stamped env key-1 echo installing; stamped env key-2 echo installing"
    result = run(checkout, body, checkout / "python")
    assert result.stdout.split("\n") == ["installing", "up to date", "installing", ""]


def test_install_runs_again_when_the_last_one_failed(checkout: Path) -> None:
    (checkout / "env" / "bin").mkdir(parents=True)
    shutil.copy(fake_python(checkout, "exit 0"), checkout / "env" / "bin" / "python")
    failing = run(checkout, "phase install stamped env key-1 false", checkout / "python")
    assert failing.returncode == 1
    assert "install: FAILED (exit 1)" in failing.stderr
    assert run(checkout, "stamped env key-1 echo installing", checkout / "python").stdout == "installing\n"
