"""The `wavepp` command as a user has it: a process with its own home, temporary folder and output.

Owns starting it, reading it with bounds, and asking which processes it has. Used by tests of `wavepp
up` and of the other commands.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from tests.harness.etcd import is_running
from tests.harness.eventually import eventually_sync

COMMAND_S = 60.0


def home(folder: Path) -> dict[str, str]:
    """An environment in which the command finds and leaves files under `folder` only."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("WAVEPP_", "XDG_", "OTEL_"))}
    (folder / "tmp").mkdir(exist_ok=True)
    own = {name: str(folder / name.lower()) for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME")}
    return kept | own | {"HOME": str(folder), "TMPDIR": str(folder / "tmp"), "COLUMNS": "200", "NO_COLOR": "1"}


def wavepp(
    folder: Path, *arguments: str, stdin: str = "", environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run one command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "wavepp", *arguments],
        input=stdin, capture_output=True, text=True, timeout=COMMAND_S, env=home(folder) | (environment or {}),
    )  # fmt: skip


def json_lines(finished: subprocess.CompletedProcess[str]) -> list[Any]:
    return [json.loads(line) for line in finished.stdout.splitlines()]


class Up:
    """`with Up(tmp_path, "--model", ...) as up`: a running `wavepp up`; its end is checked by the test."""

    def __init__(self, folder: Path, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self.folder = folder
        self._errors = folder / "up.err"
        with self._errors.open("wb") as sink:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "wavepp", "up", "--json", *arguments],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=sink, text=True,
                env=home(folder) | (environment or {}),
            )  # fmt: skip
        self.seen: set[int] = set()
        """Every process it was ever seen to have."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(COMMAND_S)
        assert self.process.stdout is not None
        self.process.stdout.close()

    @property
    def said(self) -> str:
        """What it told the operator so far."""
        return self._errors.read_text(errors="replace")

    def children(self) -> list[psutil.Process]:
        found = psutil.Process(self.process.pid).children(recursive=True)
        self.seen |= {child.pid for child in found}
        return found

    def child(self, argument: str, value: str) -> psutil.Process | None:
        """The child that was started with these two arguments in a row, once it runs them."""
        for child in self.children():
            try:
                line = child.cmdline()
            except psutil.Error:
                continue
            if any(pair == (argument, value) for pair in pairwise(line)):
                return child
        return None

    def serving(self) -> dict[str, Any]:
        """What it prints for programs once the pipeline serves; AssertionError if it ends before."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()  # bounded: up stops by itself after --timeout-s
        assert line, self.said
        facts: dict[str, Any] = json.loads(line)
        self.children()
        return facts

    def signal(self, number: signal.Signals) -> None:
        self.children()
        self.process.send_signal(number)

    def ended(self) -> int:
        """Its exit status."""
        return self.process.wait(COMMAND_S)

    def nothing_is_left(self) -> None:
        """None of its processes lives."""
        eventually_sync(lambda: not any(is_running(pid) for pid in self.seen), about=f"{self.seen} to end")
