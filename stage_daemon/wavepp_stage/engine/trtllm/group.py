"""The torch.distributed group of one load: every daemon of the pipeline, by place.

Owns meeting and leaving. TensorRT-LLM takes ranks from the process's default group, so there is one at a time, and one
engine in a process. Also the small exchange among the ranks of one stage that its own collectives presuppose: which
rows all of them can run. Called by `load.py` and `engine.py`, on the executor's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore  # where torch keeps their types

from wavepp_proto.errors import EngineFault
from wavepp_proto.limits import MAX_LANES, WAVE_TIMEOUT_MS
from wavepp_stage.engine.base import EnginePlan, StageGroup
from wavepp_stage.engine.meeting import gather

_WORD = 32
"""Bits of one exchanged number: all of them positive."""


class Meeting:
    """Membership in the group of one load; `leave` before the next."""

    def __init__(self, plan: EnginePlan, backend: str) -> None:
        """Blocks until all have come, or up to the group's time-out. Raises EngineFault."""
        self._ranks: dist.ProcessGroup | None = None
        self._met = plan.stages * plan.ranks > 1
        if not self._met:
            return
        group = plan.group
        if group is None:
            raise EngineFault("stages load together: the plan has no group", field="group", value="none")
        try:
            self._meet(plan, group, backend)
        except EngineFault:
            self.leave()
            raise
        except Exception as error:  # a store or a backend may raise anything; the caller gets it typed
            self.leave()
            raise EngineFault(f"the stages did not meet: {error}", field="group", value=group.name) from error

    def _meet(self, plan: EnginePlan, group: StageGroup, backend: str) -> None:
        host, _, port = group.store.rpartition(":")
        timeout, places = timedelta(seconds=group.timeout_s), plan.stages * plan.ranks
        served = TCPStore(host.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=timeout)
        store = PrefixStore(f"trtllm/{group.name}", served)
        gather(store, group, plan.place)
        dist.init_process_group(backend, store=store, rank=plan.place, world_size=places, timeout=timeout)
        if plan.ranks == 1:
            return
        wait = timedelta(milliseconds=WAVE_TIMEOUT_MS)
        for stage in range(plan.stages):
            ranks = list(range(stage * plan.ranks, (stage + 1) * plan.ranks))
            made = dist.new_group(ranks, timeout=wait, backend="gloo")  # every daemon takes part in making each
            if stage == plan.stage:
                self._ranks = made

    def void_anywhere(self, void: int) -> int:
        """Rows that are void on any rank of this stage: within a wave the ranks compute together, or not at all."""
        if self._ranks is None:
            return void
        words = [void >> at & (1 << _WORD) - 1 for at in range(0, MAX_LANES, _WORD)]
        told = torch.tensor(words, dtype=torch.int64)
        dist.all_reduce(told, op=dist.ReduceOp.BOR, group=self._ranks)
        return sum(int(word) << index * _WORD for index, word in enumerate(told.tolist()))

    def leave(self, forget: Callable[[], None] = lambda: None) -> None:
        """End the group without waiting for its other members; `forget` drops what others remember of it."""
        self._ranks = None
        if self._met and dist.is_initialized():
            dist.destroy_process_group()
            forget()
        self._met = False
