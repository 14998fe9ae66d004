"""What a user installs: one version, one wheel with five typed packages, entry points that resolve."""

import configparser
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import wavepp_proto

ROOT = Path(__file__).resolve().parents[2]
SOURCES = {
    "wavepp_proto": "proto",
    "wavepp_controller": "controller",
    "wavepp_stage": "stage_daemon",
    "wavepp": "client",
    "wavepp_simulator": "simulator",
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def _in_the_build_context() -> list[str]:
    """Top-level names that .dockerignore admits: it excludes all, then names exceptions."""
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert rules[0] == "*"
    return [rule.removeprefix("!") for rule in rules if rule.startswith("!")]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel as the image's build makes it, from what .dockerignore lets in; without a network."""
    context, folder = tmp_path_factory.mktemp("context"), tmp_path_factory.mktemp("wheel")
    for name in _in_the_build_context():
        copy: Callable[..., object] = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, context / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*command, str(context)], check=True, timeout=120)
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_build_context_holds_sources_alone_when_an_image_is_built() -> None:
    """History, environments and results would make the image gigabytes large, and carry what must stay private."""
    assert set(_in_the_build_context()) == {"LICENSE", "README.md", "pyproject.toml", *SOURCES.values()}


@pytest.mark.parametrize("unit", sorted((ROOT / "deploy" / "systemd").glob("*.service")), ids=lambda path: path.name)
def test_unit_has_folders_to_write_into_when_the_system_is_read_only(unit: Path) -> None:
    parsed = configparser.ConfigParser(strict=False, interpolation=None)
    parsed.optionxform = str  # type: ignore[assignment,method-assign]
    parsed.read(unit)
    service = parsed["Service"]
    assert service["ProtectSystem"] == "strict"
    assert (service["StateDirectory"], service["CacheDirectory"]) == ("wavepp", "wavepp")
    assert service["Environment"] == "HOME=/var/lib/wavepp XDG_STATE_HOME=/var/lib XDG_CACHE_HOME=/var/cache"
    assert service["WorkingDirectory"] == "/var/lib/wavepp"


def test_version_has_one_source_when_installed() -> None:
    assert metadata.version("wavepp") == wavepp_proto.__version__
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "proto/wavepp_proto/__init__.py"


def test_wheel_holds_the_five_packages_at_top_level_when_built(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(SOURCES)


@pytest.mark.parametrize(("package", "source"), SOURCES.items())
def test_wheel_holds_every_file_of_a_package_when_built(wheel: zipfile.ZipFile, package: str, source: str) -> None:
    folder = ROOT / source
    files = (path for path in (folder / package).rglob("*") if path.is_file() and path.suffix != ".pyc")
    assert {str(path.relative_to(folder)) for path in files} <= set(wheel.namelist())
    assert f"{package}/py.typed" in wheel.namelist()


def test_wheel_carries_the_contract_and_the_licence_when_built(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    assert [name for name in names if name.startswith("wavepp_proto/v1/") and name.endswith(".proto")]
    assert [name for name in names if name.endswith(".dist-info/licenses/LICENSE")]
    (facts,) = (name for name in names if name.endswith(".dist-info/METADATA"))
    assert "License-Expression: Apache-2.0\n" in wheel.read(facts).decode()


@pytest.mark.parametrize("command", sorted(PROJECT["project"]["entry-points"]["wavepp.commands"]))
def test_subcommand_resolves_when_installed(command: str) -> None:
    (entry,) = metadata.entry_points(group="wavepp.commands", name=command)
    assert callable(entry.load())


def test_exact_versions_satisfy_the_declared_ranges_when_installed_from_constraints() -> None:
    pins = {}
    for line in (ROOT / "constraints" / "linux-cpu.txt").read_text().splitlines():
        if not line.startswith("#"):
            name, version = line.split("==")
            pins[name.lower().replace("_", "-")] = version
    extras = PROJECT["project"]["optional-dependencies"]
    declared = [
        *PROJECT["project"]["dependencies"],
        *extras["local"],
        *extras["torch"],
        *extras["demo"],
        *extras["dev"],
    ]
    for text in declared:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pins[requirement.name.lower().replace("_", "-")]), text
