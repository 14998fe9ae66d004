"""Does the installed TensorRT-LLM have what the adapter touches?

Owns the comparison of trtllm_contract.json with a package: names, kinds, parameters. Knows no name itself, so that
the file stays the one list that preflight, stubs and the tests' fake are checked against. Called before every load
(`preflight`, `check_loaded`), by `wavepp doctor --engine trtllm`, and by tests.
"""

from __future__ import annotations

import inspect
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from wavepp_proto.errors import EngineFault
from wavepp_stage.engine.trtllm.release import cause_of, import_module, import_package, served_version

CONTRACT = Path(__file__).with_name("trtllm_contract.json")
Entry = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Miss:
    """One name that is missing or other than described."""

    where: str
    """The first part of its path that is not as described: a module or a class takes all its names with it."""
    why: str
    name: str = ""
    """What to call it where `where` is not the name itself."""


@cache
def read_contract() -> Mapping[str, Any]:
    parsed: Mapping[str, Any] = json.loads(CONTRACT.read_text(encoding="utf-8"))
    return parsed


def preflight() -> str:
    """The package's version, if it is one that is served and has everything.

    Raises EngineFault, of one line when the package is missing, broken or too old. Otherwise it lists all misses:
    nobody repairs an installation one name at a time."""
    contract = read_contract()
    version = served_version(import_package(contract), contract)
    check_names(contract)
    return version


def check_names(contract: Mapping[str, Any]) -> None:
    """Raises EngineFault that lists all misses. Imports the package."""
    misses = list(find_misses(contract))
    if misses:
        raise _fault(contract, misses)


def find_misses(contract: Mapping[str, Any]) -> Iterator[Miss]:
    """Everything that is missing or other than described. Raises EngineFault when a module is there but broken: then
    its names say nothing, and a second import of it may say anything."""
    choices: defaultdict[str, dict[str, list[Miss]]] = defaultdict(lambda: defaultdict(list))
    for name, entry in contract["entries"].items():
        missing = None if entry.get("optional") else _check_entry(contract, name, entry)
        if "one_of" in entry:
            need, _, way = entry["one_of"].partition(": ")
            choices[need][way] += [missing] if missing else []
        elif missing:
            yield missing
    for need, ways in choices.items():
        if not all(ways.values()):
            continue
        lacking = [miss for misses in ways.values() for miss in misses]
        if all(miss.name for miss in lacking):
            yield from lacking  # a module or class that is gone took all ways with it
        else:
            yield Miss(need, f"none of its ways is there ({list_misses(lacking)})")


def list_misses(misses: list[Miss]) -> str:
    """All of them, each once: under the module or class that is gone, if that is why."""
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for miss in misses:
        groups[f"{miss.where}: {miss.why}"] += [miss.name] if miss.name else []
    return "; ".join(f"{reason} ({', '.join(names)})" if names else reason for reason, names in groups.items())


def check_loaded(instances: Mapping[str, object]) -> None:
    """Look for the attributes that only instances have: objects of a load, by the name of their class.

    Raises EngineFault that lists all misses."""
    contract = read_contract()
    misses = []
    for name, entry in contract["entries"].items():
        owner, attribute = name.split(".")[-2:]
        known = entry["kind"] == "attribute" and "one_of" not in entry and owner in instances
        if known and not hasattr(instances[owner], attribute):
            misses.append(Miss(name, "no such attribute"))
    if misses:
        raise _fault(contract, misses)


def _fault(contract: Mapping[str, Any], misses: list[Miss]) -> EngineFault:
    package, total = contract["package"], len(contract["entries"])
    return EngineFault(
        f"{len(misses)} of the {total} names that the adapter uses are missing or changed in this {package}: "
        f"{list_misses(misses)}",
        field=package,
        value=len(misses),
        limit=0,
    )


def _check_entry(contract: Mapping[str, Any], name: str, entry: Entry) -> Miss | None:
    """What is wrong with one entry; None if nothing."""
    if entry["kind"] == "attribute":
        return None  # on instances alone: check_loaded
    try:
        found = _resolve(contract, name)
    except _GoneError as gone:
        own = name.split(".")[-2:] if entry["kind"] in ("method", "property", "member") else name.split(".")[-1:]
        return Miss(gone.where, gone.why, "" if gone.whole else ".".join(own))
    if entry["kind"] in ("value", "property", "member"):
        return None
    why = _check_call(found, entry) if callable(found) else "not callable"
    return Miss(name, why) if why else None


class _GoneError(Exception):
    """A part of a dotted name is not there."""

    def __init__(self, parts: list[str], end: int, why: str) -> None:
        super().__init__(why)
        self.where, self.depth, self.why, self.whole = ".".join(parts[:end]), end, why, end == len(parts)


def _resolve(contract: Mapping[str, Any], name: str) -> Any:
    moves: Mapping[str, str] = contract.get("moves", {})
    old = next((name.replace(new, before, 1) for new, before in moves.items() if name.startswith(f"{new}.")), None)
    try:
        return _look_up(name)
    except _GoneError as here:
        if old is None:
            raise
        try:
            return _look_up(old)
        except _GoneError as there:
            raise max(here, there, key=lambda gone: gone.depth) from None  # the place where more of it is


def _look_up(name: str) -> Any:
    """Modules of a dotted name as far as there are any, then attributes."""
    parts = name.split(".")
    end, found = 0, None
    while end < len(parts) - 1 and (module := import_module(".".join(parts[: end + 1]))) is not None:
        end, found = end + 1, module
    for place in range(end, len(parts)):
        try:
            found = getattr(found, parts[place])
        except AttributeError:
            raise _GoneError(parts, place + 1, "not there") from None
        except Exception as error:  # a module may look for its names when they are asked for
            raise _GoneError(parts, place + 1, cause_of(error)) from None
    return found


def _check_call(found: Any, entry: Entry) -> str | None:
    wanted: list[str] = entry.get("params", [])
    fields = getattr(found, "model_fields", None)
    if entry["kind"] == "fields" and fields is not None:
        missing = [field for field in wanted if field not in fields]
        return f"no field {', '.join(missing)}" if missing else None
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return None  # native code tells no signature: that it is there must do
    return _check_signature(signature, wanted, entry)


def _check_signature(signature: inspect.Signature, wanted: list[str], entry: Entry) -> str | None:
    parameters = list(signature.parameters.values())
    if entry["kind"] == "method" and parameters and parameters[0].name in ("self", "cls"):
        parameters = parameters[1:]
    kinds = {parameter.kind for parameter in parameters}
    named = {parameter.name for parameter in parameters}
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        missing = [field for field in wanted if field not in named]
        if missing:
            return f"no parameter {', '.join(missing)}"
    by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    count: int = entry.get("positional", 0)
    if len(by_position) < count and inspect.Parameter.VAR_POSITIONAL not in kinds:
        return f"takes {len(by_position)} arguments by position, not {count}"
    given = {p.name for p in by_position[:count]} | set(wanted)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    unknown = [field for field in needed if field not in given]
    if unknown and entry["kind"] != "fields":
        return f"needs {', '.join(unknown)} as well"
    return None
