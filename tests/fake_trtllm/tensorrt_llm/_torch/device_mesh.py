"""The process groups of a rank's neighbours, made once and remembered by the process.

Owns the memory, and the trap in it: what was made for one torch.distributed group is useless for the
next one, and the original hands it out all the same.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar

import torch.distributed as dist

from .._fake import knobs
from ..mapping import Mapping


class DeviceMeshTopologyImpl:
    device_mesh: ClassVar[Any] = None
    """The group that everything was made for."""
    tp_mesh: ClassVar[Any] = None
    """The group of this rank's stage."""


def build_mesh(mapping: Mapping) -> Any:
    """The tensor-parallel group of this rank. All ranks enter together."""
    known = DeviceMeshTopologyImpl
    world = dist.group.WORLD
    if known.device_mesh is None:
        known.device_mesh = world
        for first in range(0, mapping.world_size, mapping.tp_size):
            ranks = list(range(first, first + mapping.tp_size))
            group = dist.new_group(ranks, timeout=timedelta(seconds=knobs.timeout_s()), backend="gloo")
            if mapping.rank in ranks:
                known.tp_mesh = group
    if known.device_mesh is not world:
        raise RuntimeError("the device mesh belongs to a process group that is gone")
    return known.tp_mesh
