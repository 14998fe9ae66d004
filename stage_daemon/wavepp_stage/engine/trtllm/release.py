"""Is the installed TensorRT-LLM there, can it be imported, and is it new enough?

Owns the import of the package and of its modules, with the cause in one line when that breaks, and the comparison of
versions. Which package and which oldest version, trtllm_contract.json says; what is in it, `contract.py` asks.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from wavepp_proto.errors import EngineFault

_VERSION = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?(?:(a|b|rc)(\d+))?(?:\.(dev|post)\d*)?(?:\+.*)?")
_PHASES = ("a", "b", "rc", None)  # None: the release itself
_CAUSE_CHARS = 400


def import_package(contract: Mapping[str, Any]) -> ModuleType:
    """Raises EngineFault when the package is not installed or its import breaks."""
    package = import_module(contract["package"])
    if package is None:
        raise EngineFault(
            f"{contract['distribution']} is not installed: {_advice(contract)}",
            field=contract["package"],
            value="not installed",
            limit=_limit(contract),
        )
    return package


def served_version(package: ModuleType, contract: Mapping[str, Any]) -> str:
    """Raises EngineFault when the package is older than what is served, or tells no version that can be compared."""
    version = getattr(package, "__version__", None)
    found, oldest = _order(str(version)), _order(contract["oldest"])
    if found is None or oldest is None or found < oldest:
        raise EngineFault(
            f"{contract['package']} {version} is not served: {_advice(contract)}",
            field=f"{contract['package']} version",
            value=str(version),
            limit=_limit(contract),
        )
    return str(version)


def import_module(name: str) -> ModuleType | None:
    """None if there is no such module; its parent must be imported.

    Raises EngineFault with the cause when the module is there and its import breaks."""
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # a package whose import breaks may raise anything
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            return None
        raise EngineFault(
            f"{name} is installed, but its import breaks: {cause_of(error)}", field=name, value="broken"
        ) from error


def cause_of(error: BaseException) -> str:
    """One line, whatever a library says in how many."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:_CAUSE_CHARS]


def _advice(contract: Mapping[str, Any]) -> str:
    return f"pip install '.[trtllm]' in a checkout of WavePP; {contract['oldest']} and newer are served"


def _limit(contract: Mapping[str, Any]) -> str:
    return f">={contract['oldest']}"


def _order(version: str) -> tuple[int, ...] | None:
    """What compares as versions do (PEP 440, without epochs; a local part counts for nothing); None if it is none."""
    parts = _VERSION.fullmatch(version)
    if parts is None:
        return None
    major, minor, micro, phase, number, tail = parts.groups()
    before_all = tail == "dev" and phase is None  # 1.3.0.dev1 comes before 1.3.0a0
    rank = -1 if before_all else _PHASES.index(phase)
    return int(major), int(minor), int(micro or 0), rank, int(number or 0), ("dev", None, "post").index(tail)
