"""Hosts on this machine: network namespaces with an address each, joined by a bridge of their own.

Owns the namespaces, the bridge (in a namespace too: the machine's own network is never touched) and
the processes started in them. Everything ends with `close`, or with the test's process. Needs root
and `ip`; `why_not` says what is missing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.harness.etcd import is_running
from wavepp_proto.runtime.child import child_argv

KIND = "wavepptest"
NETWORK = "10.213.77"
"""Only inside the namespaces; no packet of it leaves them."""
COMMAND_S = 30.0
STOP_S = 20.0


def why_not() -> str | None:
    """Why no namespaces can be made here; None if they can."""
    if shutil.which("ip") is None:
        return "the ip command is not installed (apt-get install iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = f"{KIND}-{os.getpid()}-probe"
    try:
        _ip("netns", "add", probe)
        _ip("netns", "del", probe)
    except subprocess.CalledProcessError as error:
        return f"network namespaces are refused here: {error.stderr.strip()}"
    return None


class Hosts:
    """`with hosts("a", "b") as them`: each name is a host with `address(name)`."""

    def __init__(self, names: Sequence[str], log_dir: Path) -> None:
        self._numbers = {name: number for number, name in enumerate(names, 1)}
        self._log_dir = log_dir
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._made: list[str] = []

    def open(self) -> None:
        """Make the namespaces and the bridge; `close` undoes it, also when this failed half way."""
        _remove_abandoned()
        self._log_dir.mkdir(parents=True, exist_ok=True)
        switch = f"{KIND}-{os.getpid()}-switch"
        self._made.append(switch)
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge0", "up")
        for name in self._numbers:
            self._plug_in(name, switch)

    def _plug_in(self, name: str, switch: str) -> None:
        """A namespace with loopback and one cable to the bridge."""
        space, port = self._space(name), f"port{self._numbers[name]}"
        self._made.append(space)
        _ip("netns", "add", space)
        _ip("link", "add", "eth0", "netns", space, "type", "veth", "peer", "name", port, "netns", switch)
        _ip("-n", switch, "link", "set", port, "master", "bridge0", "up")
        _ip("-n", space, "link", "set", "lo", "up")
        _ip("-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
        _ip("-n", space, "link", "set", "eth0", "up")

    def address(self, name: str) -> str:
        return f"{NETWORK}.{self._numbers[name]}"

    def start(self, name: str, *command: str) -> None:
        """Run a command on a host until `stop` or the end; its output goes to the host's log."""
        with (self._log_dir / f"{name}.log").open("ab") as sink:
            self._processes[name] = subprocess.Popen(
                child_argv(self._there(name, command)), stdin=subprocess.DEVNULL, stdout=sink, stderr=sink
            )

    def run(self, name: str, *command: str, within_s: float) -> subprocess.CompletedProcess[str]:
        """Run a command on a host to its end."""
        return subprocess.run(self._there(name, command), capture_output=True, text=True, timeout=within_s)

    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self._processes.items()}

    def alive(self) -> bool:
        return all(process.poll() is None for process in self._processes.values())

    def log(self, name: str) -> str:
        return (self._log_dir / f"{name}.log").read_text(errors="replace")

    def stop(self, name: str) -> int:
        """SIGTERM, a bounded wait, SIGKILL; the exit status."""
        process = self._processes.pop(name)
        process.send_signal(signal.SIGTERM)
        try:
            return process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait(STOP_S)

    def close(self) -> None:
        """End every process, remove every namespace (their cables and the bridge go with them)."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait(STOP_S)
        self._processes.clear()
        for space in reversed(self._made):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", space)
        self._made.clear()

    def _space(self, name: str) -> str:
        return f"{KIND}-{os.getpid()}-{name}"

    def _there(self, name: str, command: Sequence[str]) -> list[str]:
        return ["ip", "netns", "exec", self._space(name), *command]


@contextlib.contextmanager
def hosts(names: Sequence[str], log_dir: Path) -> Iterator[Hosts]:
    """Hosts for the time of a test, gone whatever happens in it."""
    made = Hosts(names, log_dir)
    try:
        made.open()
        yield made
    finally:
        made.close()


def _remove_abandoned() -> None:
    """Namespaces of test processes that were killed."""
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True, timeout=COMMAND_S)
    for line in listed.stdout.splitlines():
        space = line.split()[0]
        kind, _, rest = space.partition("-")
        owner = rest.partition("-")[0]
        if kind == KIND and owner.isdecimal() and not is_running(int(owner)):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", space)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=COMMAND_S)
