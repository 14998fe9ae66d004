"""Who this process is among the ranks."""

from __future__ import annotations

import os

import torch.distributed


def mpi_disabled() -> bool:
    return os.environ.get("TLLM_DISABLE_MPI") == "1"


def mpi_rank() -> int:
    """Without MPI the rank in torch.distributed, 0 if there is no group."""
    if not mpi_disabled():
        raise RuntimeError("this stand-in has no MPI: set TLLM_DISABLE_MPI=1 before the import")
    if not torch.distributed.is_initialized():
        return 0
    return torch.distributed.get_rank()
