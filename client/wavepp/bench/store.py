"""Cells that were measured, one JSON file each in a folder, so that a long bench can go on where it ended.

Owns reading and writing documents. A cell is done if its file holds the same settings and no failure that nobody
expected; a file of other settings is an error, because one table must not mix two benches. A file that lacks a setting,
written before there was one, does not say what was measured: the cell is measured again. Called by `run.py`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from wavepp._paths import make_writable
from wavepp_proto.errors import InvalidRequest

SCHEMA = 1
Document = dict[str, Any]
"""What JSON holds of a cell, or of a whole bench; made by `run.py`."""


class Store:
    def __init__(self, folder: Path) -> None:
        """Makes the folder. Raises InvalidRequest if nothing can be written there."""
        self.folder = folder
        make_writable("out", folder / "cells")

    def done(self, name: str, settings: Document) -> Document | None:
        """The cell's document if it need not be measured again. Raises InvalidRequest if other settings made it."""
        found = _read(self._path(name))
        if found is None:
            return None
        kept = found["settings"]
        _same(name, kept, {key: value for key, value in settings.items() if key in kept})
        unsaid = any(value is not None and key not in kept for key, value in settings.items())
        return None if unsaid or found["unexpected_failures"] else found

    def others(self, names: Collection[str], shared: Document) -> list[Document]:
        """Cells that earlier benches left here beside `names`, in order of time: the summary keeps them.

        Raises InvalidRequest if one is of another pipeline: its settings are not `shared`."""
        found = [cell for path in sorted((self.folder / "cells").glob("*.json")) if (cell := _read(path)) is not None]
        beside = [cell for cell in found if cell["name"] not in names]
        for cell in beside:
            _same(cell["name"], cell["settings"], shared)
        return sorted(beside, key=lambda cell: str(cell["began"]))

    def put(self, document: Document) -> None:
        self.write(self._path(document["name"]), document)

    def write(self, path: Path, document: Document) -> None:
        """All of it, or nothing. Raises InvalidRequest if the disk does not take it."""
        text = json.dumps(document, separators=(",", ":"), allow_nan=False) + "\n"
        partial = path.with_name(f"{path.name}.partial")
        try:
            partial.write_text(text, encoding="utf-8")
            os.replace(partial, path)
        except OSError as error:
            with suppress(OSError):
                partial.unlink()
            raise InvalidRequest(f"cannot write {path}: {error.strerror}", field="out", value=str(path)) from error

    def _path(self, name: str) -> Path:
        return self.folder / "cells" / f"{name}.json"


def _read(path: Path) -> Document | None:
    """None if there is no such file. Raises InvalidRequest if it holds no cell."""
    try:
        found: Document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"cannot read {path}: {error}", field="out", value=str(path)) from error
    if not _is_cell(found):
        raise InvalidRequest(f"{path} holds no measured cell", field="out", value=str(path), limit=SCHEMA)
    return found


def _same(name: str, found: Document, settings: Document) -> None:
    differing = [key for key in settings if found.get(key) != settings[key]]
    if differing:
        key = differing[0]
        raise InvalidRequest(
            f"{name} was measured in this folder with another {key}: ask for the same, or take another folder (--out)",
            field=key, value=str(settings[key]), limit=str(found.get(key)),
        )  # fmt: skip


def _is_cell(found: Any) -> bool:
    """Whether `done` can tell what was measured."""
    return (
        isinstance(found, dict)
        and found.get("schema") == SCHEMA
        and isinstance(found.get("settings"), dict)
        and isinstance(found.get("name"), str)
        and isinstance(found.get("unexpected_failures"), int)
    )
