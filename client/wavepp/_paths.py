"""Where this user's files lie (XDG), and whether they can be written: before the work, not after it."""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile, mkdtemp

from wavepp_proto.errors import InvalidRequest


def _base(variable: str, fallback: str) -> Path:
    value = os.environ.get(variable, "")
    return Path(value) if value.startswith("/") else _home(variable) / fallback


def _home(instead: str) -> Path:
    """Raises InvalidRequest if this user has no home folder."""
    value = os.environ.get("HOME", "")
    if value.startswith("/"):
        return Path(value)
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError as error:
        message = f"this user has no home folder: set HOME, or {instead}, to a folder that can be written to"
        raise InvalidRequest(message, field="HOME", value=value) from error


def cache_dir() -> Path:
    """Converted models and the like; `wavepp doctor --clean` empties it. Raises InvalidRequest if there is no home."""
    return _base("XDG_CACHE_HOME", ".cache") / "wavepp"


def state_dir() -> Path:
    """Logs, and where the clusters are that `wavepp up` runs. Raises InvalidRequest if there is no home."""
    return _base("XDG_STATE_HOME", ".local/state") / "wavepp"


def log_folder(kind: str, say: Callable[[str], None]) -> Path:
    """A new folder for logs, named by `kind` and the time, under this user's state; where that cannot be written, under
    the folder for temporary files, of which `say` hears. Raises InvalidRequest if neither can be: logs are needed."""
    try:
        # two that start in one second must not share their logs
        folder = state_dir() / "logs" / f"{kind}{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        make_writable("log_dir", folder)
    except InvalidRequest as error:
        try:
            folder = Path(mkdtemp(prefix="wavepp-logs-"))
        except OSError:
            needed = "a folder for logs is needed: HOME, XDG_STATE_HOME or TMPDIR that can be written to, or --log-dir"
            raise InvalidRequest(f"{error.message}; {needed}", field="log_dir") from None
        say(f"{error.message}: logs go to {folder}")
    return folder


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
