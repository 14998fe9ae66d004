"""What a check of a GPU host is made of: items with a verdict each, and what they share.

Owns no check itself. The `*_items.py` hold them, `check.py` runs them. An item raises AssertionError (or
anything) to fail, Skip to say why it does not apply, and returns a line of what it found. Each module of
items imports what its items need when the first of them runs; this one needs nothing beside WavePP.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Skip(Exception):
    """The item does not apply here; says why."""


@dataclass
class Host:
    """Where the items run, and the models that they use (made once)."""

    device: torch.device
    folder: Path
    figures: dict[str, Any] = field(default_factory=dict)
    """For the report: whatever an item measured."""

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def need_cuda(self) -> None:
        if not self.cuda:
            raise Skip("a matter of CUDA alone")

    def gpus(self, count: int) -> list[torch.device]:
        import torch

        self.need_cuda()
        if torch.cuda.device_count() < count:
            raise Skip(f"needs {count} GPUs, there is {torch.cuda.device_count()}")
        return [torch.device("cuda", index) for index in range(count)]

    def model(self, family: str = "llama") -> Path:
        from tests.harness import tiny_models

        return tiny_models.build(family, self.folder)


@dataclass(frozen=True)
class Verdict:
    item: str
    verdict: str
    """pass, fail or skipped."""
    detail: str
    seconds: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


Check = Callable[[Host], str]


def judge(name: str, check: Check, host: Host) -> Verdict:
    began = time.perf_counter()
    try:
        verdict, detail = "pass", check(host)
    except Skip as why:
        verdict, detail = "skipped", str(why)
    except ImportError as error:
        ours = (error.name or "").startswith(("tests", "wavepp"))
        verdict, detail = ("fail", f"ImportError: {error}") if ours else ("skipped", _need(error))
    except Exception as error:  # any failure is a verdict, and the other items still count
        last = traceback.extract_tb(error.__traceback__)[-1]
        verdict = "fail"
        detail = f"{type(error).__name__}: {str(error).strip() or last.line} ({Path(last.filename).name}:{last.lineno})"
    return Verdict(name, verdict, detail, round(time.perf_counter() - began, 2))


def _need(error: ImportError) -> str:
    """What this environment lacks, and in which release of its package, if that is installed."""
    name = error.name or "a module"
    package = name.partition(".")[0]
    try:
        here = f" ({package} {version(package)} is installed)"
    except PackageNotFoundError:
        here = ""
    return f"needs {name}{here}: {error}"
