"""The whole demo with a tiny random model: success, and that no way out leaves a process behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.harness import tiny_models
from tests.harness.command import home

pytestmark = [pytest.mark.processes, pytest.mark.slow]
WHOLE_S = 280.0
GONE_S = 60.0


@contextmanager
def demo(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The demo with `arguments`; killed at the end of the block if it still runs."""
    model = tiny_models.build("qwen3", folder)
    argv = ["-m", "wavepp.demo", "--model", str(model), "--stages", "2", "--trace-file", str(folder / "t.json")]
    with subprocess.Popen(
        [sys.executable, *argv, *arguments],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=home(folder),
    ) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


def read_until(process: subprocess.Popen[str], line: str) -> None:
    """Read its output up to `line`; it ends by itself otherwise, so this is bounded by the demo's own limits."""
    assert process.stdout is not None
    heard = []
    for text in process.stdout:
        heard.append(text)
        if text.strip() == line:
            return
    raise AssertionError("".join(heard))


def test_demo_succeeds_and_tells_all_when_every_answer_is_exact(tmp_path: Path) -> None:
    with demo(tmp_path, "--json", str(tmp_path / "found.json")) as process:
        output, _ = process.communicate(timeout=WHOLE_S)
    assert process.returncode == 0, output
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["ok"], found["failures"], len(found["prompts"])) == (True, [], 24)
    assert [one["name"].split(" (")[0] for one in found["processes"]] == ["etcd", "controller", "stage 0", "stage 1"]
    pids = {one["pid"] for one in found["processes"]}
    assert len(pids) == 4
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert all(one["version"] for one in found["processes"])
    again = [one for one in found["prompts"] if one["asked_before"]]
    assert [one["first_token"] for one in again] == [
        next(one["first_token"] for one in found["prompts"] if one["prompt"] == repeated["prompt"])
        for repeated in again
    ]
    limited = [one for one in found["prompts"] if one["endpoint"] < one["best_stage_hit"]]
    # others may limit too: a stage that has not yet published a wave that an earlier one has
    assert 1 in {one["limiting_stage"] for one in limited}
    assert set(found["phases_s"]) == {"model", "cluster", "prefill", "shutdown", "timeline", "unsplit model"}
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("phase", "number", "status"),
    [
        ("cluster", signal.SIGINT, 130),
        ("prefill", signal.SIGTERM, 130),
        ("prefill", signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_no_process_is_left_when_the_demo_is_stopped(
    tmp_path: Path, phase: str, number: signal.Signals, status: int
) -> None:
    with demo(tmp_path) as process:
        read_until(process, f"== {phase}")
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(number)
        # Its output ends when the last process that holds it has ended.
        process.communicate(timeout=GONE_S)
    assert process.returncode == status
    assert psutil.wait_procs(children, timeout=GONE_S)[1] == []


def test_demo_says_why_when_it_cannot_run(tmp_path: Path) -> None:
    with demo(tmp_path, "--json", str(tmp_path / "nowhere" / "found.json")) as process:
        output, _ = process.communicate(timeout=WHOLE_S)
    assert process.returncode == 1
    assert f"error: INVALID_REQUEST: cannot write into {tmp_path / 'nowhere'}" in output
