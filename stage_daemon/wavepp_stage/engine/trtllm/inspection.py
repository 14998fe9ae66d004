"""What this machine has and lacks for the trtllm engine, one finding for each requirement.

Owns the questions, not their wording for people (`wavepp doctor --engine trtllm` shows them). Nothing is started or
loaded; the package is imported, if it is there, because only that tells whether it works with driver and torch.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from wavepp_stage.engine.trtllm import compat
from wavepp_stage.engine.trtllm.contract import find_misses, read_contract

DISTRIBUTION = "tensorrt-llm"
DRIVER_FILE = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True)
class Finding:
    what: str
    ok: bool
    detail: str


def inspect_machine() -> list[Finding]:
    """Package, driver, GPU, and every name of the contract; in the order in which one would repair them."""
    return [_package(), _driver(), *_gpus(), *_names()]


def _package() -> Finding:
    try:
        return Finding("package", True, f"{DISTRIBUTION} {version(DISTRIBUTION)}")
    except PackageNotFoundError:
        pass
    spec = find_spec(read_contract()["package"])
    if spec is None:
        return Finding("package", False, f"{DISTRIBUTION} is not installed: pip install 'wavepp[trtllm]'")
    return Finding("package", True, f"no distribution {DISTRIBUTION}, but a package at {spec.origin}")


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
    """A stage sees one GPU alone: TensorRT-LLM takes its own by rank and count."""
    if find_spec("torch") is None:
        return [Finding("torch", False, "not installed; tensorrt-llm brings the one it was built for")]
    import torch

    built = torch.version.cuda
    found = [
        Finding("torch", built is not None, f"{torch.__version__}, built for {f'CUDA {built}' if built else 'CPU'}")
    ]
    count = torch.cuda.device_count()
    if count == 0:
        return [*found, Finding("GPU", False, "none that torch can use")]
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(count))
    found.append(Finding("GPU", True, names))
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
    detail = f"{count} visible to this process (CUDA_VISIBLE_DEVICES {seen}); a stage daemon must see exactly one"
    return [*found, Finding("one GPU a stage", count == 1, detail)]


def _names() -> list[Finding]:
    """Every name that the adapter touches, with what it is called with."""
    contract = read_contract()
    total = len(contract["entries"])
    if find_spec(contract["package"]) is None:
        return [Finding("names", False, f"{total} names cannot be looked up without the package")]
    compat.prepare_process()
    misses = list(find_misses(contract))
    if not misses:
        return [Finding("names", True, f"all {total} names that the adapter touches")]
    return [Finding("names", False, miss) for miss in misses]
