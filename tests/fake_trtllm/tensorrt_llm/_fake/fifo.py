"""First-in-first-out transport of activations between neighbours, without names or numbers.

Owns the check that the original lacks: a message tells its shape and type, so that two stages that
disagree fail here instead of reading each other's bytes, and a receive that waits too long fails
instead of hanging. `Pipes` joins ranks inside one process, for tests of one module at a time.
"""

from __future__ import annotations

import queue
from collections import deque
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from . import knobs

_TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64]
_HEADER = 6


def _describe(tensor: torch.Tensor) -> torch.Tensor:
    shape = [*tensor.shape] + [0] * (4 - tensor.dim())
    return torch.tensor([tensor.dim(), *shape, _TYPES.index(tensor.dtype)], dtype=torch.int64)


def _compare(header: torch.Tensor, tensor: torch.Tensor, source: int) -> None:
    sent = header.tolist()
    if sent != _describe(tensor).tolist():
        shape, kind = tuple(sent[1 : 1 + sent[0]]), _TYPES[sent[5]]
        raise RuntimeError(
            f"rank {source} sent {shape} {kind}, the receiver has room for {tuple(tensor.shape)} {tensor.dtype}"
        )


class TorchTransport:
    """Over torch.distributed's default group; a send returns at once and owns a copy until it has left."""

    def __init__(self) -> None:
        self._under_way: deque[tuple[Any, torch.Tensor]] = deque()

    def send(self, tensor: torch.Tensor, dest: int) -> None:
        for part in (_describe(tensor), tensor.detach().clone().contiguous()):
            self._under_way.append((dist.isend(part, dest), part))
        while self._under_way and self._under_way[0][0].is_completed():
            self._under_way.popleft()

    def recv(self, tensor: torch.Tensor, src: int) -> None:
        header = torch.empty(_HEADER, dtype=torch.int64)
        self._wait(dist.irecv(header, src), src)
        _compare(header, tensor, src)
        received = torch.empty_like(tensor).contiguous()
        self._wait(dist.irecv(received, src), src)
        tensor.copy_(received)

    def _wait(self, work: Any, source: int) -> None:
        try:
            work.wait(timedelta(seconds=knobs.timeout_s()))
        except RuntimeError as error:
            raise RuntimeError(f"nothing came from rank {source} in time: {error}") from error


class Pipes:
    """The pipes of one process, for ranks that are threads or take turns: one queue per ordered pair of ranks."""

    def __init__(self) -> None:
        self._queues: dict[tuple[int, int], queue.Queue[torch.Tensor]] = {}

    def _pipe(self, source: int, target: int) -> queue.Queue[torch.Tensor]:
        return self._queues.setdefault((source, target), queue.Queue())

    def end(self, rank: int) -> PipeEnd:
        return PipeEnd(self, rank)

    def put(self, tensor: torch.Tensor, source: int, target: int) -> None:
        self._pipe(source, target).put(tensor.detach().clone())

    def take(self, tensor: torch.Tensor, source: int, target: int) -> None:
        try:
            received = self._pipe(source, target).get(timeout=knobs.timeout_s())
        except queue.Empty:
            raise RuntimeError(f"nothing came from rank {source} in time") from None
        _compare(_describe(received), tensor, source)
        tensor.copy_(received)


class PipeEnd:
    def __init__(self, pipes: Pipes, rank: int) -> None:
        self._pipes = pipes
        self._rank = rank

    def send(self, tensor: torch.Tensor, dest: int) -> None:
        self._pipes.put(tensor, self._rank, dest)

    def recv(self, tensor: torch.Tensor, src: int) -> None:
        self._pipes.take(tensor, src, self._rank)
