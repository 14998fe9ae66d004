"""The host tier of one stage's paged cache: pools in host memory, and copies to and from the device.

A block is kept whole: K and V of all attention layers of the band lie side by side, so that it crosses the
bus in one piece. A copy goes through a staging buffer on the device, a bounded number of blocks at a time:

    device pools [blocks, ...] per layer, K and V  <- index copies ->  staging [n, 2 * layers, ...]
    staging  <- one copy per run of consecutive host blocks ->  host pool [host_blocks, 2 * layers, ...]

On CUDA the host pool is pinned, and everything runs on a stream of its own, beside the kernels of a wave.
Owns no policy: which blocks are copied, and when, comes with each lot. Called by `engine.py` on the
daemon's copy thread, one lot at a time.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wavepp_proto.errors import EngineFault
from wavepp_stage.engine.base import CopyDirection, CopyLot
from wavepp_stage.engine.torch.paged_cache import PagedCache
from wavepp_stage.engine.torch.side_stream import SideStream

STAGING_BYTES = 32 * 1024 * 1024
"""Of device memory, unless one block is larger: enough for the bus to run at full speed."""
Ids = npt.NDArray[np.int64]

_CUDA: Any = torch.cuda  # its classes carry no types


class HostTier:
    """Host blocks [0, host_blocks) of the cache that it was made for."""

    def __init__(self, cache: PagedCache, host_blocks: int, device: torch.device) -> None:
        self.blocks = host_blocks
        self._cache = cache
        self._device = device
        self._pools = cache.pools
        self._side = SideStream(device)
        shape = (len(self._pools), *self._pools[0].shape[1:]) if self._pools else (0,)
        dtype = self._pools[0].dtype if self._pools else torch.uint8
        self._staged = min(host_blocks, max(1, STAGING_BYTES // max(1, cache.bytes_per_block)))
        # Filled, not only reserved: memory that is missing fails the load, not a copy.
        self._staging = torch.empty(self._staged, *shape, dtype=dtype, device=device).zero_()
        self._host = torch.empty(host_blocks, *shape, dtype=dtype).zero_()
        if device.type == "cuda" and self._host.nbytes:
            self._pin()

    def copy(self, lot: CopyLot) -> None:
        """Returns when the lot's blocks are where it says.

        Raises EngineFault where an id leaves its pool, or comes twice."""
        device, host = self._check(lot)
        if not self._pools:
            return
        move = self._offload if lot.direction is CopyDirection.OFFLOAD else self._onboard
        # In host order: as many neighbours as there are share one copy.
        order = np.argsort(host)
        host = host[order]
        with self._side.on():
            ids = torch.from_numpy(device[order]).to(self._device)
            for begin in range(0, len(order), self._staged):
                end = begin + self._staged
                move(ids[begin:end], host[begin:end])
        # Before it nothing has to be waited for: earlier waves were complete when the lot was made.
        self._side.finish()

    def _pin(self) -> None:
        """Lock the pool in memory while this object lives, as it is: torch's own pinned allocations grow to the next
        power of two."""
        cudart, address = _CUDA.cudart(), self._host.data_ptr()
        # Of this device: a thread's own default is GPU 0, on which it would open a context of some hundred MB.
        with _CUDA.device(self._device):
            _CUDA.check_error(cudart.cudaHostRegister(address, self._host.nbytes, 0))
        weakref.finalize(self, cudart.cudaHostUnregister, address)

    def _check(self, lot: CopyLot) -> tuple[Ids, Ids]:
        if len(lot.device) != len(lot.host):
            raise EngineFault("a lot pairs device and host blocks", field="lot.host", value=len(lot.host),
                              limit=len(lot.device))  # fmt: skip
        limits = {"lot.device": (lot.device, self._cache.blocks), "lot.host": (lot.host, self.blocks)}
        for field, (ids, limit) in limits.items():
            outside = ids[(ids < 0) | (ids >= limit)]
            if len(outside):
                raise EngineFault("block id outside the pool", field=field, value=int(outside[0]), limit=limit)
            ordered = np.sort(ids)
            if len(twice := ordered[1:][ordered[1:] == ordered[:-1]]):
                raise EngineFault("a block twice in one lot", field=field, value=int(twice[0]))
        return lot.device.astype(np.int64), lot.host.astype(np.int64)

    def _offload(self, device: Tensor, host: Ids) -> None:
        for index, pool in enumerate(self._pools):
            torch.index_select(pool, 0, device, out=self._staging[: len(host), index])
        for at, first, count in _runs(host):
            self._host[first : first + count].copy_(self._staging[at : at + count], non_blocking=True)

    def _onboard(self, device: Tensor, host: Ids) -> None:
        for at, first, count in _runs(host):
            self._staging[at : at + count].copy_(self._host[first : first + count], non_blocking=True)
        for index, pool in enumerate(self._pools):
            pool.index_copy_(0, device, self._staging[: len(host), index])


def _runs(ids: Ids) -> Iterator[tuple[int, int, int]]:
    """(index, first id, count) of each run of consecutive ids."""
    bounds = [0, *(np.flatnonzero(np.diff(ids) != 1) + 1).tolist(), len(ids)]
    for begin, end in pairwise(bounds):
        yield begin, int(ids[begin]), end - begin
