"""Which rank computes what: tensor-parallel ranks within a stage, stages in a row.

Owns the arithmetic only. A rank's stage is rank // tp_size; its layers follow from `pp_partition`, or
from an even split whose first stages get one layer more.
"""

from __future__ import annotations

from itertools import accumulate


class Mapping:
    def __init__(
        self,
        world_size: int = 1,
        rank: int = 0,
        gpus_per_node: int = 8,
        *,
        tp_size: int = 1,
        pp_size: int = 1,
        cp_size: int = 1,
        pp_partition: list[int] | None = None,
        enable_attention_dp: bool = False,
    ) -> None:
        if tp_size * pp_size * cp_size != world_size:
            raise ValueError(f"world_size must equal tp_size*pp_size*cp_size, got {world_size}")
        if cp_size != 1 or enable_attention_dp:
            raise NotImplementedError("context parallelism and attention DP are not part of this stand-in")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be below {world_size}, got {rank}")
        if pp_partition is not None and len(pp_partition) != pp_size:
            raise ValueError(f"pp_partition needs {pp_size} entries, got {pp_partition}")
        self.world_size = world_size
        self.rank = rank
        self.gpus_per_node = gpus_per_node
        self.tp_size = tp_size
        self.pp_size = pp_size
        self.cp_size = cp_size
        self.pp_partition = pp_partition
        self.enable_attention_dp = enable_attention_dp

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp_size

    @property
    def pp_rank(self) -> int:
        return self.rank // self.tp_size

    @property
    def tp_group(self) -> list[int]:
        first = self.pp_rank * self.tp_size
        return list(range(first, first + self.tp_size))

    def has_pp(self) -> bool:
        return self.pp_size > 1

    def is_first_pp_rank(self) -> bool:
        return self.pp_rank == 0

    def is_last_pp_rank(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    def prev_pp_rank(self) -> int:
        """A global rank, as is the next one; the row is a ring."""
        return (self.rank - self.tp_size) % self.world_size

    def next_pp_rank(self) -> int:
        return (self.rank + self.tp_size) % self.world_size

    def pp_layers(self, num_layers: int) -> list[int]:
        counts = self.pp_partition
        if counts is None:
            whole, more = divmod(num_layers, self.pp_size)
            counts = [whole + (stage < more) for stage in range(self.pp_size)]
        if sum(counts) != num_layers:
            raise ValueError(f"pp_partition {counts} does not add up to {num_layers} layers")
        ends = list(accumulate(counts))
        return list(range(ends[self.pp_rank] - counts[self.pp_rank], ends[self.pp_rank]))
