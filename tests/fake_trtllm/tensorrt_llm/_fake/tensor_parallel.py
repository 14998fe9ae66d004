"""Heads split over the ranks of one stage, joined again by an all-gather over torch.distributed.

Owns what is split: heads only. Everything else is computed by every rank alike.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._torch.device_mesh import build_mesh
from ..mapping import Mapping
from .paged_attention import TensorParallel


class GlooTensorParallel(TensorParallel):
    def __init__(self, mapping: Mapping) -> None:
        self._rank, self._size = mapping.tp_rank, mapping.tp_size
        self._group: Any = build_mesh(mapping)

    def mine(self, heads: Tensor) -> Tensor:
        if heads.shape[1] % self._size:
            raise ValueError(f"{heads.shape[1]} heads over {self._size} ranks")
        return heads.chunk(self._size, dim=1)[self._rank]

    def all(self, heads: Tensor) -> Tensor:
        parts = [torch.empty_like(heads) for _ in range(self._size)]
        dist.all_gather(parts, heads.contiguous(), group=self._group)
        return torch.cat(parts, dim=2)


def tensor_parallel(mapping: Mapping) -> TensorParallel:
    if mapping.world_size > 1:
        build_mesh(mapping)
    return GlooTensorParallel(mapping) if mapping.tp_size > 1 else TensorParallel()
