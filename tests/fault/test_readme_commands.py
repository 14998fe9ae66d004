"""README's command sequences in their own order: with a model, and from a wheel without torch."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import tokenizers
from packaging.requirements import Requirement

from tests.harness import tiny_models
from tests.harness.command import home
from tests.harness.readme_walk import README, ROOT, sequences, walk

pytestmark = pytest.mark.processes

WITH_MODEL, WITHOUT_TORCH = sequences()
DEMO_MODEL = ".cache/wavepp/models/SmolLM2-135M-Instruct-0.1.2"
"""Below HOME, where README's first command looks for what the demo left."""


def test_commands_work_in_their_order_when_the_demo_left_a_model(tmp_path: Path) -> None:
    """A tiny model stands in the demo's place: the commands are README's to the letter."""
    folder = tmp_path / DEMO_MODEL
    shutil.copytree(tiny_models.build("llama", tmp_path / "made"), folder)
    _save_byte_tokenizer(folder / "tokenizer.json")
    ran = walk(WITH_MODEL, Path(sys.executable), tmp_path, home(tmp_path))
    assert [(one.command, one.status) for one in ran if one.status != 0] == [], [one.text for one in ran]
    assert len(ran) == len(WITH_MODEL)


def test_commands_work_in_their_order_when_the_wheel_stands_alone(tmp_path: Path) -> None:
    python = _fresh_environment(tmp_path / "venv", "local")
    environment = home(tmp_path) | {"PATH": "/usr/bin:/bin"}
    bare = subprocess.run([python, "-c", "import torch"], env=environment, capture_output=True, text=True, timeout=60)
    assert "No module named 'torch'" in bare.stderr
    ran = walk(WITHOUT_TORCH, python, tmp_path, environment)
    assert [(one.command, one.status) for one in ran if one.status != 0] == [], [one.text for one in ran]
    assert len(ran) == len(WITHOUT_TORCH)


def test_extra_that_brings_an_etcd_is_named_when_there_is_none(tmp_path: Path) -> None:
    python = _fresh_environment(tmp_path / "venv", None)
    up = subprocess.run(
        [python, "-m", "wavepp", "up", "--model", "emulated:layers=4"],
        env=home(tmp_path) | {"PATH": "/nowhere"}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert up.returncode == 1
    assert "pip install 'wavepp[local]'" in up.stderr.replace("\n", " ")


def test_every_option_in_readme_exists_when_its_command_is_asked(tmp_path: Path) -> None:
    """Commands within the text, with places to fill in: their options at least must be there."""
    named: dict[tuple[str, ...], set[str]] = {}
    for line in re.findall(r"`(wavepp [^`]*)`", README.replace("\n", " ")):
        words = line.split()
        command = tuple(itertools.takewhile(str.isalpha, words[1 : 3 if words[1:2] == ["simulate"] else 2]))
        if command:
            named.setdefault(command, set()).update(word for word in words if re.fullmatch(r"--[a-z-]+", word))
    assert {("controller",), ("stage",), ("up",), ("doctor",), ("simulate", "plan")} <= set(named)
    for command, options in named.items():
        told = subprocess.run(
            [sys.executable, "-m", "wavepp", *command, "--help"],
            env=home(tmp_path), capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert told.returncode == 0, command
        assert sorted(option for option in options if option not in told.stdout) == []


def _save_byte_tokenizer(path: Path) -> None:
    """A token a byte: any text fits a vocabulary of 512."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.save(str(path))


def _fresh_environment(folder: Path, extra: str | None) -> Path:
    """An environment as `pip install 'wavepp[extra]'` makes it, without a network: our wheel, and what it requires
    taken from this environment. Returns its Python."""
    wheels = folder.parent / "wheel"
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(wheels)]
    subprocess.run([*command, str(ROOT)], check=True, timeout=120)
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (own,) = metadata.distributions(name="wavepp", path=[str(site)])
    wanted, taken = _needs(own, extra), set[str]()
    while wanted:
        name, of_it = wanted.pop()
        if (key := f"{name}[{of_it}]") in taken:
            continue
        taken.add(key)
        found = metadata.distribution(name)
        _link(found, site)
        wanted += _needs(found, of_it)
    return folder / "bin" / "python"


def _needs(of: metadata.Distribution, extra: str | None) -> list[tuple[str, str | None]]:
    """(distribution, extra of it) that `of` requires on this machine."""
    found: list[tuple[str, str | None]] = []
    for requirement in map(Requirement, of.requires or ()):
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra or ""}):
            found += [(requirement.name, None), *((requirement.name, one) for one in requirement.extras)]
    return found


def _link(found: metadata.Distribution, site: Path) -> None:
    for file in found.files or ():
        if file.parts[0] != ".." and "__pycache__" not in file.parts:
            target = site / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            target.symlink_to(Path(str(found.locate_file(file))).resolve())
