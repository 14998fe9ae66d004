"""Where this user's files lie (XDG): caches that can be made again, and state of running clusters."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryFile

from wavepp_proto.errors import InvalidRequest

DEFAULT_ADDRESS = "127.0.0.1:7411"
"""Where `wavepp up` listens unless the port is taken."""


def _base(variable: str, fallback: str) -> Path:
    value = os.environ.get(variable, "")
    return Path(value) if value.startswith("/") else Path.home() / fallback


def cache_dir() -> Path:
    """Converted models and the like; `wavepp doctor --clean` empties it."""
    return _base("XDG_CACHE_HOME", ".cache") / "wavepp"


def state_dir() -> Path:
    """Logs and the address of the cluster that `wavepp up` runs."""
    return _base("XDG_STATE_HOME", ".local/state") / "wavepp"


def make_writable(field: str, folder: Path) -> None:
    """Make `folder` unless it is there. Raises InvalidRequest if it cannot be, or no file can be made in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequest(f"cannot make {folder}: {error.strerror}", field=field, value=str(folder)) from error
    check_writable(field, folder)


def check_writable(field: str, folder: Path) -> None:
    """Raise InvalidRequest if no file can be made in `folder`: before the work, not after it."""
    try:
        # Permission bits do not tell: /proc and read-only mounts refuse root too.
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        message = f"cannot write into {folder}: {error.strerror}"
        raise InvalidRequest(message, field=field, value=str(folder)) from error


def check_file(field: str, path: Path) -> None:
    """Raise InvalidRequest if `path` cannot be written: before the work, not after it."""
    if path.is_dir():
        raise InvalidRequest(f"{path} is a folder", field=field, value=str(path))
    check_writable(field, path.parent)


def write_file(field: str, path: Path, text: str) -> None:
    """Write all of a file. Raises InvalidRequest if the disk does not take it."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        message = f"cannot write {path}: {error.strerror}"
        raise InvalidRequest(message, field=field, value=str(path)) from error


@dataclass(frozen=True, slots=True)
class RunningCluster:
    address: str
    pid: int


def _running_file() -> Path:
    return state_dir() / "running.json"


def remember_cluster(address: str) -> None:
    """Let other commands of this user find the controller without being told."""
    path = _running_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(RunningCluster(address, os.getpid())), allow_nan=False))


def forget_cluster() -> None:
    """Undo `remember_cluster` if the file is still ours."""
    found = running_cluster()
    if found is not None and found.pid == os.getpid():
        _running_file().unlink(missing_ok=True)


def running_cluster() -> RunningCluster | None:
    """The cluster that a living `wavepp up` of this user runs, if any."""
    try:
        found = RunningCluster(**json.loads(_running_file().read_text()))
        os.kill(found.pid, 0)
    except (OSError, ValueError, TypeError):
        return None
    return found


def default_address() -> str:
    """WAVEPP_CONTROLLER, else the cluster that runs here, else the default port."""
    named = os.environ.get("WAVEPP_CONTROLLER", "")
    if named:
        return named
    found = running_cluster()
    return found.address if found is not None else DEFAULT_ADDRESS
