"""Which controller is meant when no address was given: the clusters that `wavepp up` runs here.

Owns one file for each living `wavepp up` of this user, named by its process id, and the choice among them. A file
whose process is gone, or is another one by now, counts for nothing and is removed. One that cannot be understood
counts for nothing too, but stays as long as its process may live. Called by the SDK and the commands.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wavepp._paths import state_dir
from wavepp_proto.errors import InvalidRequest
from wavepp_proto.runtime.channels import parse_address

DEFAULT_ADDRESS = "127.0.0.1:7411"
"""Where `wavepp up` listens unless the port is taken."""
_SAME_START_S = 1.0


@dataclass(frozen=True, slots=True)
class RunningCluster:
    address: str
    """host:port of its controller."""
    pid: int
    """Of its `wavepp up`."""
    started_s: float
    """When that process began (seconds since 1970): process ids come again."""
    cluster: str
    model: str

    def __str__(self) -> str:
        return f"{self.address} (cluster {self.cluster}, model {self.model}, pid {self.pid})"


@dataclass(frozen=True, slots=True)
class Choice:
    address: str
    why: str
    """In words, for a person."""


def remember_cluster(address: str, cluster: str, model: str) -> None:
    """Let other commands of this user find this process's cluster. Raises InvalidRequest if that cannot be noted."""
    folder, pid = _folder(), os.getpid()
    found = RunningCluster(address, pid, _started_s(pid) or 0.0, cluster, model)
    path = folder / f"{pid}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".new")
        beside.write_text(json.dumps(asdict(found), allow_nan=False), encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        message = f"cannot write into {folder}: {error.strerror}"
        raise InvalidRequest(message, field="XDG_STATE_HOME", value=str(folder)) from error


def forget_cluster() -> None:
    """Undo `remember_cluster`, if there is anything to undo."""
    with contextlib.suppress(OSError, InvalidRequest):
        (_folder() / f"{os.getpid()}.json").unlink()


def running_clusters() -> list[RunningCluster]:
    """Those of living processes, in order of their addresses."""
    try:
        files = sorted(_folder().glob("*.json"))
    except (OSError, InvalidRequest):
        return []
    found = []
    for path in files:
        if not path.stem.isdecimal():
            continue
        cluster = _read(path)
        if _is_gone(int(path.stem), cluster):
            with contextlib.suppress(OSError):
                path.unlink()
        elif cluster is not None:
            found.append(cluster)
    return sorted(found, key=lambda cluster: cluster.address)


def choose() -> Choice:
    """WAVEPP_CONTROLLER, else the only cluster that runs here, else the default port. Raises InvalidRequest listing the
    clusters if there are several."""
    named = os.environ.get("WAVEPP_CONTROLLER", "")
    if named:
        return Choice(named, "WAVEPP_CONTROLLER")
    found = running_clusters()
    if len(found) > 1:
        raise InvalidRequest(
            f"{len(found)} clusters run here, name one by --controller (in code: address) or WAVEPP_CONTROLLER: "
            + "; ".join(map(str, found)),
            field="controller", limit=1, value=len(found),
        )  # fmt: skip
    if not found:
        return Choice(DEFAULT_ADDRESS, "the default: no `wavepp up` of this user runs here")
    (one,) = found
    return Choice(one.address, f"cluster {one.cluster} of `wavepp up` with pid {one.pid}")


def _folder() -> Path:
    return state_dir() / "running"


def _read(path: Path) -> RunningCluster | None:
    """What a file says; None if it makes no sense. Keys that a later version adds are left alone."""
    try:
        told = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(told, dict) or told.get("pid") != int(path.stem) or not _is_time(told.get("started_s")):
        return None
    address, cluster, model = (told.get(key) for key in ("address", "cluster", "model"))
    if not (isinstance(address, str) and isinstance(cluster, str) and isinstance(model, str)):
        return None
    try:
        parse_address(address)
    except InvalidRequest:
        return None
    return RunningCluster(address, int(path.stem), told["started_s"], cluster, model)


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _is_gone(pid: int, cluster: RunningCluster | None) -> bool:
    """Whether the process that left a file is surely no more. `cluster` tells when it began, if it is known."""
    import psutil  # deferred: an SDK with an address needs none of it

    try:
        started_s = _started_s(pid)
    except psutil.Error:
        return False
    return started_s is None or (cluster is not None and abs(started_s - cluster.started_s) >= _SAME_START_S)


def _started_s(pid: int) -> float | None:
    """When a living process began; None if there is none."""
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.NoSuchProcess:
        return None
