"""Ctrl-C ends a `wavepp` command with status 130 and no traceback, however early it comes."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Sends itself SIGINT the moment a module is looked for: no clock decides what the process was doing.
CHILD = """
import os, signal, sys
_, awaited, handler = sys.argv
class Interrupt:
    def find_spec(self, name, *_):
        if name == awaited:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
signal.signal(signal.SIGINT, getattr(signal, handler))
from wavepp.__main__ import main
sys.argv = ["wavepp", "simulate", "plan", "--profile", "glm_5_2_pp4", "--family", "short_cold", "--requests", "1"]
main()
"""


def interrupted(module: str, handler: str = "default_int_handler") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CHILD, module, handler]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    "module", ["wavepp.commands.gathered", "typer", "wavepp_simulator.__main__", "wavepp_simulator.planning"]
)
def test_a_command_ends_quietly_when_it_is_interrupted(module: str) -> None:
    """While commands are gathered, and in the midst of one."""
    ended = interrupted(module)
    assert (ended.returncode, ended.stdout, ended.stderr.strip()) == (130, "", "")


def test_a_command_goes_on_when_interrupts_are_ignored() -> None:
    ended = interrupted("typer", "SIG_IGN")
    assert (ended.returncode, ended.stderr) == (0, "")
