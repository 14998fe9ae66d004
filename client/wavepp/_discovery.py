"""Which controller is meant when no address was given: the clusters that `wavepp up` runs here.

Owns one file for each living `wavepp up` of this user, named by its process id, and the choice among them. A file
whose process is gone, or is another one by now, counts for nothing and is removed. Called by the SDK and the commands.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from wavepp._paths import state_dir
from wavepp_proto.errors import InvalidRequest

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
        cluster = _read(path)
        if cluster is None:
            with contextlib.suppress(OSError):
                path.unlink()
        else:
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
    """What a file says, if the process that wrote it lives."""
    try:
        found = RunningCluster(**json.loads(path.read_text(encoding="utf-8")))
        started_s = _started_s(found.pid)
        lives = started_s is not None and abs(started_s - found.started_s) < _SAME_START_S
    except (OSError, ValueError, TypeError):
        return None
    return found if lives else None


def _started_s(pid: int) -> float | None:
    """When a living process began; None if there is none."""
    import psutil  # deferred: an SDK with an address needs none of it

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None
