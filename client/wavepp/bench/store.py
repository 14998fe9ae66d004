"""Cells that were measured, one JSON file each in a folder, so that a long bench can go on where it ended.

Owns reading and writing documents. A cell is done if its file holds the same settings and no failure that nobody
expected; a file of other settings is an error, because one table must not mix two benches. Called by `run.py`.
"""

from __future__ import annotations

import json
import os
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
        path = self._path(name)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            raise InvalidRequest(f"cannot read {path}: {error}", field="out", value=str(path)) from error
        if not _is_cell(found):
            raise InvalidRequest(f"{path} holds no measured cell", field="out", value=str(path), limit=SCHEMA)
        differing = [key for key in settings if found["settings"].get(key) != settings[key]]
        if differing:
            raise InvalidRequest(
                f"{name} was measured in this folder with another {differing[0]}: take another folder",
                field="out", value=str(found["settings"].get(differing[0])), limit=str(settings[differing[0]]),
            )  # fmt: skip
        return None if found["unexpected_failures"] else found

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


def _is_cell(found: Any) -> bool:
    """Whether `done` can tell what was measured."""
    return (
        isinstance(found, dict)
        and found.get("schema") == SCHEMA
        and isinstance(found.get("settings"), dict)
        and isinstance(found.get("unexpected_failures"), int)
    )
