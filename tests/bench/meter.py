"""What a bench ran on: CPU seconds of named processes and the share of the machine that others took.

Wall times of a shared machine are noise as soon as `others_share` is not near zero; CPU seconds are
not. Used by `admission.py`.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Mapping

import psutil


class Meter:
    """Counts from when it was made. Name this process too (`os.getpid()`) to see what the driver costs."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._processes = {name: psutil.Process(pid) for name, pid in pids.items()}
        self._began = time.perf_counter()
        self._idle_before = _idle_s()
        self._before = {name: _cpu_s(process) for name, process in self._processes.items()}

    def report(self, requests: int) -> dict[str, object]:
        """CPU ms per request by process (stages: their mean), and shares of all CPUs' time."""
        spent = {name: _cpu_s(process) - self._before[name] for name, process in self._processes.items()}
        available = (time.perf_counter() - self._began) * (os.cpu_count() or 1)
        idle = (_idle_s() - self._idle_before) / available
        each = {name: round(seconds * 1e3 / requests, 3) for name, seconds in spent.items()}
        stages = [each.pop(name) for name in list(each) if name.startswith("stage-")]
        total = sum(spent.values())
        return {
            "requests": requests,
            "cpu_ms_per_request": {**each, "stage_mean": round(statistics.mean(stages), 3)},
            "cpu_ms_per_request_all": round(total * 1e3 / requests, 3),
            "idle_share": round(idle, 3),
            "others_share": round(max(0.0, 1 - idle - total / available), 3),
        }


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _idle_s() -> float:
    times = psutil.cpu_times()
    return float(times.idle + getattr(times, "iowait", 0.0))
