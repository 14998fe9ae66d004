"""What this machine has and lacks for the trtllm engine, one finding for each requirement.

Owns the questions, not their wording for people (`wavepp doctor --engine trtllm` shows them). Nothing is started or
loaded; package and torch are imported, if they are there, because only that tells whether they work with the driver.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

from wavepp_proto.errors import EngineFault
from wavepp_stage.engine.trtllm import compat
from wavepp_stage.engine.trtllm.contract import check_names, read_contract
from wavepp_stage.engine.trtllm.release import import_module, import_package, served_version

DRIVER_FILE = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Finding:
    what: str
    ok: bool
    detail: str


def inspect_machine() -> list[Finding]:
    """Package and its names, driver, GPU; what is needed and missing is not `ok`, a note is."""
    return [*_package(), _driver(), *_gpus()]


def _package() -> list[Finding]:
    """Version and every name that the adapter touches, with what it is called with; one finding alone where nothing can
    be looked up."""
    compat.prepare_process()
    contract = read_contract()
    try:
        package = import_package(contract)
    except EngineFault as fault:
        return [Finding("package", False, fault.message)]
    findings = []
    try:
        detail = f"{contract['package']} {served_version(package, contract)}"
        findings.append(Finding("package", True, f"{detail}; {contract['oldest']} and newer are served"))
    except EngineFault as fault:
        findings.append(Finding("package", False, fault.message))
    try:
        check_names(contract)
    except EngineFault as fault:
        return [*findings, Finding("names", False, fault.message)]
    return [*findings, Finding("names", True, f"all {len(contract['entries'])} names that the adapter touches")]


def _driver() -> Finding:
    """The kernel module's version, and whether its library can be called."""
    told = DRIVER_FILE.read_text(encoding="utf-8").splitlines()[0] if DRIVER_FILE.is_file() else ""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Finding("driver", False, f"no NVIDIA driver library (libcuda.so.1); kernel module: {told or 'none'}")
    status = int(library.cuInit(0))
    if status:
        return Finding("driver", False, f"cuInit answers {status}; kernel module: {told or 'none'}")
    return Finding("driver", True, told or "libcuda.so.1")


def _gpus() -> list[Finding]:
    """A stage sees one GPU alone: TensorRT-LLM takes its own by rank and count. That a host has more is only a note:
    a daemon is told which one is its own when it is started, and refuses to start otherwise."""
    try:
        torch = import_module("torch")
    except EngineFault as fault:
        return [Finding("torch", False, fault.message)]
    if torch is None:
        return [Finding("torch", False, "not installed; tensorrt-llm brings the one it was built for")]
    built, count = torch.version.cuda, torch.cuda.device_count()
    found = [
        Finding("torch", built is not None, f"{torch.__version__}, built for {f'CUDA {built}' if built else 'CPU'}")
    ]
    if count == 0:
        return [*found, Finding("GPU", False, "none that torch can use")]
    found.append(Finding("GPU", True, ", ".join(torch.cuda.get_device_name(index) for index in range(count))))
    return [*found, _share(count)] if count > 1 else found


def _share(count: int) -> Finding:
    seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
    return Finding(
        "one GPU a daemon",
        True,
        f"note: {count} are visible here, and a daemon that sees several refuses to start. Give each stage daemon one "
        f"in CUDA_VISIBLE_DEVICES (of {seen}), and --device cuda:0; `wavepp up` does so by itself",
    )
