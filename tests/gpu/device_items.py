"""The item about the device itself: it is there, and it computes."""

from __future__ import annotations

import torch

from tests.gpu.items import Host


def device(host: Host) -> str:
    if not host.cuda:
        return f"cpu, torch {torch.__version__}: the items that need no GPU, as a test of this check"
    found = torch.cuda.get_device_properties(host.device)
    free, total = torch.cuda.mem_get_info(host.device)
    total_seen = torch.ones(1 << 20, device=host.device).sum().item()
    assert total_seen == 1 << 20, f"a sum on the device came to {total_seen}"
    host.figures["gpu"] = {"name": found.name, "capability": f"{found.major}.{found.minor}", "total_bytes": total}
    return f"{found.name}, {free >> 20} of {total >> 20} MiB free, torch {torch.__version__}, CUDA {torch.version.cuda}"
