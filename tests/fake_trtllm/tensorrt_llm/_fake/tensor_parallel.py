"""Heads split over the ranks of one stage, joined again by an all-gather over torch.distributed.

Owns the groups: one for each stage, made by all ranks together when a model is loaded.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..mapping import Mapping
from . import knobs
from .paged_attention import TensorParallel


class GlooTensorParallel(TensorParallel):
    def __init__(self, mapping: Mapping) -> None:
        self._rank, self._size = mapping.tp_rank, mapping.tp_size
        self._group: Any = None
        for first in range(0, mapping.world_size, mapping.tp_size):
            ranks = list(range(first, first + mapping.tp_size))
            group = dist.new_group(ranks, timeout=timedelta(seconds=knobs.timeout_s()), backend="gloo")
            if mapping.rank in ranks:
                self._group = group

    def mine(self, heads: Tensor) -> Tensor:
        if heads.shape[1] % self._size:
            raise ValueError(f"{heads.shape[1]} heads over {self._size} ranks")
        return heads.chunk(self._size, dim=1)[self._rank]

    def all(self, heads: Tensor) -> Tensor:
        parts = [torch.empty_like(heads) for _ in range(self._size)]
        dist.all_gather(parts, heads.contiguous(), group=self._group)
        return torch.cat(parts, dim=2)


def tensor_parallel(mapping: Mapping) -> TensorParallel:
    return GlooTensorParallel(mapping) if mapping.tp_size > 1 else TensorParallel()
