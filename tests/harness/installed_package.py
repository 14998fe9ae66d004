"""Lets one folder stand for an installed `tensorrt_llm` for the time of a test: real modules, or stubs.

Owns the swap of the process's modules. Stubs are executed as if they were modules, so that ONE check
serves the real package, the stand-in and the stubs; their annotated names count as present.
"""

from __future__ import annotations
import __future__

import importlib
import inspect
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path

PACKAGE = "tensorrt_llm"
ROOT = Path(__file__).resolve().parents[2]
STAND_IN = ROOT / "tests" / "fake_trtllm"
STUBS = ROOT / "stubs"


class _StubLoader(Loader):
    def __init__(self, file: Path) -> None:
        self._file = file

    def exec_module(self, module: types.ModuleType) -> None:
        flags = __future__.annotations.compiler_flag
        exec(compile(self._file.read_text(), str(self._file), "exec", flags, dont_inherit=True), module.__dict__)
        _add_annotated(module)
        for value in list(vars(module).values()):
            if isinstance(value, type) and value.__module__ == module.__name__:
                _add_annotated(value)


def _add_annotated(owner: types.ModuleType | type) -> None:
    """Give `owner` what its annotations announce; a class without a constructor takes them as keywords."""
    names = [name for name in getattr(owner, "__annotations__", {}) if not hasattr(owner, name)]
    for name in names:
        setattr(owner, name, None)
    if names and isinstance(owner, type) and "__init__" not in vars(owner):
        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in names]
        owner.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]


class _StubFinder(MetaPathFinder):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] != PACKAGE:
            return None
        place = self._folder.joinpath(*fullname.split("."))
        package = place / "__init__.pyi"
        file = package if package.exists() else place.with_name(f"{place.name}.pyi")
        if not file.exists():
            return None
        locations = [str(place)] if file is package else None
        return spec_from_file_location(fullname, file, loader=_StubLoader(file), submodule_search_locations=locations)


def _forget() -> dict[str, types.ModuleType]:
    names = [name for name in sys.modules if name.partition(".")[0] == PACKAGE]
    return {name: sys.modules.pop(name) for name in names}


@contextmanager
def installed(folder: Path, *, stubs: bool = False) -> Iterator[None]:
    """`import tensorrt_llm` finds the package in `folder`, made anew; afterwards what was there before."""
    before, path, finders = _forget(), list(sys.path), list(sys.meta_path)
    if stubs:
        sys.meta_path.insert(0, _StubFinder(folder))
    else:
        sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        _forget()
        sys.path[:], sys.meta_path[:] = path, finders
        sys.modules.update(before)
