"""Every package the product imports is declared, in the core or in the extra of the part that needs it."""

import ast
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OURS = {"wavepp_proto", "wavepp_controller", "wavepp_stage", "wavepp", "wavepp_simulator"}
# Parts that may import an extra when they are themselves imported; everything else must load without any extra.
PARTS = {
    "stage_daemon/wavepp_stage/engine/torch": "torch",
    "stage_daemon/wavepp_stage/engine/trtllm": "trtllm",
}


def normal(name: str) -> str:
    return name.lower().replace("_", "-")


def declared(requirements: list[str]) -> set[str]:
    return {normal(Requirement(text).name) for text in requirements}


CORE = declared(PROJECT["dependencies"])
EXTRAS = {extra: declared(texts) for extra, texts in PROJECT["optional-dependencies"].items()}
EXTRAS["trtllm"] |= {"torch"}  # tensorrt-llm pins the one that it is built for
# Namespaces that several distributions share stand for one of ours; tensorrt_llm is never installed beside the tests.
DISTRIBUTIONS = dict(metadata.packages_distributions()) | {
    "google": ["protobuf"],
    "opentelemetry": ["opentelemetry-api"],
    "tensorrt_llm": ["tensorrt-llm"],
}


def imported(nodes: list[ast.AST]) -> set[str]:
    """Distributions, by normal name, that these nodes import from outside the standard library and outside our tree."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    foreign = names - set(sys.stdlib_module_names) - OURS
    return {normal(DISTRIBUTIONS.get(name, [name])[0]) for name in foreign}


def sources(package_root: str) -> list[Path]:
    return sorted((ROOT / package_root).rglob("*.py"))


ROOTS = ["proto", "controller", "stage_daemon", "client/wavepp", "simulator"]


@pytest.mark.parametrize("root", ROOTS)
def test_import_is_declared_when_it_stands_anywhere(root: str) -> None:
    known = CORE.union(*EXTRAS.values())
    for path in sources(root):
        assert imported(list(ast.walk(ast.parse(path.read_text())))) <= known, path


@pytest.mark.parametrize("root", ROOTS)
def test_import_needs_no_extra_when_it_stands_at_the_top_of_a_module(root: str) -> None:
    for path in sources(root):
        extra = next((extra for part, extra in PARTS.items() if (ROOT / part) in path.parents), None)
        allowed = CORE | (EXTRAS[extra] if extra else set())
        assert imported(list(ast.parse(path.read_text()).body)) <= allowed, path
