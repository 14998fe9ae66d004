"""A CUDA stream beside the one that computes, for one kind of copy; on a CPU, nothing at all.

The rule that it exists for: what one thread queues on the compute stream runs behind whatever another queued
there. A payload that leaves on that stream waits for the whole next wave, and memory that the allocator hands
out there may still be read by kernels of a running wave. So whoever moves data beside the waves (the host
tier, a link's threads, encode and decode) allocates and copies on a stream of its own, and counts a copy as
done when an event behind it is.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

_CUDA: Any = torch.cuda  # its classes carry no types


class SideStream:
    """Any thread may use it, one at a time where it uses `landing`."""

    def __init__(self, device: torch.device) -> None:
        self.lock = threading.Lock()
        """For users that share one: held from `landing` until what lies there was taken."""
        self._stream: Any = _CUDA.Stream(device) if device.type == "cuda" else None
        self._landing: Tensor | None = None

    def on(self) -> AbstractContextManager[object]:
        """Within it, device memory is this stream's and every copy is queued here."""
        return nullcontext() if self._stream is None else _CUDA.stream(self._stream)

    def landing(self, like: Tensor) -> Tensor:
        """Pinned host memory of the shape and type of `like`. The same memory at every call."""
        if self._landing is None or self._landing.nbytes < like.nbytes:
            self._landing = torch.empty(like.nbytes, dtype=torch.uint8, pin_memory=True)
        return self._landing[: like.nbytes].view(like.dtype).view(like.shape)

    def to_host(self, tensor: Tensor) -> Tensor:
        """`tensor`, which must be complete, in host memory: itself there, else in the landing until its next use."""
        return tensor if tensor.device.type == "cpu" else self.move(tensor, self.landing(tensor))

    def move(self, source: Tensor, target: Tensor) -> Tensor:
        """Copy the contents; returns `target` when they are there, whatever other streams do meanwhile."""
        with self.on():
            target.copy_(source, non_blocking=self._stream is not None)
        self.finish()
        return target

    def finish(self) -> None:
        """Returns when all that was queued here is done. Blocks this thread, not the interpreter."""
        if self._stream is not None:
            done = _CUDA.Event(blocking=True)
            done.record(self._stream)
            done.synchronize()
