"""Where a cell was measured: the machine, its processes of ours, and what others took of it.

Owns facts about this host alone. Wall times of a shared machine are noise as soon as `others_share` is not near
zero; CPU seconds are not. Called by `run.py` around the measured part of a cell.
"""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from wavepp import ClusterStatus
from wavepp_proto.runtime.channels import parse_address


@dataclass(frozen=True, slots=True)
class Machine:
    host: str
    cores: int
    memory_gib: float
    system: str
    python: str

    @classmethod
    def here(cls) -> Machine:
        memory = psutil.virtual_memory().total / 2**30
        version = sys.version.split()[0]
        return cls(socket.gethostname(), os.cpu_count() or 1, round(memory, 1), platform.platform(), version)


@dataclass(frozen=True, slots=True)
class Usage:
    """Shares of all CPUs' time, 0..1."""

    ours: float
    """This process and those of the cluster that run on this host."""
    others: float
    idle: float
    processes: int
    """How many are ours here."""
    cores: Mapping[str, float]
    """CPU seconds that each of ours took in a second."""


class Meter:
    """Counts CPU time from when it was made."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        """`pids` by name; this process is counted as `client`."""
        found = {name: _process(pid) for name, pid in {**pids, "client": os.getpid()}.items()}
        self._processes = {name: process for name, process in found.items() if process}
        self._began = time.perf_counter()
        self._idle_before = _idle_s()
        self._before = {name: _cpu_s(process) for name, process in self._processes.items()}

    def usage(self) -> Usage:
        seconds = time.perf_counter() - self._began
        available = seconds * (os.cpu_count() or 1)
        spent = {name: _cpu_s(process) - self._before[name] for name, process in self._processes.items()}
        idle = (_idle_s() - self._idle_before) / available if available else 0.0
        ours = sum(spent.values()) / available if available else 0.0
        each = {name: _share(cpu_s / seconds if seconds else 0.0) for name, cpu_s in spent.items()}
        return Usage(_share(ours), _share(1 - idle - ours), _share(idle), len(self._processes), each)


def pids_here(status: ClusterStatus, controller: str) -> dict[str, int]:
    """Processes of the cluster that run on this host, by name: those whose address is one of ours."""
    own = {"127.0.0.1", "::1", "localhost", socket.gethostname()}
    own |= {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    found = {"controller": status.pid} if parse_address(controller).host in own else {}
    daemons = (daemon for pipeline in status.pipelines for daemon in pipeline.daemons)
    return found | {str(daemon.key): daemon.pid for daemon in daemons if parse_address(daemon.address).host in own}


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def _cpu_s(process: psutil.Process) -> float:
    """0 for a process that has ended: then the share of others is too high, and the cell has failures to show."""
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def _share(value: float) -> float:
    """Clocks of different grain may disagree a little."""
    return round(max(0.0, value), 3)


def _idle_s() -> float:
    times = psutil.cpu_times()
    return float(times.idle + getattr(times, "iowait", 0.0))
