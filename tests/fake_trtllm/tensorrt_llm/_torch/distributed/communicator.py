"""Collectives of the start-up, and the module's one slot for what carries activations.

Owns `_pp_comm`: any object with `send(tensor, dest=None)` and `recv(tensor, src=None)`. The model
looks it up at each call. Collectives time out: a rank that does not join is an error, not a hang.
"""

from __future__ import annotations

import enum
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..._fake import knobs
from ..._fake.fifo import PipeEnd, TorchTransport
from ..._utils import mpi_disabled
from ...mapping import Mapping


class ReduceOp(enum.IntEnum):
    SUM = 0
    MAX = 2
    MIN = 3


_OPERATIONS: dict[ReduceOp, Any] = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.MAX: dist.ReduceOp.MAX,
    ReduceOp.MIN: dist.ReduceOp.MIN,
}


class Distributed:
    """Collectives over all ranks of a mapping."""

    def __init__(self, mapping: Mapping) -> None:
        self.mapping = mapping

    @classmethod
    def get(cls, mapping: Mapping) -> Distributed:
        if not mpi_disabled():
            raise RuntimeError("this stand-in has no MPI: set TLLM_DISABLE_MPI=1 before the import")
        if mapping.world_size > 1:
            if not dist.is_initialized():
                raise RuntimeError("torch.distributed is not initialised")
            if (dist.get_world_size(), dist.get_rank()) != (mapping.world_size, mapping.rank):
                raise RuntimeError(
                    f"torch.distributed has rank {dist.get_rank()} of {dist.get_world_size()}, "
                    f"the mapping rank {mapping.rank} of {mapping.world_size}"
                )
        return cls(mapping)

    @property
    def local_world_size(self) -> int:
        return min(self.mapping.world_size, self.mapping.gpus_per_node)

    def allreduce(self, obj: int, op: ReduceOp = ReduceOp.SUM) -> int:
        if self.mapping.world_size == 1:
            return obj
        value = torch.tensor([obj], dtype=torch.int64)
        work = dist.all_reduce(value, _OPERATIONS[op], async_op=True)
        try:
            work.wait(timedelta(seconds=knobs.timeout_s()))
        except RuntimeError as error:
            raise RuntimeError(f"not every rank joined the all-reduce in time: {error}") from error
        return int(value.item())

    def barrier(self) -> None:
        self.allreduce(0)


class Transport(Protocol):
    def send(self, tensor: torch.Tensor, dest: int) -> None: ...

    def recv(self, tensor: torch.Tensor, src: int) -> None: ...


class PPCommTorch:
    """To the next stage and from the previous one, in order, without headers."""

    def __init__(self, global_mapping: Mapping, transport: TorchTransport | PipeEnd | None = None) -> None:
        self.mapping = global_mapping
        self._transport: Transport = transport if transport is not None else TorchTransport()

    def send(self, tensor: torch.Tensor, dest: int | None = None) -> None:
        self._transport.send(tensor, self.mapping.next_pp_rank() if dest is None else dest)

    def recv(self, tensor: torch.Tensor, src: int | None = None) -> None:
        self._transport.recv(tensor, self.mapping.prev_pp_rank() if src is None else src)


_pp_comm: Any = None


def init_pp_comm(mapping: Mapping) -> None:
    global _pp_comm
    _pp_comm = PPCommTorch(mapping)


def pp_recv(tensor: torch.Tensor) -> None:
    _pp_comm.recv(tensor)


def pp_send(tensor: torch.Tensor) -> None:
    _pp_comm.send(tensor)
