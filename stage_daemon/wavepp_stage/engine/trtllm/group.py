"""The torch.distributed group of one load: every daemon of the pipeline, by place.

Owns meeting and leaving. TensorRT-LLM takes ranks from the process's default group, so there is one at a time, and one
engine in a process. Makes what the ranks of one stage agree through (`rank_rows.py`), on the same store. Called by
`load.py` and `engine.py`, on the executor's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore  # where torch keeps their types

from wavepp_proto.errors import EngineFault
from wavepp_proto.limits import WAVE_TIMEOUT_MS
from wavepp_stage.core.work import WaveWork
from wavepp_stage.engine.base import EnginePlan, StageGroup
from wavepp_stage.engine.bounded_store import BoundedStore, Store
from wavepp_stage.engine.meeting import gather
from wavepp_stage.engine.trtllm.rank_rows import RankRows

STORE_TIMEOUT_S = 10.0
"""For one answer of the store, which otherwise takes well below a millisecond: a crowded machine shall not end a
load."""


class Meeting:
    """Membership in the group of one load; `leave` before the next."""

    def __init__(self, plan: EnginePlan, backend: str, terms: Mapping[str, str]) -> None:
        """Blocks until all have come, or up to the group's time-out. Raises EngineFault, also where not all say the
        same `terms`: what each loads, by field."""
        self._words: BoundedStore | None = None
        self._rows: RankRows | None = None
        self._met = plan.stages * plan.ranks > 1
        if not self._met:
            return
        group = plan.group
        if group is None:
            raise EngineFault("stages load together: the plan has no group", field="group", value="none")
        try:
            self._meet(plan, group, backend, terms)
        except EngineFault:
            self.leave()
            raise
        except Exception as error:  # a store or a backend may raise anything; the caller gets it typed
            self.leave()
            raise EngineFault(f"the stages did not meet: {error}", field="group", value=group.name) from error

    def _meet(self, plan: EnginePlan, group: StageGroup, backend: str, terms: Mapping[str, str]) -> None:
        host, _, port = group.store.rpartition(":")
        timeout, places = timedelta(seconds=group.timeout_s), plan.stages * plan.ranks
        served = TCPStore(host.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=timeout)
        store = PrefixStore(f"trtllm/{group.name}", served)
        arrivals = BoundedStore(store, STORE_TIMEOUT_S)
        try:
            tell_terms(arrivals, plan.place, terms)
            gather(arrivals, group, plan.place)
            compare_terms(arrivals, plan, terms)
        finally:
            arrivals.close()
        dist.init_process_group(backend, store=store, rank=plan.place, world_size=places, timeout=timeout)
        if plan.ranks > 1:
            self._words = BoundedStore(PrefixStore(f"stage {plan.stage}", store), STORE_TIMEOUT_S)
            self._rows = RankRows(self._words, plan.rank, plan.ranks, WAVE_TIMEOUT_MS / 1000)

    def void_anywhere(self, wave: WaveWork, void: int) -> int:
        """Rows that are void on any rank of this stage: within a wave the ranks compute together, or not at all.
        Raises FormationEnded where it is not at all."""
        return void if self._rows is None else self._rows.void_anywhere(wave, void)

    def leave(self, forget: Callable[[], None] = lambda: None) -> None:
        """End the group without waiting for its other members; `forget` drops what others remember of it."""
        self._rows = None
        if self._words is not None:
            self._words.close()
        if self._met and dist.is_initialized():
            dist.destroy_process_group()
            forget()
        self._met = False


def tell_terms(store: Store, place: int, terms: Mapping[str, str]) -> None:
    """Before `gather`, so that all are there behind it."""
    for field, own in terms.items():
        store.set(f"{field}/{place}", own)


def compare_terms(store: Store, plan: EnginePlan, terms: Mapping[str, str]) -> None:
    """Raises EngineFault naming the first place that says other than place 0: the same on all of them."""
    for field in terms:
        said = [store.get(f"{field}/{place}").decode() for place in range(plan.stages * plan.ranks)]
        for place, other in enumerate(said):
            if other != said[0]:
                stage, rank = divmod(place, plan.ranks)
                raise EngineFault(
                    f"all must load with one {field}: stage 0 rank 0 has {said[0]}, stage {stage} rank {rank} {other}",
                    field=field, value=other, limit=said[0],
                )  # fmt: skip
