"""README's command sequences, run as a reader would: in order, `wavepp up` in one terminal, the rest in another.

Owns reading the sequences from README and running one of them in a folder of its own. The tests say which Python
runs them and what must come of it.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.harness.eventually import eventually_sync

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMAND_S = 120.0


def sequences() -> list[list[str]]:
    """The fenced blocks of `wavepp` commands, each line without its comment."""
    blocks = re.findall(r"```\n(wavepp .*?)```", README, re.DOTALL)
    return [[line.partition("#")[0].strip() for line in block.splitlines()] for block in blocks]


@dataclass(frozen=True, slots=True)
class Ran:
    command: str
    status: int
    text: str
    """Both outputs."""


def walk(commands: Sequence[str], python: Path, folder: Path, home: Mapping[str, str]) -> list[Ran]:
    """Run a sequence in `folder`, which looks like a checkout; a `wavepp up` runs until the next one, or the end.

    An `up` that ends before it serves, or with another status than 0 after Ctrl-C, is in the result as it ended."""
    for name in ("DESIGN.md", "tests"):
        (folder / name).symlink_to(ROOT / name)
    ran: list[Ran] = []
    up: subprocess.Popen[bytes] | None = None
    said = folder / "up.log"
    try:
        for command in commands:
            program, *arguments = shlex.split(command)
            assert program == "wavepp", command
            arguments = [os.path.join(home["HOME"], one[2:]) if one.startswith("~/") else one for one in arguments]
            line = [str(python), "-m", "wavepp", *arguments]
            if arguments[0] != "up":
                done = subprocess.run(
                    line, cwd=folder, env=home, stdin=subprocess.DEVNULL, timeout=COMMAND_S,
                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                )  # fmt: skip
                ran.append(Ran(command, done.returncode, done.stdout))
                continue
            if up is not None:
                ran.append(_stopped(up, said))
            with said.open("wb") as sink:
                up = subprocess.Popen(
                    line, cwd=folder, env=home, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT
                )
            eventually_sync(partial(_serves_or_ended, up, said), within=COMMAND_S)
    finally:
        if up is not None:
            ran.append(_stopped(up, said))
    return ran


def _serves_or_ended(up: subprocess.Popen[bytes], said: Path) -> bool:
    return "Ctrl-C stops" in said.read_text() or up.poll() is not None


def _stopped(up: subprocess.Popen[bytes], said: Path) -> Ran:
    """Ctrl-C, and what came of it."""
    if up.poll() is None:
        up.send_signal(signal.SIGINT)
    try:
        status = up.wait(COMMAND_S)
    except subprocess.TimeoutExpired:
        up.kill()
        status = up.wait()
    return Ran("wavepp up", status, said.read_text())
