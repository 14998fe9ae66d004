"""What README.md shows really runs, and it stays short."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from wavepp.testing import Answer, FakeController

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_example_prints_what_it_says_when_run_against_a_controller() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    with FakeController.sync(answer=Answer(first_token=7, cached_tokens=0)) as controller:
        ran = subprocess.run(
            [sys.executable, "-c", code],
            env={"PATH": "", "WAVEPP_CONTROLLER": controller.address},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert ran.stderr == ""
    assert ran.stdout == "7 0 None\n"


def test_readme_is_short_and_every_path_it_names_exists() -> None:
    assert len(README.splitlines()) <= 180
    named = re.findall(r"`((?:scripts|deploy|client|tests|proto|controller|stage_daemon|simulator)/[\w./-]*)`", README)
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_tests_readme_names_tests_that_exist() -> None:
    named = re.findall(
        r"`((?:unit|property|scenario|conformance|fault|meta)/[\w.*-]+)`", (ROOT / "tests/README.md").read_text()
    )
    assert named
    assert [pattern for pattern in named if not list((ROOT / "tests").glob(pattern))] == []
