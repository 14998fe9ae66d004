"""Latency models kept between lives of a controller: one JSON file.

Owns the file's shape and when it is written: every half minute while something was learnt, and at the end. A
calibration (a device profile) is read as a seed and never written over: what is learnt then stays in memory.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Mapping
from glob import escape
from pathlib import Path
from typing import Any

from wavepp_controller.core.latency_model import seed_of
from wavepp_controller.core.machine import ANY_PIPELINE
from wavepp_proto.errors import InvalidRequest
from wavepp_proto.profile import Profile
from wavepp_proto.runtime.logs import get_log

log = get_log(__name__)

SCHEMA = 1
SAVE_S = 30.0
MODELS = "latency_models"


class ModelFile:
    """`read` once before anything is learnt, then `keep` as a task, `save` at the end."""

    def __init__(self, path: Path, learnt: Callable[[], Mapping[str, Any]]) -> None:
        self._path, self._learnt = path, learnt
        self._writable = True
        self._saved = ""

    def read(self) -> dict[str, Any]:
        """Models by pipeline; empty if there is no file yet. InvalidRequest if it is something else."""
        try:
            if self._path.exists() and not self._path.is_file():
                raise self._wrong(f"{self._path} is no file")
            text = self._path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise self._wrong(f"cannot read {self._path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise self._wrong(f"{self._path} is no text: {error}") from error
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise self._wrong(f"{self._path} is no JSON: {error}") from error
        if isinstance(document, dict) and isinstance(document.get(MODELS), dict) and document.get("schema") == SCHEMA:
            return dict(document[MODELS])
        profile = Profile.from_json(text)
        self._writable = False
        return {ANY_PIPELINE: seed_of(profile)}

    async def keep(self) -> None:
        """Save now and then, until cancelled."""
        while True:
            await asyncio.sleep(SAVE_S)
            await self.save()

    async def save(self) -> None:
        """Replace the file at once if something was learnt; a disk that is full costs a warning."""
        models = {pipeline: model for pipeline, model in self._learnt().items() if model}
        text = json.dumps({"schema": SCHEMA, MODELS: models}, indent=1, sort_keys=True, allow_nan=False) + "\n"
        if not self._writable or not models or text == self._saved:
            return
        try:
            await asyncio.to_thread(self._write, text)
        except OSError as error:
            log.warning("cannot keep latency models", path=str(self._path), error=str(error))
        else:
            self._saved = text

    def _write(self, text: str) -> None:
        beside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        for left in self._path.parent.glob(f".{escape(self._path.name)}.*"):
            if left != beside and not _lives(left.suffix[1:]):  # a controller was killed while it wrote
                left.unlink(missing_ok=True)
        try:
            beside.write_text(text, encoding="utf-8")
            beside.replace(self._path)
        except OSError:
            beside.unlink(missing_ok=True)
            raise

    def _wrong(self, message: str) -> InvalidRequest:
        return InvalidRequest(message, field="model_file", value=str(self._path))


def _lives(pid: str) -> bool:
    """Whether such a process may be there; what is no number is nobody's of ours."""
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except (PermissionError, ValueError):
        pass
    return True
