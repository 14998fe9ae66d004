"""The device that an engine computes on: its name, its free memory, and what a thread must know of it.

Owns the only reads of CUDA's state that decide whether a plan can be served. Called by `engine.py` and
`memory.py`; on a CPU nothing here has an effect.
"""

from __future__ import annotations

import torch

from wavepp_proto.errors import EngineFault


def device_of(name: str) -> torch.device:
    """cpu, or one numbered CUDA device: `cuda` means the first. Raises EngineFault where this torch cannot use it."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise EngineFault("unknown device", field="device", value=name, limit="cpu, cuda, cuda:N") from error
    if device.type == "cpu":
        return device
    if device.type != "cuda" or not torch.cuda.is_available():
        raise EngineFault("this torch cannot use the device", field="device", value=name)
    # Numbered, since `cuda` and `cuda:0` are different devices to a comparison.
    numbered = torch.device("cuda", device.index or 0)
    if numbered.index >= (count := torch.cuda.device_count()):
        raise EngineFault("there is no such GPU", field="device", value=name, limit=f"cuda:{count - 1}")
    return numbered


def claim(device: torch.device) -> None:
    """Make it this thread's own, which otherwise opens a context on GPU 0, and float32 mean float32: torch lets
    convolutions round it to 10 bits by default, and an operator's environment may let products."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.allow_tf32 = False
        torch.set_float32_matmul_precision("highest")


def free_bytes(device: torch.device) -> int | None:
    """Free on the device for this process: what nobody has, and what torch's allocator holds unused. None for a CPU."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def first_line(error: BaseException) -> str:
    """Its message without the C++ stack that torch appends."""
    lines = str(error).splitlines()
    return lines[0][:200] if lines else type(error).__name__
