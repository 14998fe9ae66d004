"""Does the installed TensorRT-LLM have what the adapter touches?

Owns the comparison of trtllm_contract.json with a package: names, kinds, parameters. Knows no name itself, so that
the file stays the one list that preflight, stubs and the tests' fake are checked against. Called before every load
(`preflight`, `check_loaded`), by `wavepp doctor --engine trtllm`, and by tests.
"""

from __future__ import annotations

import importlib
import inspect
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from wavepp_proto.errors import EngineFault

CONTRACT = Path(__file__).with_name("trtllm_contract.json")
Entry = Mapping[str, Any]


@cache
def read_contract() -> Mapping[str, Any]:
    parsed: Mapping[str, Any] = json.loads(CONTRACT.read_text(encoding="utf-8"))
    return parsed


def preflight() -> str:
    """The package's version, if it has everything.

    Raises EngineFault that lists all misses: nobody repairs an installation one name at a time."""
    contract = read_contract()
    misses = list(find_misses(contract))
    if misses:
        raise _fault(misses)
    return str(importlib.import_module(contract["package"]).__version__)


def find_misses(contract: Mapping[str, Any]) -> Iterator[str]:
    """One line for each name that is missing or other than described. Imports the package."""
    choices: defaultdict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, entry in contract["entries"].items():
        missing = None if entry.get("optional") else _check_entry(contract, name, entry)
        if "one_of" in entry:
            need, _, way = entry["one_of"].partition(": ")
            choices[need][way] += [missing] if missing else []
        elif missing:
            yield missing
    for need, ways in choices.items():
        if all(ways.values()):
            yield f"{need}: none of its ways is there ({'; '.join(line for lines in ways.values() for line in lines)})"


def check_loaded(instances: Mapping[str, object]) -> None:
    """Look for the attributes that only instances have: objects of a load, by the name of their class.

    Raises EngineFault that lists all misses."""
    contract = read_contract()
    misses = []
    for name, entry in contract["entries"].items():
        owner, attribute = name.split(".")[-2:]
        known = entry["kind"] == "attribute" and "one_of" not in entry and owner in instances
        if known and not hasattr(instances[owner], attribute):
            misses.append(f"{name}: no such attribute")
    if misses:
        raise _fault(misses)


def _fault(misses: list[str]) -> EngineFault:
    return EngineFault(
        f"this TensorRT-LLM is not the one that the adapter knows: {'; '.join(misses)}",
        field="tensorrt_llm",
        value=len(misses),
        limit=0,
    )


def _check_entry(contract: Mapping[str, Any], name: str, entry: Entry) -> str | None:
    """What is wrong with one entry; None if nothing."""
    if entry["kind"] == "attribute":
        return None  # on instances alone: check_loaded
    try:
        found = _resolve(contract, name)
    except Exception as error:  # a package whose import breaks may raise anything
        return f"{name}: {type(error).__name__}: {error}"
    if entry["kind"] in ("value", "property", "member"):
        return None
    if not callable(found):
        return f"{name}: not callable"
    return _check_call(name, found, entry)


def _resolve(contract: Mapping[str, Any], name: str) -> Any:
    moves: Mapping[str, str] = contract.get("moves", {})
    old = next((name.replace(new, before, 1) for new, before in moves.items() if name.startswith(f"{new}.")), None)
    try:
        return _look_up(name)
    except (ImportError, AttributeError):
        if old is None:
            raise
        return _look_up(old)


def _look_up(name: str) -> Any:
    """The longest importable module of a dotted name, then attributes."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:end])
        try:
            found: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not module_name.startswith(error.name):
                raise  # it exists, and something that it imports does not
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(f"no module of {name}")


def _check_call(name: str, found: Any, entry: Entry) -> str | None:
    wanted: list[str] = entry.get("params", [])
    fields = getattr(found, "model_fields", None)
    if entry["kind"] == "fields" and fields is not None:
        missing = [field for field in wanted if field not in fields]
        return f"{name}: no field {', '.join(missing)}" if missing else None
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return None  # native code tells no signature: that it is there must do
    return _check_signature(name, signature, wanted, entry)


def _check_signature(name: str, signature: inspect.Signature, wanted: list[str], entry: Entry) -> str | None:
    parameters = list(signature.parameters.values())
    if entry["kind"] == "method" and parameters and parameters[0].name in ("self", "cls"):
        parameters = parameters[1:]
    kinds = {parameter.kind for parameter in parameters}
    named = {parameter.name for parameter in parameters}
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        missing = [field for field in wanted if field not in named]
        if missing:
            return f"{name}: no parameter {', '.join(missing)}"
    by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    count: int = entry.get("positional", 0)
    if len(by_position) < count and inspect.Parameter.VAR_POSITIONAL not in kinds:
        return f"{name}: takes {len(by_position)} arguments by position, not {count}"
    given = {p.name for p in by_position[:count]} | set(wanted)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    unknown = [field for field in needed if field not in given]
    if unknown and entry["kind"] != "fields":
        return f"{name}: needs {', '.join(unknown)} as well"
    return None
